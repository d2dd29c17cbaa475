"""Asking another program, such as git or squeue, for a few lines."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program said.

    Attributes:
        code: its exit code, -N where signal N ended it.
        output, errors: what it printed on each stream, line ends as they came; bytes that are no UTF-8 become �.
    """

    code: int
    output: str
    errors: str

    @property
    def complaint(self) -> str:
        """Why it failed, in one line."""
        return " ".join((self.errors or self.output).split())


def ask(*words: str, seconds: float = 60.0, environ: Mapping[str, str] | None = None) -> Answer | None:
    """Run a program and wait for its end.

    Args:
        words: its name and arguments.
        seconds: how long it may take; then it is killed.
        environ: all of its variables; None: those of this process.

    Returns:
        None where it is not here, cannot be run, or took too long.
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
    """What a program prints, as for `ask`; None also where it fails."""
    answer = ask(*words, seconds=seconds, environ=environ)
    return answer.output if answer is not None and answer.code == 0 else None
