"""Asking Slurm: one of its commands, with a time limit, and the reason in a line where it gives no answer."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

from titanlab.system.command import ask

# Slurm's commands give up by themselves after some 10 s (MessageTimeout), and say why; those that do not are ended.
ANSWER_SECONDS = 15.0
# The accounting is a database that many use.
ACCOUNTING_SECONDS = 30.0
# Variables by which a person changes what commands print for them: a filter or a question of theirs is not ours.
_PERSONAL = ("SACCT_", "SCANCEL_", "SINFO_", "SQUEUE_")
# Ids of array elements in full, which are cut off after 64 characters otherwise; times as they are parsed here.
_OURS = {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a command of Slurm said.

    Attributes:
        output: what it printed; None where it failed or did not answer.
        errors: what it printed to standard error.
        problem: why there is no output, in a line; None where there is.
        is_here: whether the command is installed.
    """

    output: str | None
    errors: str = ""
    problem: str | None = None
    is_here: bool = True


def ask_slurm(*words: str, seconds: float = ANSWER_SECONDS, environ: Mapping[str, str] | None = None) -> Reply:
    """Run a command of Slurm and wait for its answer.

    Args:
        words: its name and arguments.
        seconds: how long it may take; then it is killed.
        environ: this process's variables; None: they are read.
    """
    environ = os.environ if environ is None else environ
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        return Reply(output=None, problem=f"there is no {words[0]} on PATH", is_here=False)
    config = environ.get("SLURM_CONF")
    if config is not None and not (os.path.isfile(config) and os.access(config, os.R_OK)):
        # Slurm's commands look for it for a minute before they say so.
        return Reply(output=None, problem=f"SLURM_CONF={config} is no file that can be read")
    kept = {name: value for name, value in environ.items() if not name.startswith(_PERSONAL)}
    begin = time.monotonic()
    answer = ask(*words, seconds=seconds, environ={**kept, **_OURS})
    if answer is None:
        return Reply(output=None, problem=f"{words[0]} gave no answer within {seconds:g} s")
    if answer.code:
        # It repeats itself while it tries again, and says last what came of it.
        lines = [" ".join(line.split()) for line in (answer.errors or answer.output).splitlines() if line.strip()]
        said = "; ".join(dict.fromkeys(lines[-2:])) or f"exit code {answer.code}"
        waited = round(time.monotonic() - begin)
        after = f" after {waited} s" if waited else ""
        return Reply(output=None, errors=answer.errors, problem=f"{words[0]} says{after}: {said[:300]}")
    return Reply(output=answer.output, errors=answer.errors)


def accounted_since(since: float, *words: str) -> Reply:
    """What sacct prints of this person's jobs that could begin after a time, in seconds since the epoch."""
    # Days of grace for clocks that differ.
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 86_400))
    return ask_slurm("sacct", "--noheader", "--parsable2", f"--starttime={start}", *words, seconds=ACCOUNTING_SECONDS)
