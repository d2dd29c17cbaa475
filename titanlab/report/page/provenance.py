"""Which code made the runs, with which versions, on which machines, and when."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from titanlab.records.provenance import redacted_arguments
from titanlab.report.page.facts import Facts, at


class Origin(NamedTuple):
    """What some runs have in common."""

    code: str
    commit: str
    titanlab: str
    torch: str
    python: str
    device: str
    host: str
    launcher: str


class Source(NamedTuple):
    """Runs of one origin."""

    origin: Origin
    runs: list[str]
    began: str
    ended: str


def sources(facts: Facts) -> list[Source]:
    """The runs by their origins, the most frequent first; runs that never began have none."""
    members: dict[Origin, list[Mapping[str, Any]]] = {}
    for row in facts.runs:
        env = facts.env(row)
        if env:
            members.setdefault(_origin(row, env), []).append(row)
    source_list = []
    for origin, rows in members.items():
        starts = [row["started"] for row in rows if row["started"]]
        ends = [row["ended"] for row in rows if row["ended"]]
        names = [str(row["run"]) for row in rows]
        source_list.append(Source(origin, names, moment(min(starts, default=None)), moment(max(ends, default=None))))
    return sorted(source_list, key=lambda source: -len(source.runs))


def command_line(facts: Facts) -> str:
    """How the sweep was asked for; empty: runs were started one by one."""
    overrides = facts.sweep.manifest().get("overrides")
    if not isinstance(overrides, list) or not overrides:
        return ""
    return " ".join(["titanlab sweep", *redacted_arguments(list(map(str, overrides)))])


def moment(seconds: float | None) -> str:
    """A moment in UTC; empty: unknown."""
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return ""


def _origin(row: Mapping[str, Any], env: Mapping[str, Any]) -> Origin:
    git = at(env, "code", "git")
    commit = _text(at(git, "sha"))[:12]
    branch = _text(at(git, "branch"))
    changed = ", with changes" if at(git, "dirty") is True else ""
    name, cpu, cores = (at(env, "host", key) for key in ("name", "cpu", "usable_cores"))
    machine = ", ".join(filter(None, [_text(cpu), f"{_text(cores)} cores" if cores is not None else ""]))
    return Origin(
        code=_text(at(env, "code", "fingerprint"))[:12],
        commit=(commit + (f" ({branch})" if branch else "") + changed) if commit else "",
        titanlab=_text(at(env, "code", "version")),
        torch=_text(at(env, "packages", "torch")),
        python=_text(at(env, "python", "version")),
        device=_text(row["device"]) or _text(row["accelerator"]),
        host=_text(name) + (f" ({machine})" if machine else ""),
        launcher=_text(row["launcher"]),
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)
