"""Runs a command of Slurm with a time limit; if there is no answer, gives the reason in one line."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

from titanlab.system.processes import ask

# Slurm's commands give up after about 10 s (MessageTimeout) and say why; a command that does not is killed.
ANSWER_SECONDS = 15.0
# The accounting database serves many users and is slower.
ACCOUNTING_SECONDS = 30.0
# With these variables users filter and format the output of commands for themselves; they would change ours.
_PERSONAL = ("SACCT_", "SCANCEL_", "SINFO_", "SQUEUE_")
# Do not cut lists of array elements after 64 characters; print times in the format that is parsed here.
_OURS = {"SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of a Slurm command.

    Attributes:
        output: what the command printed; None if it failed or did not answer.
        errors: what it printed to standard error.
        problem: why there is no output, in one line; None if there is output.
        is_here: whether the command is installed.
    """

    output: str | None
    errors: str = ""
    problem: str | None = None
    is_here: bool = True


def ask_slurm(*words: str, seconds: float = ANSWER_SECONDS, environ: Mapping[str, str] | None = None) -> Reply:
    """Run a command of Slurm and wait for its answer.

    Args:
        words: name and arguments of the command.
        seconds: time limit; then the command is killed.
        environ: environment variables; None: those of this process.
    """
    environ = os.environ if environ is None else environ
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        return Reply(output=None, problem=f"there is no {words[0]} on PATH", is_here=False)
    config = environ.get("SLURM_CONF")
    if config is not None and not (os.path.isfile(config) and os.access(config, os.R_OK)):
        # Slurm's commands would look for the file for a minute before they report this.
        return Reply(output=None, problem=f"SLURM_CONF={config} is no file that can be read")
    kept = {name: value for name, value in environ.items() if not name.startswith(_PERSONAL)}
    begin = time.monotonic()
    answer = ask(*words, seconds=seconds, environ={**kept, **_OURS})
    if answer is None:
        return Reply(output=None, problem=f"{words[0]} gave no answer within {seconds:g} s")
    if answer.code:
        # While it retries, it repeats itself; the last lines give the result.
        lines = [" ".join(line.split()) for line in (answer.errors or answer.output).splitlines() if line.strip()]
        message = "; ".join(dict.fromkeys(lines[-2:])) or f"exit code {answer.code}"
        waited = round(time.monotonic() - begin)
        after = f" after {waited} s" if waited else ""
        return Reply(output=None, errors=answer.errors, problem=f"{words[0]} says{after}: {message[:300]}")
    return Reply(output=answer.output, errors=answer.errors)


def accounted_since(since: float, *words: str) -> Reply:
    """The output of sacct for the user's jobs that could start after a time, in seconds since the epoch."""
    # One day earlier, for clocks that differ.
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since - 86_400))
    return ask_slurm("sacct", "--noheader", "--parsable2", f"--starttime={start}", *words, seconds=ACCOUNTING_SECONDS)


def seconds_of(text: str) -> float | None:
    """Slurm's `[DAYS-][HOURS:]MINUTES:SECONDS`; None for other text, such as `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
