"""Why a job failed before its run began: the last line of what its processes have printed.

Such a job has no attempt, and so no record of its own: its interpreter is gone, a module cannot be imported, its
container does not start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from titanlab.records.logs import text_at_end

_LIMIT = 400
# submitit's names of logs: JOB_RANK_log.err, where JOB may contain underscores too.
_RANK = re.compile(r"_(\d+)_log\.(?:err|out)")
# A task that refuses to begin says so on standard output, after the time.
_REFUSAL = re.compile(r"(?:\d\d:\d\d:\d\d +)?error: (.+)")
# After a wrong option, a program's last line.
_HINT = re.compile(r"Try ['\"].* --help['\"] for more information\.?")


def early_end(logs: Iterable[Path], *, besides: str | None = None) -> str | None:
    """Why a job failed before its run began, in one line; None if its processes have printed no reason.

    Args:
        logs: what the job's processes have printed; standard error has priority, then the lowest rank.
        besides: a pattern of lines, such as those of a scheduler, that are used only if there are no others.
    """
    for path in sorted(logs, key=lambda path: (path.suffix != ".err", _rank(path), path.name)):
        lines = [line for line in printed_lines(path) if _HINT.fullmatch(line) is None]
        if path.suffix != ".err":
            lines = [refusal[1] for line in lines if (refusal := _REFUSAL.fullmatch(line)) is not None]
        own = [line for line in lines if besides is None or re.match(besides, line) is None]
        if lines:
            return f"ended before the run began: {(own or lines)[-1]}"
    return None


def printed_lines(path: Path, *, begin: int = 0) -> list[str]:
    """The lines at the end of a file that are not empty, each of bounded length; none if it cannot be read.

    Args:
        begin: lines before this byte are not meant.
    """
    text = text_at_end(path, begin=begin)
    lines = [" ".join("".join(c if c.isprintable() else " " for c in line).split()) for line in text.splitlines()]
    return [line if len(line) <= _LIMIT else f"{line[: _LIMIT - 3]}..." for line in lines if line]


def _rank(path: Path) -> int:
    match = _RANK.search(path.name)
    return int(match[1]) if match is not None else 0
