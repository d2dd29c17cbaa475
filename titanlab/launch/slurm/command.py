"""Runs commands of Slurm with a time limit, and reads the forms of its answers.

A process of a job runs scontrol here, or outside its container by the shell of the batch file. Images seldom contain
Slurm's commands, and rarely those of the site's version. A job with a container therefore asks by files: the process
writes the arguments, and a loop in the batch file runs scontrol with them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from titanlab.distributed import QUESTIONS
from titanlab.system import CommandResult, run_command

# Slurm's commands give up after about 10 s (MessageTimeout) and say why; a command that takes longer is killed.
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
        problem: why there is no output, in one line; None if there is output.
    """

    output: str | None
    errors: str = ""
    problem: str | None = None
    is_here: bool = True


def ask_slurm(*words: str, seconds: float = ANSWER_SECONDS, environ: Mapping[str, str] | None = None) -> Reply:
    """Run a command of Slurm and wait for its answer; after the time limit it is killed."""
    environ = os.environ if environ is None else environ
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        return Reply(output=None, problem=f"there is no {words[0]} on PATH", is_here=False)
    config = environ.get("SLURM_CONF")
    if config is not None and not (os.path.isfile(config) and os.access(config, os.R_OK)):
        # Slurm's commands would look for the file for a minute before they report this.
        return Reply(output=None, problem=f"SLURM_CONF={config} is no file that can be read")
    kept = {name: value for name, value in environ.items() if not name.startswith(_PERSONAL)}
    begin = time.monotonic()
    answer = run_command(*words, seconds=seconds, environ={**kept, **_OURS})
    if answer is None:
        return Reply(output=None, problem=f"{words[0]} gave no answer within {seconds:g} s")
    if answer.code:
        # A command repeats its messages while it retries; the last lines give the result.
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


_POLL_SECONDS = 0.2
_NODE_SECONDS = 30.0
# The time zone of a container may differ from the node's.
_FORMAT = {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
# The loop and the batch file ignore signals, which Slurm sends to all processes of an ending job: ranks still save.
_LOOP = """\
trap : TERM
(
  trap '' TERM INT USR1 USR2 XCPU
  cd "$TITANLAB_SCONTROL" || exit
  while kill -0 $$; do
    for question in *.ask; do
      [ -e "$question" ] || continue
      mapfile -t words <"$question"
      rm "$question"
      name=${question%.ask}
      {
        FORMAT scontrol "${words[@]}" >"$name.out" 2>"$name.err"
        echo $? >"$name.part"
        mv "$name.part" "$name.code"
      } &
    done
    sleep 1
  done
) </dev/null >/dev/null 2>&1 &"""


def answering_lines(jobs: Path) -> list[str]:
    """Lines of a batch file that answer the questions of the job's processes, in a folder where the job may write."""
    # Questions of an earlier start of the job must not be answered.
    start = ['rm -rf -- "$TITANLAB_SCONTROL"', 'mkdir -p -- "$TITANLAB_SCONTROL"']
    setting = " ".join(f"{name}={value}" for name, value in _FORMAT.items())
    folder = f'{shlex.quote(str(jobs))}/."$SLURM_JOB_ID"'
    return [f"export {QUESTIONS}={folder}", *start, _LOOP.replace("FORMAT", setting)]


def scontrol(*words: str, seconds: float) -> CommandResult | None:
    """Run scontrol, which prints times in UTC, and wait for its end; None if it is missing or takes too long."""
    folder = os.environ.get(QUESTIONS)
    if folder is not None and (answer := _asked_outside(Path(folder), words, seconds)) is not None:
        return answer
    # Also used if the node of the batch file is lost: the image may contain scontrol.
    return run_command("scontrol", *words, seconds=seconds, environ={**os.environ, **_FORMAT})


def node_address(node: str) -> str | None:
    """The address by which Slurm reaches a node, for networks that do not resolve node names."""
    answer = scontrol("show", "node", "--oneliner", node, seconds=_NODE_SECONDS)
    match = re.search(r"\bNodeAddr=(\S+)", answer.output if answer is not None and answer.code == 0 else "")
    return match[1] if match else None


def _asked_outside(folder: Path, words: tuple[str, ...], seconds: float) -> CommandResult | None:
    name, end = folder / secrets.token_hex(8), time.monotonic() + seconds
    files = {suffix: name.with_suffix(suffix) for suffix in (".ask", ".code", ".out", ".err")}
    try:
        written = name.with_suffix(".new")
        written.write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
        written.rename(files[".ask"])
        while not files[".code"].exists():
            if time.monotonic() > end:
                return None
            time.sleep(_POLL_SECONDS)
        output, errors = (files[suffix].read_text(encoding="utf-8", errors="replace") for suffix in (".out", ".err"))
        return CommandResult(code=int(files[".code"].read_text()), output=output, errors=errors)
    except (OSError, ValueError):
        return None
    finally:
        with contextlib.suppress(OSError):
            for file in files.values():
                file.unlink(missing_ok=True)


# MaxArraySize is at most 4,000,001.
_LARGEST = 4_000_000


def elements_of(text: str) -> list[int]:
    """The elements of an expression, without the brackets and the limit of concurrent jobs (`%4`).

    Other text, such as the `...` of a shortened listing, is skipped.
    """
    elements: list[int] = []
    for part in text.strip("[]").partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        first, last, step = (int(match[1]), int(match[2] or match[1]), int(match[3] or 1)) if match else (0, -1, 1)
        if last <= _LARGEST and step:
            elements += range(first, last + 1, step)
    return elements


def expression_of(elements: Iterable[int]) -> str:
    """The shortest list of ranges for these elements: `0-3,7`."""
    ranges: list[tuple[int, int]] = []
    for element in sorted(set(elements)):
        if ranges and element == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], element)
        else:
            ranges.append((element, element))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def hosts(nodes: str) -> list[str]:
    """The hosts of Slurm's short form: `gpu[03-04,12],n1` → gpu03, gpu04, gpu12, n1; also with several brackets."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^]]*\])+", nodes):
        choices: list[list[str]] = []
        for place, part in enumerate(re.split(r"\[([^]]*)\]", word)):
            # Every second part was inside brackets.
            choices.append([])
            for number in part.split(",") if place % 2 else [part]:
                first, _, last = number.partition("-")
                if place % 2 and first.isdecimal() and (not last or last.isdecimal()):
                    # With leading zeros.
                    choices[-1] += [f"{value:0{len(first)}d}" for value in range(int(first), int(last or first) + 1)]
                else:
                    choices[-1].append(number)
        names += ["".join(chosen) for chosen in itertools.product(*choices)]
    return names
