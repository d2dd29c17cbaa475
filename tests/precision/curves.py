"""A hundred steps on real text: how far a precision's losses are from those of fp32.

A `Gap` is measured against fp32 with the same model, seed and data: `curves.gap(Bf16())`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tests import tiny
from titanlab.data import source
from titanlab.data.schema import Stdlib
from titanlab.distributed import ALONE, joined
from titanlab.prove import parity

STEPS = 100
# The last steps, whose mean says where a curve has arrived: single batches differ by more than precisions do.
LAST = 20
TEXT = Stdlib(vocab_size=512, validation_fraction=0.0)
# Dims are multiples of 16, as float8 wants them; 0.2 M parameters, as float16 is slow on a CPU (3 GFLOP/s).
MODEL = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 192, "vocab_size": 512}
# With Adam's usual eps an element whose gradient is nothing but rounding moves as far as any other.
TRAINING = {
    "steps": STEPS,
    "seq_len": 128,
    "global_batch": 8,
    "lr": 3e-3,
    "eps": 1e-5,
    "schedule": tiny.Schedule(warmup_steps=10),
}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Between a curve and fp32's.

    Attributes:
        largest: relative difference of the losses at the step where it is largest.
        final: relative difference of the mean of the last steps' losses; positive: worse than fp32.
    """

    largest: float
    final: float


class Curves:
    """Losses by precision, each trained once: `curves(precision)` → list of 100 losses.

    Args:
        pool: of workers, the first of which trains.
        folder: for the runs.
    """

    def __init__(self, pool: Any, folder: Any) -> None:
        self._pool, self._folder = pool, folder
        self._known: dict[str, list[float]] = {}
        source.prepare(TEXT, report=lambda line: None)

    def __call__(self, precision: Any, **given: Any) -> list[float]:
        """`given`: further keys of `tests.tiny.recipe`."""
        key = repr((precision, sorted(given.items(), key=str)))
        if key not in self._known:
            name = f"curve-{len(self._known)}"
            keys = {**MODEL, **TRAINING, "data": TEXT, "log_every": STEPS, "at_end": False, **given}
            made = tiny.recipe(self._folder, name=name, precision=precision, **keys)
            traces = self._pool.run(made.world, _trained, os.environ["TITANLAB_CACHE"], made, tiny.begin(made))
            self._known[key] = traces[0]
        return self._known[key]

    def gap(self, precision: Any, **given: Any) -> Gap:
        """How far a precision is from fp32."""
        return gap(self(tiny.Fp32()), self(precision, **given))


def gap(reference: list[float], losses: list[float]) -> Gap:
    """How far one curve is from another."""
    assert len(reference) == len(losses) == STEPS
    ends = [sum(each[-LAST:]) / LAST for each in (reference, losses)]
    return Gap(
        largest=max(abs(b - a) / a for a, b in zip(reference, losses, strict=True)),
        final=ends[1] / ends[0] - 1,
    )


def _trained(cache: str, made: Any, run: Any) -> list[float]:
    os.environ["TITANLAB_CACHE"] = cache
    return parity.trace(made, run, joined(os.environ) or ALONE).losses
