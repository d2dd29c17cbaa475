"""Config of a cluster: the facts that do not depend on who starts a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from titanlab.errors import ConfigError
from titanlab.options import option

ACCELERATORS = ("auto", "cpu", "cuda")


@option("cluster")
@dataclass(kw_only=True)
class Cluster:
    """The machines of a run.

    Attributes:
        accelerator: `cpu`, `cuda`, or `auto`: CUDA where this host shows a GPU. `auto` is replaced
            by what was found before a run gets its name.
        device: name of the accelerator as its driver prints it, or `cpu`; null: this host's.
        peak_tflops: dense peak of one device in the precision of the matrix products, for the MFU;
            null: from the device's datasheet, where it is known.
    """

    accelerator: str = "auto"
    device: str | None = None
    peak_tflops: float | None = field(default=None, metadata={"identity": False})

    def __post_init__(self) -> None:
        if self.accelerator not in ACCELERATORS:
            raise ConfigError(
                "cluster.accelerator", self.accelerator, "is no accelerator", f"try {', '.join(ACCELERATORS)}"
            )
        if self.peak_tflops is not None and not 0 < self.peak_tflops < math.inf:
            raise ConfigError("cluster.peak_tflops", self.peak_tflops, "must be a positive number", "try 989, or null")
