"""Config of compilation."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from dataclasses import dataclass, field

from titanlab.costs import Setting
from titanlab.errors import ConfigError
from titanlab.options import NOT_PRICED, option
from titanlab.techniques.compile.contract import Compiler

# torch's backends with which a model can train.
BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition", "eager", "cudagraphs")
# The group of entry points in which torch looks for backends of other packages.
ENTRY_POINTS = "torch_dynamo_backends"
MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")
# Modes that record CUDA graphs.
RECORDING = ("reduce-overhead", "max-autotune")


@option("compile")
@dataclass(frozen=True, kw_only=True)
class Compile:
    """The parts of a model that torch compiles.

    Attributes:
        blocks: compile every block as one graph; equal blocks share one compilation.
        loss: compile the loss function as one graph; if logits are sharded over the vocabulary, the parts before and
            after the collectives.
        backend: inductor generates kernels; aot_eager and eager only trace, to find the cause of a failure;
            aot_eager_decomp_partition also decomposes operators as inductor does; cudagraphs records the graphs of
            aot_eager. Backends of installed packages are known too.
        mode: of inductor. `max-autotune-no-cudagraphs` tries several kernels for each product and keeps the fastest;
            `reduce-overhead` records CUDA graphs; `max-autotune` does both.
    """

    blocks: bool = False
    loss: bool = field(default=False, metadata={"before": False})
    backend: str = "inductor"
    mode: str = field(default="default", metadata={"before": "default", "choices": MODES, **NOT_PRICED})

    @property
    def compiles(self) -> bool:
        return self.blocks or self.loss

    @property
    def records_graphs(self) -> bool:
        return self.compiles and (self.backend == "cudagraphs" or self.mode in RECORDING)

    @property
    def fuses_blocks(self) -> bool:
        """Whether the compiler fuses neighbouring memory-bound operations of a block into one kernel."""
        return self.blocks and self.backend == "inductor"

    @property
    def fuses_loss(self) -> bool:
        return self.loss and self.backend == "inductor"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            others = sorted(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))
            if self.backend not in others:
                known = ", ".join([*BACKENDS, *others])
                raise ConfigError("compile.backend", self.backend, "no such backend", f"choose one of {known}")
        if self.mode == "default":
            return
        if not self.compiles:
            raise ConfigError("compile.mode", self.mode, "nothing is compiled", "try compile=block")
        if self.backend != "inductor":
            rule = f"is a mode of inductor, and {self.backend} has none"
            raise ConfigError("compile.mode", self.mode, rule, "try default, or compile.backend=inductor")

    def check(self, setting: Setting) -> None:
        """Raise ConfigError if the rest of the recipe does not fit the backend."""
        if not self.compiles:
            return
        if self.backend == "inductor":
            _check_tools(setting)
        if self.backend == "cudagraphs":
            _check_recording(setting, "compile.backend", self.backend, "try inductor")
        if self.mode in RECORDING:
            other = "max-autotune-no-cudagraphs" if "max" in self.mode else "default"
            _check_recording(setting, "compile.mode", self.mode, f"try {other}")

    def implementation(self) -> Compiler:
        from titanlab.techniques.compile.compiler import TorchCompiler

        return TorchCompiler(self)


def _check_recording(setting: Setting, key: str, value: str, cure: str) -> None:
    """Check that parameters keep their addresses: a CUDA graph uses the addresses with which it was recorded."""
    graphs, stay = "records CUDA graphs", "of parameters that stay where they are"
    if setting.accelerator != "cuda":
        raise ConfigError(key, value, f"{graphs}, and this runs on a CPU", cure)
    if setting.model.experts is not None:
        rule = f"{graphs} of fixed shapes, and the router decides how many rows an expert gets"
        raise ConfigError(key, value, rule, cure)
    if setting.layout.world > 1:
        raise ConfigError(key, value, f"{graphs} {stay}, which {setting.layout.label} moves", cure)
    if setting.computes_in != setting.rests_in:
        rule = f"{graphs} {stay}, and {setting.kinds['precision']} casts them for each use"
        raise ConfigError(key, value, rule, f"{cure}, or precision=bf16_full")


def _check_tools(setting: Setting) -> None:
    """Check that a C++ compiler is installed, which inductor needs for a CPU.

    The tools for a GPU come with torch; they are not checked, because a recipe may be checked on another machine.
    """
    compiler = os.environ.get("CXX") or "g++"
    if setting.accelerator == "cpu" and shutil.which(compiler) is None:
        rule = f"writes C++ for a CPU, and there is no {compiler}"
        cure = "install one or name it in the environment as CXX, or try compile.backend=aot_eager"
        raise ConfigError("compile.backend", "inductor", rule, cure)
