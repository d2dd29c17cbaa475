"""Config of profiler=rates. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.profiler.contract import Profiler, ProfilerConfig

# The kind of its row in metrics.jsonl, and the names there: of rates, in FLOP/s and bytes/s; of seconds; of bytes.
KIND = "rates"
PRODUCT, ATTENTION, COPY, POINTWISE = "rates/product", "rates/attention", "rates/copy", "rates/pointwise"
LAUNCH, PROCESS, COLLECTIVE = "rates/launch(s)", "rates/process(B)", "rates/collective"
# Ranks of the group of collectives: those of a node, and all.
NODE, WORLD = "node", "world"


@option("profiler", "rates")
@dataclass(frozen=True, kw_only=True)
class Rates(ProfilerConfig):
    """Rates of the machine, measured once before the first step: products, attention, memory, collectives.

    Attributes:
        seconds: how long one figure is measured.
        largest: side of the largest product; the smallest has an eighth of it.
        megabytes: largest message of a collective, in 2²⁰ bytes.
    """

    kind: str = "rates"
    seconds: float = 0.2
    largest: int = 1024
    megabytes: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ConfigError("profiler.seconds", self.seconds, "must be a positive number of seconds", "try 0.2")
        for name, least, example in (("largest", 64, 1024), ("megabytes", 1, 16)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"profiler.{name}", getattr(self, name), f"must be at least {least}", f"try {example}"
                )

    def implementation(self) -> Profiler:
        from titanlab.techniques.profiler.rates import RatesProfiler

        return RatesProfiler(self)
