"""Every file of a sweep's folder replaced by one from a stranger: no verb runs code, waits for ever, or has a traceback."""

import json
import os
import pickle
import re
import shutil

import pytest
import yaml

from tests.records.test_hang import stored
from tests.sweep.made import Made, begin, end, train
from titanlab.cli import main
from titanlab.records import Outcome, OutcomeKind, RunFolder, write_hang

VERBS = (
    *("resume bad", "generate bad", "export bad --into out", "sync --rebuild bad", "diagnose bad", "checkpoints bad"),
    *("status layouts bad", "status layouts", "retry layouts --all-failed --dry-run", "cancel layouts bad"),
    *("collect layouts", "logs bad --tail 3", "clean --dry-run", "repro bad --dry-run"),
)


class Payload:
    """Unpickled, it touches a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A sweep of one run that hung, with a file of every kind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("titanlab.cli.resume.continue_run", lambda *given, **more: Outcome(kind=OutcomeKind.DONE))
    sweep = Made(tmp_path / "runs")
    run = sweep.run("bad", shard=2)
    begin(run, job={"schema": 1, "job_id": "12", "start": "x"})
    train(run)
    end(run, "crash", cause="planted")
    write_hang(run, 1, stored())
    sweep.submit(run)
    attempt = run.attempt_folder(1)
    (attempt / "failures").mkdir()
    for path in (
        run.path / "tracker.json",
        run.path / "cancel.json",
        attempt / "stop.json",
        attempt / "rendezvous.json",
    ):
        path.write_text('{"schema": 1}')
    for name in ("chosen.json", "saved.json", "failures/rank-0.json"):
        (attempt / name).write_text('{"schema": 1, "step": 1}')
    return sweep.folder.path


def payloads(ran):
    """Contents of a file; None: a named pipe."""
    command = f"touch {ran}"
    names = "abcdefghi"
    laughs = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    laughs += "".join(f"{name}: &{name} [{', '.join([f'*{names[n]}'] * 9)}]\n" for n, name in enumerate(names[1:]))
    return {
        "a pickle": pickle.dumps(Payload(ran)),
        "an object of YAML": f"!!python/object/apply:os.system ['{command}']\n".encode(),
        "a target": json.dumps({"_target_": "os.system", "command": command}).encode(),
        "aliases": laughs.encode(),
        "a list": b"[]",
        "nested": b"[" * 200_000,
        "a number": b'{"schema": ' + b"9" * 5000 + b"}",
        "half of a character": b'{"schema": 1, "kind": "\\ud800", "run": "\\ud800"}',
        "a pipe": None,
    }


@pytest.mark.parametrize("part", [29, pytest.param(3, marks=pytest.mark.full)])
def test_no_verb_trusts_a_file(made, tmp_path, capsys, part):
    ran = tmp_path / "ran"
    kept = shutil.copytree(made, tmp_path / "kept")
    files = sorted(path for path in made.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml"))
    assert len(files) > 18
    faults = []
    for number, path in enumerate(files):
        for place, (name, content) in enumerate(payloads(ran).items()):
            # Each verb meets each content, and most files, if not each of them with each.
            verbs = VERBS[(number + place) % part :: part]
            if not verbs:
                continue
            path.unlink()
            os.mkfifo(path) if content is None else path.write_bytes(content)
            for verb in verbs:
                capsys.readouterr()
                try:
                    code = main(verb.split())
                except Exception as error:
                    faults.append(f"{path.relative_to(made)}: {name}: {verb}: {error!r}")
                    continue
                out, err = capsys.readouterr()
                if ran.exists() or code not in (0, 1, 2) or err.count("\n") != (code == 2) or "Traceback" in out:
                    faults.append(f"{path.relative_to(made)}: {name}: {verb}: {code}: {err}")
            shutil.rmtree(made)
            shutil.copytree(kept, made)
    assert not faults, "\n".join(faults)


# Clears the screen, sets the title, colours, returns to the line's beginning, and turns the direction of the text.
SEQUENCES = "\x1b[2J\x1b]0;owned\x07\x1b[31m\r\x9b31m\u202e"
# Texts that are only shown.
SHOWN = "cause traceback host name phase file function operation activity job_id outcome".split()


def with_sequences(value, key="", *, only=()):
    """JSON with the sequences at the end of each text, or of those of some keys."""
    if isinstance(value, dict):
        return {name: with_sequences(inner, name, only=only) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_sequences(inner, key, only=only) for inner in value]
    return value + SEQUENCES if isinstance(value, str) and (not only or key in only) else value


def rewritten(path, *, only=()):
    def dumped(text):
        return json.dumps(with_sequences(json.loads(text), only=only), ensure_ascii=False)

    if path.suffix == ".yaml":
        path.write_text(json.dumps(with_sequences(yaml.safe_load(path.read_text()), only=only)))
    elif path.suffix == ".jsonl":
        path.write_text("".join(dumped(line) + "\n" for line in path.read_text().splitlines()))
    else:
        path.write_text(dumped(path.read_text()))


def escapes(capsys):
    """What of the output a terminal would obey."""
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", "".join(capsys.readouterr()))


@pytest.mark.parametrize("way", ["shown", "result", "all"])
def test_no_text_of_a_file_controls_the_terminal(made, capsys, way):
    run = made / next(path.name for path in made.iterdir() if path.name.startswith("bad-"))
    end(RunFolder(run), "crash", cause="planted", traceback="Traceback\n  planted", rank=0)
    if way == "result":
        for name in ("hang", "failures"):
            shutil.rmtree(run / "attempts" / "1" / name)
        (run / "logs" / "rank-0.log").write_text(SEQUENCES)
    for path in made.rglob("*"):
        files = ("result.json", "status.json", "env.json", "config.yaml") if way != "all" else (path.name,)
        if path.suffix in (".json", ".jsonl", ".yaml") and path.name in (*files, "rank-0.json"):
            rewritten(path, only=() if way == "all" else SHOWN)
    more = ("status", "status --json", "status layouts --json", "status layouts bad --json", "diagnose bad --json")
    more += (
        "best layouts",
        "report layouts",
        "clean",
        "hosts",
        "workspace layouts --json",
        "train --from bad --cfg job",
    )
    faults = {}
    for verb in (*VERBS, *more):
        capsys.readouterr()
        main(verb.split())
        # A pipe gets the bytes of a log unchanged.
        if (found := escapes(capsys)) and not (way == "result" and verb.startswith("logs")):
            faults[verb] = found
    assert not faults


@pytest.mark.parametrize("verb", VERBS)
def test_no_argument_controls_the_terminal(made, capsys, verb):
    faults = {}
    for place in range(len(verb.split()) + 1):
        words = verb.split()
        words[place:place] = [words.pop(place) + SEQUENCES] if place < len(words) else [SEQUENCES]
        main(words)
        if found := escapes(capsys):
            faults[place] = found
    assert not faults


@pytest.mark.parametrize("flags", [[], ["--cfg", "job"], ["--info"], ["-m", "--info"], ["--help"], ["--dry-run"]])
def test_no_override_controls_the_terminal(made, capsys, flags):
    for override in (f"name='{SEQUENCES}'", f"training.steps={SEQUENCES}", f"+{SEQUENCES}=1", f"--{SEQUENCES}"):
        for verb in ("train",) if flags else ("train", "sweep", "plan"):
            main([verb, *(flags or ["world=x"]), override])
            # A config in a file keeps its values; YAML escapes all but the direction of text.
            assert not set(escapes(capsys)) - {"\u202e" if "--cfg" in flags else ""}, (verb, override)
