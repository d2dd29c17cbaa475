"""Clocks, watts and temperature of the GPU while something runs, as nvidia-smi tells them. It changes no setting."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

_FIELDS = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu")
_NAMES = ("mhz", "watts", "celsius", "busy_percent")
_MILLISECONDS = 100
# The GPU is idle below this; such samples say nothing of the work.
_BUSY = 50.0


class Watch:
    """Samples in the background while its block runs; without nvidia-smi there are none.

    Args:
        uuid: of the GPU; None: of all.
    """

    def __init__(self, uuid: str | None = None, program: Sequence[str] = ("nvidia-smi",)) -> None:
        self._uuid, self._program = uuid, program
        self._samples: list[tuple[float, tuple[float, ...]]] = []
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if shutil.which(self._program[0]) is not None:
            query = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits", "-lms", str(_MILLISECONDS)]
            which = ["-i", self._uuid] if self._uuid else []
            self._process = subprocess.Popen(
                [*self._program, *query, *which], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._thread is not None:
            self._process.kill()
            self._process.wait()
            self._thread.join()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._samples.append((time.time(), tuple(_number(part) for part in line.split(","))))

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Medians of the samples while the GPU was busy between two times of `time.time`; empty: there are none."""
        samples = [values for at, values in self._samples if begin <= at <= end and len(values) == len(_FIELDS)]
        busy = [values for values in samples if not values[-1] < _BUSY] or samples
        figures: dict[str, Any] = {}
        for place, name in enumerate(_NAMES):
            known = [values[place] for values in busy if values[place] == values[place]]
            if known:
                figures[name] = statistics.median(known)
        return {**figures, "samples": len(busy)} if figures else {}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # `[N/A]`
        return float("nan")
