"""Config of compilation."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option

BACKENDS = ("inductor", "aot_eager", "eager")


@option("compile")
@dataclass(kw_only=True)
class Compile:
    """What torch compiles.

    Attributes:
        blocks: every block, each as one graph; equal blocks share one compilation.
        backend: inductor generates kernels; aot_eager and eager only trace, to find out where something fails.
    """

    blocks: bool = False
    backend: str = "inductor"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise ConfigError("compile.backend", self.backend, "no such backend", f"choose one of {known}")
