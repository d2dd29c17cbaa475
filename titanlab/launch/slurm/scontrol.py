"""scontrol, as a process of a job runs it: here, or outside its container by the shell of the batch file.

Images seldom contain Slurm's commands, and rarely those of the site's version. A job with a container therefore asks
by files: the process writes the arguments, and a loop in the batch file runs scontrol with them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from titanlab.system.processes import Answer, ask

# Environment variable: the folder in which the batch file looks for questions.
QUESTIONS = "TITANLAB_SCONTROL"
_POLL_SECONDS = 0.2
_NODE_SECONDS = 30.0
# The time zone of a container may differ from the node's.
_FORMAT = {"TZ": "UTC", "SLURM_TIME_FORMAT": "standard"}
# It and the batch file ignore signals, which Slurm sends to every process of a job that ends: the ranks save meanwhile.
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
    """Lines of a batch file that answer the questions of the job's processes.

    Args:
        jobs: folder in which the job may write.
    """
    # Questions of an earlier start of the job must not be answered.
    folder = f'{shlex.quote(str(jobs))}/."$SLURM_JOB_ID"'
    start = ['rm -rf -- "$TITANLAB_SCONTROL"', 'mkdir -p -- "$TITANLAB_SCONTROL"']
    setting = " ".join(f"{name}={value}" for name, value in _FORMAT.items())
    return [f"export {QUESTIONS}={folder}", *start, _LOOP.replace("FORMAT", setting)]


def scontrol(*words: str, seconds: float, environ: Mapping[str, str] | None = None) -> Answer | None:
    """Run scontrol, which prints times in UTC, and wait for its end; None if it is missing or takes too long."""
    environ = os.environ if environ is None else environ
    folder = environ.get(QUESTIONS)
    if folder is not None and (answer := _asked_outside(Path(folder), words, seconds)) is not None:
        return answer
    # Also where the batch file is gone, with its node: the image may contain scontrol.
    return ask("scontrol", *words, seconds=seconds, environ={**environ, **_FORMAT})


def node_address(node: str) -> str | None:
    """The address by which Slurm reaches a node, for networks that do not resolve node names."""
    answer = scontrol("show", "node", "--oneliner", node, seconds=_NODE_SECONDS)
    match = re.search(r"\bNodeAddr=(\S+)", answer.output if answer is not None and answer.code == 0 else "")
    return match[1] if match else None


def _asked_outside(folder: Path, words: tuple[str, ...], seconds: float) -> Answer | None:
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
        return Answer(code=int(files[".code"].read_text()), output=output, errors=errors)
    except (OSError, ValueError):
        return None
    finally:
        with contextlib.suppress(OSError):
            for file in files.values():
                file.unlink(missing_ok=True)
