"""`titanlab` with checkpoints in a store that a package brings, as processes of their own."""

import subprocess
import sys

import pytest

from tests.launch.command import Command
from tests.object_store.running import FOLDER, NAME, package, running
from tests.object_store.server import Fault

TWO = ["parallelism.shard=2", f"checkpoint.folder={FOLDER}", "checkpoint.keep=0"]


@pytest.mark.full
def test_two_ranks_save_to_a_store_and_every_verb_finds_their_checkpoints(tmp_path):
    command = Command(tmp_path)
    (tmp_path / "package").mkdir()
    command.environment["PYTHONPATH"] += f":{package(tmp_path / 'package')}"

    def verb(*arguments, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "titanlab", *map(str, arguments)],
            cwd=tmp_path,
            env=command.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    with running() as server:
        command.environment[NAME] = server.endpoint
        code, _, err = command.run("training.steps=6", "checkpoint.every=2", *TWO)
        assert code == 0, err
        run = command.only_run.path
        assert not list((run / "checkpoints").iterdir())
        assert "emu://" in (run / "config.yaml").read_text()
        listed = verb("checkpoints", run, "--verify")
        assert listed.count("complete, verified") == 3
        started = verb("train", "--from", f"{run}/checkpoints/step-4", "training.steps=8", "name=longer")
        assert "new run from step 4" in started
        (run / "result.json").unlink()
        resumed = verb("resume", run, "--step", 2)
        assert "step-00000004, which is later, is put aside as step-00000004.aside" in resumed
        assert "resumes at step  2" in resumed
        verb("export", run, "--format", "dcp", "--into", tmp_path / "dcp", "--step", 6)
        assert (tmp_path / "dcp" / ".metadata").is_file()
        # The newest is damaged: with one line the run goes on from the one before it.
        (name,) = [name for name in server.store.below("") if f"{run.name}/step-00000006/rank-00001" in name]
        content = server.store.objects[name]
        server.store.objects[name] = content[: len(content) // 2] + b"?" + content[len(content) // 2 + 1 :]
        assert "other bytes than were saved" in verb("checkpoints", run, "--verify", code=1)
        (run / "result.json").unlink()
        assert "goes on from step 4" in verb("resume", run)
        # A store that refuses ends a new run before anything starts.
        server.store.faults = [Fault("PUT", "", "403", -1)]
        code, _, err = command.run("training.steps=6", "name=refused", *TWO)
        assert (code, err.count("\n")) == (1, 1), err
        assert "error: the store cannot be used (emu://" in err
        assert "PermissionError: access denied" in err
