"""status.json: where a run stands now."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STATES = ("prepared", "starting", "running", "saving", "ended")
# Types of its keys in JSON; a pair with None may be null.
KINDS: Mapping[str, Any] = {
    "state": str,
    "step": int,
    "steps": (int, None),
    "attempt": int,
    "updated": float,
    "seconds_left": (float, None),
    "outcome": (str, None),
    "metrics": dict,
}


@dataclass(frozen=True, kw_only=True)
class Status:
    """What status.json holds: where a run stands now.

    Attributes:
        state: one of STATES.
        step, steps: optimizer steps done, and in all.
        attempt: number of the attempt, from 1; 0 before the first.
        pid, host: the process that wrote this.
        updated: when, in seconds since the epoch.
        seconds_left: the estimate; None where there is none.
        outcome: the word for its end, once it has ended.
        metrics: the latest row, so that a table of many runs need not read their metrics.jsonl.
    """

    state: str
    step: int = 0
    steps: int | None = None
    attempt: int = 0
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    updated: float = field(default_factory=time.time)
    seconds_left: float | None = None
    outcome: str | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
