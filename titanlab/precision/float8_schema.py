"""What the configs of the float8 options have in common."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import ClassVar

from titanlab.costs import hardware
from titanlab.costs.account import ModelAccount
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.precision.account import matched
from titanlab.precision.bf16_schema import Bf16
from titanlab.precision.float8_account import Conversion, conversion, describe, linear_layers, matches, part_shape

HEAD = "output"
EMULATE = ("auto", "true", "false")


@dataclass(kw_only=True)
class Float8(Bf16):
    """Linear layers multiply in float8; everything else is as in bf16, over 32-bit masters.

    Attributes:
        skip: names of linear layers that stay as they are; `*` is any text, and one or more steps of a path are
            enough: `output`, `wk`, `feed_forward.w2`, `layers.0`.
        strict: refuse a model with a linear layer that has a dim which does not divide, instead of leaving that as
            it is.
        emulate: `true`: cast to float8 and back, then multiply in 32 bits: the same rounding on any device, slowly.
            `false`: the device multiplies in float8. `auto`: emulate where it cannot, on CPUs and older GPUs.
    """

    kind: str = ""
    skip: list[str] = field(default_factory=lambda: [HEAD])
    strict: bool = False
    emulate: str = "auto"

    # torchao's name of it.
    recipe: ClassVar[str] = ""
    # Of the hardware (torch's scaled_mm): from which compute capability on, and in which units of both dims.
    capability: ClassVar[tuple[int, int]] = (8, 9)
    multiple: ClassVar[int] = 16
    format: ClassVar[str] = "float8"
    # The gradient of a weight is a product over tokens, whose number has to be a multiple as well.
    multiplies_tokens: ClassVar[bool] = True
    emulates_on_gpu: ClassVar[bool] = True
    no_mfu: ClassVar[str] = "no MFU: the convention's peak is that of bfloat16"

    def __post_init__(self) -> None:
        super().__post_init__()
        # A bare true or false on the command line is no text.
        self.emulate = str(self.emulate).lower()
        if self.emulate not in EMULATE:
            raise ConfigError(
                "precision.emulate", self.emulate, "no such choice", f"choose one of {', '.join(EMULATE)}"
            )

    def check(self, setting: Setting) -> None:
        """Hold the rest of a recipe to what these layers and their kernels need.

        Raises:
            ConfigError: they cannot work, or nothing would be converted.
        """
        super().check(setting)
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError("precision", self.kind, "needs torchao", "pip install torchao, or try precision=bf16")
        self._check_names(setting.model)
        self._check_device(setting)
        self._check_dims(setting)
        self._check_parts(setting.model)

    def conversion(self, model: ModelAccount) -> Conversion:
        """What becomes of a model's linear layers."""
        return conversion(model, skip=self.skip, multiple=self.multiple)

    def float8_gathered(self, model: ModelAccount) -> frozenset[str]:
        """Names of the parameters that FSDP2 gathers in one byte an element; the scales are known to all ranks."""
        return frozenset()

    def describe(self, model: ModelAccount, *, accelerator: str, device: str) -> str:
        """For people: the option, what it does to a model, and whether the device is emulated."""
        capability = None if accelerator == "cpu" else hardware.compute_capability(device) or self.capability
        how = ", emulated" if self.emulates(capability) else ""
        return f"{self.kind}: {describe(self.conversion(model))}{how}"

    def emulates(self, capability: tuple[int, int] | None) -> bool:
        """Whether to emulate on a GPU of this compute capability; None: on a CPU."""
        if self.emulate == "auto":
            return capability is None or (self.emulates_on_gpu and capability < self.capability)
        return self.emulate == "true"

    def check_capability(self, capability: tuple[int, int] | None, device: str) -> None:
        """Hold a device to what the products need.

        Args:
            capability: of the GPU; None: it is a CPU.
            device: its name, for people.

        Raises:
            ConfigError: it cannot multiply so, and is not to emulate.
        """
        if self.emulates(capability):
            return
        if capability is None:
            rule = f"a CPU has no {self.format} products"
            raise ConfigError("precision.emulate", self.emulate, rule, "try auto")
        if capability < self.capability:
            needs = ".".join(map(str, self.capability))
            has = ".".join(map(str, capability))
            rule = f"{device} is too old for {self.format} products: it has compute capability {has}, they need {needs}"
            key, value = ("precision", self.kind) if self.emulate == "auto" else ("precision.emulate", self.emulate)
            raise ConfigError(key, value, rule, "try precision=bf16, or precision.emulate=true, which is slow")

    def _check_names(self, model: ModelAccount) -> None:
        layers = linear_layers(model)
        # The default names a head that a model with a tied one does not have.
        for pattern in self.skip:
            if pattern != HEAD and not any(matches(name, pattern) for name in layers):
                steps = dict.fromkeys(name.rpartition(".")[2] for name in layers)
                rule = f"{pattern} fits no linear layer"
                raise ConfigError("precision.skip", _typed(self.skip), rule, f"there are {', '.join(steps)}")
        found = self.conversion(model)
        if found.uneven and (self.strict or not found.converted):
            name, shape = next(iter(found.uneven.items()))
            rule = f"{name} is {shape[0]}×{shape[1]}, and {self.format} products need multiples of {self.multiple}"
            if not found.converted:
                raise ConfigError("precision", self.kind, f"converts no layer: {rule}", "try precision=bf16")
            raise ConfigError("precision.strict", True, rule, "try false: such layers stay as they are")
        if not found.converted:
            rule = "names every linear layer of the model, so that none is converted"
            raise ConfigError("precision.skip", _typed(self.skip), rule, f"try [{HEAD}], or precision=bf16")

    def _check_device(self, setting: Setting) -> None:
        if setting.accelerator == "cpu":
            self.check_capability(None, "a CPU")
            return
        capability = hardware.compute_capability(setting.device)
        # What is not in the table is asked when it is there: see `precision.float8`.
        if capability is not None:
            self.check_capability(capability, setting.device)
        # Where it is emulated, any number will do.
        if self.multiplies_tokens and not self.emulates(capability or self.capability):
            self.check_tokens(setting)

    def check_tokens(self, setting: Setting) -> None:
        """Hold the number of tokens of a forward pass to what the products of weights' gradients need.

        Raises:
            ConfigError: it is no multiple.
        """
        tokens = setting.microbatch * setting.seq_len // setting.layout.context
        if tokens % self.multiple:
            rule = (
                f"a process has {tokens} tokens of a microbatch, and {self.format} needs multiples of {self.multiple}"
            )
            unit = self.multiple * setting.layout.context
            near = max(unit, round(setting.seq_len / unit) * unit)
            raise ConfigError("training.seq_len", setting.seq_len, rule, f"try {near}, or precision=bf16")

    def _check_parts(self, model: ModelAccount) -> None:
        for piece in matched(model, self.fp32_parts):
            inside = [name for name in self.conversion(model).converted if f"{name}.".startswith(f"{piece}.")]
            if inside:
                rule = f"{piece} has {inside[0]}, which multiplies in {self.format}"
                cure = f"try precision.skip={_typed([*self.skip, piece])}"
                raise ConfigError("precision.fp32_parts", _typed(self.fp32_parts), rule, cure)

    def _check_dims(self, setting: Setting) -> None:
        degree = setting.layout.tensor
        for name, shape in self.conversion(setting.model).converted.items():
            part = part_shape(setting.model, name, shape, degree)
            if any(size % self.multiple for size in part):
                rule = (
                    f"leaves each process {part[0]}×{part[1]} of {name}, and {self.format} products need multiples "
                    f"of {self.multiple}"
                )
                names = [*self.skip, name.rpartition(".")[2]]
                cure = f"try a smaller degree, or precision.skip={_typed(names)}"
                raise ConfigError("parallelism.tensor", degree, rule, cure)


def _typed(names: list[str]) -> str:
    """A list as it is written in an override."""
    return f"[{','.join(names)}]"
