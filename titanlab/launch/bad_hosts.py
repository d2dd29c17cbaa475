"""`hosts.jsonl` in the folder of all runs: hosts on which a run failed for a reason that the host may have caused.

A line for each failure. Later jobs of the same run leave these hosts out, until a person clears them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from titanlab.records.json_file import loaded
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.system.files import open_to_write, read_text, user_path, write_text

FILE = "hosts.jsonl"
# Names become an argument of a scheduler's command.
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


@dataclass(frozen=True)
class BadHost:
    """One failure on a host.

    Attributes:
        run: name of the run's folder.
        kind: of the outcome.
        cause: in one line.
        time: seconds since the epoch.
    """

    host: str
    run: str
    attempt: int
    kind: str
    cause: str
    time: float


def suspect(outcome: Outcome, nodes: Sequence[str], *, ranks_per_node: int) -> str | None:
    """The host that may have caused an end; None: no host did, or it is not known which.

    A hang and a failed node count, and a rank that a signal ended; an error of Python's, memory that ran out and
    numbers that are not finite come from the recipe or the code.
    """
    killed = outcome.kind is OutcomeKind.CRASH and outcome.traceback is None and (outcome.exit_code or 0) < 0
    if not killed and outcome.kind not in (OutcomeKind.HANG, OutcomeKind.NODE_FAIL):
        return None
    if len(nodes) == 1:
        return nodes[0]
    if outcome.rank is None or not nodes:
        return None
    node = outcome.rank // max(1, ranks_per_node)
    return nodes[node] if node < len(nodes) else None


def note_bad_host(run: RunFolder, outcome: Outcome, host: str) -> None:
    """Remember a host; if the folder takes no line, nothing is remembered."""
    if not _HOST.fullmatch(host):
        return
    cause = outcome.cause or outcome.kind.meaning
    bad = BadHost(host, run.path.name, outcome.attempt, outcome.kind.value, cause, round(time.time(), 3))
    line = json.dumps(asdict(bad), ensure_ascii=False) + "\n"
    with contextlib.suppress(OSError):
        descriptor = open_to_write(_file(_runs(run)), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            # In one write, because several jobs may write at the same time.
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def bad_hosts(runs: Path) -> list[BadHost]:
    """The failures, oldest first; lines that are damaged or foreign are skipped."""
    try:
        lines = read_text(_file(runs)).split("\n")
    except (OSError, UnicodeDecodeError):
        return []
    return [bad for line in lines if (bad := _parsed(line)) is not None]


def clear_bad_hosts(runs: Path, host: str | None = None) -> int:
    """Forget the failures on a host, or on all hosts. Returns how many there were."""
    before = bad_hosts(runs)
    after = [] if host is None else [bad for bad in before if bad.host != host]
    if len(after) < len(before):
        write_text(_file(runs), "".join(json.dumps(asdict(bad), ensure_ascii=False) + "\n" for bad in after))
    return len(before) - len(after)


def names(bad: Sequence[BadHost]) -> list[str]:
    """Hosts, each once, in the order of their first failure."""
    return list(dict.fromkeys(failure.host for failure in bad))


def _runs(run: RunFolder) -> Path:
    return run.path.parent.parent


def _file(runs: Path) -> Path:
    return user_path(runs) / FILE


def _parsed(line: str) -> BadHost | None:
    try:
        value: Any = loaded(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, Mapping) or not _HOST.fullmatch(str(value.get("host"))):
        return None
    kinds: Mapping[str, Any] = {
        "host": str,
        "run": str,
        "attempt": int,
        "kind": str,
        "cause": str,
        "time": (int, float),
    }
    if not all(isinstance(value.get(name), kind) for name, kind in kinds.items()):
        return None
    return BadHost(**{field.name: value[field.name] for field in fields(BadHost)})
