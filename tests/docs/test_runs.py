"""The commands on runs that the pages show, typed after a real run that was stopped on its way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import commands
from tests.installed_command import titanlab
from tests.until import until

PROGRAM = Path(sys.executable).parent / "titanlab"
# Small, and of one process where the page says nothing else.
SHORT = "training.steps=40 training.seq_len=64 training.validate_every=0 training.log_every=1 checkpoint.every=1"


@pytest.mark.full
def test_a_stopped_run_goes_on_is_sampled_and_goes_out_and_in_again(tmp_path):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = {command.text.partition("  #")[0].strip() for command in commands("README.md")}
    typed = [
        "resume quickstart parallelism.shard=1",
        'generate quickstart --prompt "def "',
        "export quickstart --format hf --into exported",
    ]
    assert {f"titanlab {words}" for words in typed} <= shown
    begun = subprocess.Popen([PROGRAM, "train", "+recipe=quickstart", *SHORT.split()], cwd=tmp_path, env=environ)
    try:
        until(lambda: list(tmp_path.glob("runs/single/quickstart-*/checkpoints/step-*")), 600)
        begun.send_signal(signal.SIGTERM)
        assert begun.wait(600) == 75
    finally:
        begun.kill()
        begun.wait()
    (run,) = (tmp_path / "runs" / "single").iterdir()
    assert json.loads((run / "result.json").read_text())["kind"] == "preempted"

    def types(*words):
        return titanlab(*words, folder=tmp_path, environ=environ, seconds=900)

    types("resume", "quickstart", "parallelism.shard=1")
    assert json.loads((run / "result.json").read_text())["kind"] == "done"
    assert json.loads((run / "attempts" / "2" / "result.json").read_text())["step"] == 40
    assert types("generate", "quickstart", "--prompt", "def ", "--tokens", "8").startswith("def ")
    types("export", "quickstart", "--format", "hf", "--into", "exported")
    # The last line of an import is a command, which trains on from the weights.
    *_, advised = types("import", "exported").splitlines()
    said = types(
        *advised.split()[1:], *SHORT.split(), "training.steps=2", "optimizer.schedule.warmup_steps=1", "world=1"
    )
    assert "done: all steps are done" in said
    assert "single" in types("status")
