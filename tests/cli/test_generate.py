"""`titanlab generate`: what it refuses, what it hands to the sampling, and what it prints."""

import pytest

from titanlab.cli.verbs import call
from titanlab.distributed import Host


@pytest.mark.parametrize(
    ("arguments", "begins", "cure"),
    [
        ("", "arguments=: the following arguments are required: run", "titanlab generate --help"),
        ("nope", "run=nope: fits no run under runs", "train one first"),
        ("<run> --tokens 0", "--tokens=0: must be at least 1", "try 1"),
        ("<run> --tokens many", "--tokens=many: must be a whole number", "titanlab generate --help"),
        ("<run> --temperature nan", "--temperature=nan: must be at least 0", "try 0"),
        ("<run> --seed 99999999999999999999", "--seed=99999999999999999999: must be at most 9,223,372,036,854,775,807", "--help"),
        ("<run> --top-k -1", "--top-k=-1: must be at least 0", "try 0"),
        ("<run> --device tpu", "--device=tpu: is no device", "try cpu or cuda"),
        ("<run> --device cuda", "--device=cuda: this host shows no GPU", "try cpu"),
        ("<run> --prompt def --lengths 3", "arguments=", "titanlab generate --help"),
        ("<run>", "run=<run>: was trained on data without a tokenizer", "data=stdlib"),
        ("<unsaved>", "run=<unsaved>: holds no complete checkpoint", "that has saved one"),
    ],
    ids=str,
)  # fmt: skip
def test_a_sample_that_cannot_be(command, saved_run, arguments, begins, cure):
    if "<unsaved>" in arguments:
        (saved_run / "checkpoints" / "step-00000003").rename(saved_run / "checkpoints" / "step-00000003.part")

    def filled(text):
        return text.replace("<unsaved>", str(saved_run)).replace("<run>", str(saved_run))

    said = command(f"generate {filled(arguments)}")
    assert said.err.startswith(f"error: {filled(begins)}")
    assert cure in said.refusal["cure"]


@pytest.fixture
def sampled(monkeypatch):
    """Stands in for the sampling: it gives these pieces, and keeps what it was called with."""
    calls, pieces = [], ["c", "d é", "f"]

    def sample(folder, prompt, **given):
        calls.append((folder, prompt, given))
        yield from pieces

    monkeypatch.setattr("titanlab.train.generate.generate", sample)
    return calls, pieces


def test_the_prompt_and_its_continuation_are_one_line(saved_run, sampled, capsys):
    assert call(["generate", str(saved_run), "--prompt", "ab "]) == 0
    assert capsys.readouterr().out == "ab cd éf\n"
    sampled[1].clear()
    assert call(["generate", str(saved_run), "--prompt", "ab "]) == 0
    assert capsys.readouterr().out == "ab \n"


def test_flags_are_those_of_the_sampling(saved_run, sampled, here):
    # By its name, in a folder of runs.
    flags = "--runs ../runs --prompt x --tokens 7 --temperature 0 --top-k 0 --seed 3 --device cpu"
    assert call(["generate", saved_run.name, *flags.split()]) == 0
    ((folder, prompt, given),) = sampled[0]
    assert (folder.resolve(), prompt) == (saved_run, "x")
    assert callable(given.pop("warn"))
    assert given == {"tokens": 7, "temperature": 0.0, "top_k": 0, "seed": 3, "device": "cpu"}


def test_the_graphics_card_is_used_where_there_is_one(saved_run, sampled, monkeypatch):
    monkeypatch.setattr("titanlab.cli.weights.this_host", lambda: Host(accelerator="cuda", device="H100", count=1))
    assert call(["generate", str(saved_run), "--device", "cuda"]) == 0
    assert sampled[0][0][2]["device"] == "cuda"


def test_a_folder_of_weights_needs_no_run(sampled, here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    folder = here / "weights"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"")
    assert call(["generate", "~/weights"]) == 0
    assert sampled[0][0][0] == folder
