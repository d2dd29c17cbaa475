"""Runs another program, such as git or squeue, and reads its output."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of a program.

    Attributes:
        code: its exit code; -N if signal N ended it.
        output, errors: its standard output and standard error, with unchanged line ends; invalid UTF-8 becomes �.
    """

    code: int
    output: str
    errors: str

    @property
    def complaint(self) -> str:
        """The program's error message, in one line."""
        return " ".join((self.errors or self.output).split())


def ask(*words: str, seconds: float = 60.0, environ: Mapping[str, str] | None = None) -> Answer | None:
    """Run a program and wait for its end.

    Args:
        words: its name and arguments.
        seconds: timeout; then the program is killed.
        environ: all its environment variables; None: those of this process.

    Returns:
        None if the program is missing, cannot run, or takes too long.
    """
    try:
        ended = subprocess.run(words, capture_output=True, timeout=seconds, check=False, env=environ)
    except (OSError, subprocess.SubprocessError):
        return None
    return Answer(
        code=ended.returncode,
        output=ended.stdout.decode(errors="replace"),
        errors=ended.stderr.decode(errors="replace"),
    )


def output_of(*words: str, seconds: float = 60.0, environ: Mapping[str, str] | None = None) -> str | None:
    """The standard output of a program, as for `ask`; None also if it fails."""
    answer = ask(*words, seconds=seconds, environ=environ)
    return answer.output if answer is not None and answer.code == 0 else None
