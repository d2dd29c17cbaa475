"""Traces by torch.profiler (Kineto), on a schedule, a file for each rank."""

from __future__ import annotations

import gzip
import shutil
from functools import partial
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from titanlab.profiler.contract import Links, Profiler
from titanlab.profiler.files import chrome_trace, write_whole
from titanlab.profiler.trace_schema import Trace


class TraceProfiler(Profiler):
    """Writes `traces/attempt-A-steps-B-C-rank-R.json.gz` after each window."""

    def __init__(self, config: Trace) -> None:
        self._config = config
        self._steps = 0
        self._profile: profile | None = None

    def connect(self, links: Links) -> None:
        """Remember what the run offers."""
        self._links = links

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        """Remember where files go."""
        self._traces, self._rank, self._attempt = traces, rank, attempt
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    def after_step(self, step: int) -> None:
        """Start a window, or end it, if it is time to."""
        self._steps += 1
        if self._config.warms_up_after(self._steps):
            self._begin(step + 2)
        elif self._profile is not None:
            self._profile.step()
            if step == self._last:
                self.close()

    def close(self) -> None:
        """End a window that is open; one that is not complete leaves a file of the steps that it has."""
        if self._profile is not None:
            running, self._profile = self._profile, None
            running.stop()

    def _begin(self, first: int) -> None:
        self._last = first + self._config.steps - 1
        path = self._traces / f"attempt-{self._attempt}-steps-{first}-{self._last}-rank-{self._rank}.json.gz"
        self._profile = profile(
            activities=self._activities,
            schedule=schedule(wait=0, warmup=1, active=self._config.steps, repeat=1),
            on_trace_ready=lambda running: write_whole(path, partial(_write, running), self._links.failed),
            record_shapes=self._config.shapes,
            with_stack=self._config.stacks,
            # torch 2.11 warns of the first cycle without it.
            acc_events=True,
        )
        self._profile.start()


def _write(running: profile, path: Path) -> None:
    with chrome_trace(running) as trace, trace.open("rb") as source, gzip.open(path, "wb") as target:
        shutil.copyfileobj(source, target)
