"""A hundred steps on real text: how far a precision's losses are from those of fp32."""

from __future__ import annotations

import os
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
# Dims are multiples of 16, as float8 wants them; 0.2 M parameters, as float16 is slow on a CPU (3 GFLOP/s). With Adam's
# usual eps an element whose gradient is nothing but rounding moves as far as any other.
RECIPE = {
    "dim": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 192,
    "vocab_size": 512,
    "data": TEXT,
    "steps": STEPS,
    "seq_len": 128,
    "global_batch": 8,
    "lr": 3e-3,
    "eps": 1e-5,
    "log_every": STEPS,
    "at_end": False,
    "schedule": tiny.Schedule(warmup_steps=10),
}


class Curves:
    """Losses by precision and further keys of `tests.tiny.recipe`, each trained once: 100 for each."""

    def __init__(self, pool: Any, folder: Any) -> None:
        self._pool, self._folder = pool, folder
        self._known: dict[str, list[float]] = {}
        source.prepare(TEXT, report=lambda line: None)

    def __call__(self, precision: Any, **given: Any) -> list[float]:
        key = repr((precision, sorted(given.items(), key=str)))
        if key not in self._known:
            made = tiny.recipe(
                self._folder, **{**RECIPE, "name": f"curve-{len(self._known)}", "precision": precision, **given}
            )
            traces = self._pool.run(made.world, _trained, os.environ["TITANLAB_CACHE"], made, tiny.begin(made))
            self._known[key] = traces[0]
        return self._known[key]

    def gap(self, precision: Any, **given: Any) -> tuple[float, float]:
        """Relative differences from fp32: the largest of a step, and that of the mean of the last steps' losses."""
        reference, losses = self(tiny.Fp32()), self(precision, **given)
        assert len(reference) == len(losses) == STEPS
        largest = max(abs(b - a) / a for a, b in zip(reference, losses, strict=True))
        return largest, sum(losses[-LAST:]) / sum(reference[-LAST:]) - 1


def _trained(cache: str, made: Any, run: Any) -> list[float]:
    os.environ["TITANLAB_CACHE"] = cache
    return parity.trace(made, run, joined(os.environ) or ALONE).losses
