"""A fake Slurm to put on PATH."""

import contextlib
import functools
import io
import json
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

from titanlab.system import CommandResult

COMMAND = Path(__file__).with_name("command.py")
NAMES = ("sbatch", "srun", "squeue", "sacct", "scancel", "sinfo", "scontrol")


class FakeSlurm:
    """Commands in `folder/bin`, jobs in `folder/jobs`; `environment` is what makes a process use it."""

    def __init__(self, folder: Path, *, partitions: str = "normal* 4\nlarge 16\n") -> None:
        self.folder = folder
        (folder / "jobs").mkdir(parents=True)
        (folder / "bin").mkdir()
        (folder / "partitions").write_text(partitions)
        self.set()
        for name in NAMES:
            path = folder / "bin" / name
            # Without site: it starts in a third of the time.
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -SE {folder / "py" / name} "$@"\n')
            path.chmod(0o755)
            (folder / "py").mkdir(exist_ok=True)
            (folder / "py" / name).symlink_to(COMMAND)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "FAKE_SLURM": str(self.folder)}

    @functools.cached_property
    def _commands(self) -> dict[str, Any]:
        return runpy.run_path(str(COMMAND))

    def answer(self, *words: str, **given: object) -> CommandResult:
        """In place of `run_command`, with `environment` set: a Python for each question takes longer than all else."""
        with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
            code = self._commands["main"](words[0], [*words[1:]])
        return CommandResult(code=code, output=output.getvalue(), errors=errors.getvalue())

    def set(self, **settings) -> None:
        """What it does from now on: `before`, `after`, `refuses`, `times_out`, `silent`, `forgets`, `max_array` …"""
        (self.folder / "settings.json").write_text(json.dumps(settings))

    def jobs(self) -> dict[int, dict]:
        """Every job: flags, script, states of its elements."""
        paths = sorted((self.folder / "jobs").glob("*.json"), key=lambda path: int(path.stem))
        return {int(path.stem): json.loads(path.read_text()) for path in paths}

    def put(self, number: int, state: str, index: int | None = None) -> None:
        """The state of a job from now on, or of one element of it."""
        job = self.jobs()[number]
        job["states"] = [state if index in (None, place) else old for place, old in enumerate(job["states"])]
        (self.folder / "jobs" / f"{number}.json").write_text(json.dumps(job))
