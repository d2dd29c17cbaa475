"""The process that encodes: each line of input gets one line of output, also an error."""

from __future__ import annotations

import io
import json
import signal
import sys
from types import SimpleNamespace

import pytest
import tokenizers

from titanlab.data.tokenizers import encoding_worker as module
from titanlab.data.tokenizers.tokenizer import HuggingFaceTokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A byte-level tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    alphabet = {each: number for number, each in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.save(str(path))
    return path


@pytest.fixture
def asked(monkeypatch, file):
    """`asked(request, …)`: the answers, after that to the load; and the timers that were set."""
    timers = []
    monkeypatch.setattr(module.signal, "setitimer", lambda kind, seconds: timers.append((kind, seconds)))

    def ask(*requests, path=file):
        lines = [["load", str(path), 1], *requests]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        module.main()
        answers = sys.stdout.getvalue().splitlines()
        assert len(answers) == len(lines)
        return [json.loads(answer) for answer in answers], timers

    return ask


def test_a_tokenizer_is_loaded_and_encodes_as_it_does_here(asked, file):
    texts = ["", "a b", "中文 é\n", "x" * 1000]
    here = HuggingFaceTokenizer(file, file.read_bytes(), "", watched=False)
    (load, encoded), _ = asked(["encode", texts, 1])
    assert load == ["done", [256, None, None, {}]]
    assert encoded == ["done", [here.encode(text) for text in texts]]
    decoded = [["decode", ids, 1] for ids in encoded[1]]
    assert asked(*decoded)[0][1:] == [["done", text] for text in texts]


def test_an_error_is_an_answer_and_the_process_goes_on(asked):
    """Half of a pair of surrogates is in some JSON, and no tokenizer takes it."""
    answers, _ = asked(["encode", ["\ud800"], 1], ["decode", [10**12], 1], ["encode", ["a"], 1])
    kind, (rule, cure) = answers[1]
    assert (kind, rule.startswith("cannot encode the text (")) == ("refused", True)
    assert cure
    assert answers[2][0] == "refused"
    assert answers[3][0] == "done"


def test_a_file_that_is_no_tokenizer_is_an_answer(asked, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (answer,), _ = asked(path=tmp_path / "tokenizer.json")
    assert answer[0] == "refused"


def test_the_kernel_ends_a_request_that_nobody_waits_for_any_more(asked):
    _, timers = asked(["encode", ["a"], 7.5])
    real = [seconds for kind, seconds in timers if kind == signal.ITIMER_REAL]
    # Later than the caller gives up, and never while the process waits for a request.
    assert real == [1 + module._GRACE, 0, 7.5 + module._GRACE, 0]


def test_a_trial_is_bounded_by_time_of_computing(asked):
    answers, timers = asked(["probe", [["a+", "中"], 2.0], 1])
    assert answers[1] == ["done", None]
    assert [seconds for kind, seconds in timers if kind == signal.ITIMER_PROF] == [2.0, 0]


def test_a_trial_reads_long_runs_of_the_characters_of_the_expressions(monkeypatch):
    texts = []
    worker = module._Worker()
    worker._tokenizer = SimpleNamespace(encode=lambda text: texts.append(text) or [], decode=lambda ids: "")
    monkeypatch.setattr(module.signal, "setitimer", lambda kind, seconds: None)
    worker.probe((["(ß|q)+$"], 1.0))
    for character in "ßq(a0 ":
        assert character * module._RUN in texts[0], character
    # A file with thousands of expressions makes no text without end.
    worker.probe((["".join(map(chr, range(0x4E00, 0x6000)))], 1.0))
    assert len(texts[1]) < 60 * module._RUN
