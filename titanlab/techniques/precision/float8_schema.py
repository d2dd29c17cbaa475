"""Configs of the precisions that multiply in formats of 8 bits: which layers, and on which devices."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from titanlab.costs import ModelAccount, Setting, hardware, part_shape, path_matches
from titanlab.errors import ConfigError
from titanlab.options import OUTSIDE_STEP, option
from titanlab.techniques.precision.cast_schema import KEY as PARTS
from titanlab.techniques.precision.cast_schema import Bf16, parts_within
from titanlab.techniques.precision.contract import Precision, PrecisionConfig, ProductFormat, matched

HEAD = "output"
EMULATE = ("auto", "true", "false")


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The linear layers of a model, by path, in the model's order, with the shapes of their weights, [out, in].

    `uneven`: layers that are not converted, because a dim is not a multiple of the number that the format needs.
    """

    converted: Mapping[str, tuple[int, ...]]
    skipped: tuple[str, ...]
    uneven: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        text = f"{len(self.converted)} linear layers"
        left = [*self.skipped, *(f"{name} ({'×'.join(map(str, s))})" for name, s in self.uneven.items())]
        if left:
            shown = left if len(left) <= 3 else [*left[:2], f"{len(left) - 2} more"]
            text += f", not {', '.join(shown)}"
        return text


@functools.lru_cache(maxsize=256)
def _conversion(layers: tuple[tuple[str, tuple[int, ...]], ...], skip: tuple[str, ...], multiple: int) -> Conversion:
    """Which layers are converted; cached, because many recipes of a sweep have the same model."""
    skipped = [name for name, _ in layers if any(path_matches(name, pattern) for pattern in skip)]
    others = {name: shape for name, shape in layers if name not in set(skipped)}
    uneven = {name: shape for name, shape in others.items() if any(size % multiple for size in shape)}
    converted = {name: shape for name, shape in others.items() if name not in uneven}
    return Conversion(converted=converted, skipped=tuple(skipped), uneven=uneven)


_E4M3 = functools.partial(
    ProductFormat, forward="float8_e4m3fn", input_gradient="float8_e4m3fn", weight_gradient="float8_e4m3fn"
)


@dataclass(frozen=True, kw_only=True)
class Float8(Bf16):
    """Linear layers multiply in float8 by torchao; everything else is as in bf16, with float32 master weights.

    Experts are not `nn.Linear` layers: they multiply in bf16.

    Attributes:
        skip: linear layers that are not converted; `*` matches any text, and one or more steps of a path are
            enough: `output`, `wk`, `feed_forward.w2`, `layers.0`.
        strict: refuse a model with a linear layer whose dims are not multiples, instead of not converting that layer.
        emulate: `true`: cast to float8 and back, then multiply in 32 bits: the same rounding on any device, but slow.
            `false`: the device multiplies in float8. `auto`: emulate on CPUs and older GPUs, which cannot.
    """

    kind: str = ""
    skip: tuple[str, ...] = (HEAD,)
    strict: bool = field(default=False, metadata=OUTSIDE_STEP)
    emulate: str = "auto"

    # torchao's name of the recipe.
    recipe: ClassVar[str] = ""
    # torch's scaled_mm needs this compute capability, and weights whose two dims are multiples of `multiple`.
    capability: ClassVar[tuple[int, int]] = (8, 9)
    multiple: ClassVar[int] = 16
    format: ClassVar[str] = "float8"
    layer_class: ClassVar[str] = "torchao.float8.float8_linear.Float8Linear"
    # The gradient of a weight is a product over tokens, so the number of tokens must be a multiple of `multiple` too.
    multiplies_tokens: ClassVar[bool] = True
    emulates_on_gpu: ClassVar[bool] = True
    # cast_bytes, per element: read 2 for the scales, then read 2 and write 1. The gradient of the weight needs both
    # operands in the other order of memory: read 1 and write 1.
    product: ClassVar[ProductFormat] = _E4M3(cast_bytes=7.0, cast_kernels=3)
    mfu_note: ClassVar[str] = "model FLOPs over the bf16 peak"

    def __post_init__(self) -> None:
        # The command line gives a bare true or false as a boolean.
        object.__setattr__(self, "emulate", str(self.emulate).lower())
        if self.emulate not in EMULATE:
            cure = f"choose one of {', '.join(EMULATE)}"
            raise ConfigError("precision.emulate", self.emulate, "no such choice", cure)

    def implementation(self) -> Precision:
        from titanlab.techniques.precision.float8 import Float8Layers

        return Float8Layers(self)

    @property
    def gathers_float8(self) -> bool:
        return False

    def conversion(self, model: ModelAccount) -> Conversion:
        """The model's linear layers, sorted into converted and other layers."""
        return _conversion(tuple(model.linear_layers.items()), tuple(self.skip), self.multiple)

    def converts(self, name: str, shape: Sequence[int]) -> bool:
        return name in _conversion(((name, tuple(shape)),), tuple(self.skip), self.multiple).converted

    def float8_gathered(self, model: ModelAccount) -> frozenset[str]:
        return frozenset(f"{name}.weight" for name in self.conversion(model).converted if self.gathers_float8)

    def products(self, model: ModelAccount) -> Mapping[str, ProductFormat]:
        product = self.product
        if self.emulate == "true":
            # Emulation casts to float8 and back, then multiplies in 32 bits.
            width = "float32"
            product = replace(product, forward=width, input_gradient=width, weight_gradient=width)
        return dict.fromkeys(self.conversion(model).converted, product)

    def product_bits(self) -> int:
        return 8

    def describe(self, model: ModelAccount, *, accelerator: str, device: str) -> str:
        emulated = ", emulated" if self._emulates_on(accelerator, device) else ""
        # torchao's grouped float8 product has kernels for GPUs only, and no emulation.
        experts = f", experts in {self.formats().compute}" if model.experts is not None else ""
        return f"{self.kind}: {self.conversion(model)}{experts}{emulated}"

    def emulates(self, capability: tuple[int, int] | None) -> bool:
        """Whether to emulate on a GPU of this compute capability; None: on a CPU."""
        if self.emulate == "auto":
            return capability is None or (self.emulates_on_gpu and capability < self.capability)
        return self.emulate == "true"

    def on_device(self, *, accelerator: str, device: str) -> PrecisionConfig:
        return self.emulated() if self._emulates_on(accelerator, device) else self

    def _emulates_on(self, accelerator: str, device: str) -> bool:
        # A GPU that the hardware table lacks is assumed to multiply in the format.
        known = hardware.compute_capability(device) or self.capability
        return self.emulates(None if accelerator == "cpu" else known)

    def emulated(self) -> PrecisionConfig:
        return replace(self, emulate="true")

    def reduced(self, *, layers: int, note: Callable[[str], None]) -> PrecisionConfig:
        note(f"precision={self.kind} is emulated: the same rounding, in 32 bits")
        return replace(
            self,
            emulate="auto" if self.emulate == "false" else self.emulate,
            skip=parts_within(layers, self.skip, key="precision.skip", note=note),
            fp32_parts=parts_within(layers, self.fp32_parts, key=PARTS, note=note),
        )

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if importlib.util.find_spec("torchao") is None:
            raise ConfigError("precision", self.kind, "needs torchao", "pip install torchao, or try precision=bf16")
        self._check_names(setting.model)
        self.check_device(accelerator=setting.accelerator, device=setting.device)
        # Emulation supports any number of tokens.
        if self.multiplies_tokens and not self._emulates_on(setting.accelerator, setting.device):
            self.check_tokens(setting)
        self._check_converted(setting)

    def _check_names(self, model: ModelAccount) -> None:
        """Check that each name in `skip` fits a layer, and that at least one layer is converted."""
        # `output`, the default of `skip`, may name no layer: a model with a tied head has none of this name.
        for pattern in self.skip:
            if pattern != HEAD and not any(path_matches(name, pattern) for name in model.linear_layers):
                steps = dict.fromkeys(name.rpartition(".")[2] for name in model.linear_layers)
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

    def check_device(self, *, accelerator: str, device: str) -> None:
        capability = hardware.compute_capability(device)
        if accelerator == "cpu":
            self.check_capability(None, "a CPU")
        # A GPU that the hardware table lacks is checked when the layers are converted (float8.py).
        elif capability is not None:
            self.check_capability(capability, device)

    def check_capability(self, capability: tuple[int, int] | None, device: str) -> None:
        """Check that a device can multiply in this format or emulates it; `capability` None: it is a CPU."""
        if self.emulates(capability):
            return
        if capability is None:
            rule = f"a CPU has no {self.format} products"
            raise ConfigError("precision.emulate", self.emulate, rule, "try auto")
        if capability < self.capability:
            needs, has = (".".join(map(str, each)) for each in (self.capability, capability))
            rule = f"{device} is too old for {self.format} products: it has compute capability {has}, they need {needs}"
            key, value = ("precision", self.kind) if self.emulate == "auto" else ("precision.emulate", self.emulate)
            raise ConfigError(key, value, rule, "try precision=bf16, or precision.emulate=true, which is slow")

    def check_tokens(self, setting: Setting) -> None:
        """Check the number of tokens in a forward pass: products for gradients of weights need a multiple."""
        tokens = setting.microbatch * setting.seq_len // setting.layout.context
        if tokens % self.multiple:
            needs = f"{self.format} needs multiples of {self.multiple}"
            rule = f"a process has {tokens} tokens of a microbatch, and {needs}"
            unit = self.multiple * setting.layout.context
            near = max(unit, round(setting.seq_len / unit) * unit)
            raise ConfigError("training.seq_len", setting.seq_len, rule, f"try {near}, or precision=bf16")

    def _check_converted(self, setting: Setting) -> None:
        """Check that converted layers can be sharded, are in no float32 part, and are joined only with each other."""
        model, degree = setting.model, setting.layout.tensor
        converted = self.conversion(model).converted
        for name, shape in converted.items():
            rows, columns = part_shape(model, name, shape, degree)
            if rows % self.multiple or columns % self.multiple:
                needs = f"{self.format} products need multiples of {self.multiple}"
                rule = f"leaves each process {rows}×{columns} of {name}, and {needs}"
                cure = f"try a smaller degree, or precision.skip={_typed([*self.skip, name.rpartition('.')[2]])}"
                raise ConfigError("parallelism.tensor", degree, rule, cure)
        for piece in matched(model, self.fp32_parts):
            inside = next((name for name in converted if f"{name}.".startswith(f"{piece}.")), "")
            if inside:
                rule = f"{piece} has {inside}, which multiplies in {self.format}"
                cure = f"try precision.skip={_typed([*self.skip, piece])}"
                raise ConfigError("precision.fp32_parts", _typed(self.fp32_parts), rule, cure)
        for layers in (paths for joined in model.joined for paths in joined.paths(model.layers)):
            others = [name for name in layers if name not in converted]
            if others and len(others) < len(layers):
                names = ", ".join(name.rpartition(".")[2] for name in layers)
                rule = f"multiplies {names} as one product, and precision={self.kind} does not convert {others[0]}"
                cure = f"try false, or name all of them in precision.skip: {names}"
                raise ConfigError("model.fused", "true", rule, cure)


def _typed(names: Sequence[str]) -> str:
    """A list in the syntax of an override."""
    return f"[{','.join(names)}]"


@option("precision", "float8_tensorwise")
@dataclass(frozen=True, kw_only=True)
class Float8Tensorwise(Float8):
    """Float8 with one scale for each input, weight and gradient: the fastest kernels, and the coarsest rounding.

    Attributes:
        all_gather: FSDP2 gathers the weights in float8, with half the bytes of bfloat16; the scales of all weights are
            computed together after each optimizer step.
    """

    kind: str = "float8_tensorwise"
    all_gather: bool = True

    recipe: ClassVar[str] = "tensorwise"

    @property
    def gathers_float8(self) -> bool:
        return self.all_gather

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if not self.all_gather:
            return
        if setting.cpu_offload:
            rule = (
                "computes scales where weights are kept, on the CPU with cpu_offload, but they are gathered on the GPU"
            )
            raise ConfigError("precision.all_gather", True, rule, "try false, or parallelism.cpu_offload=false")
        ranks = setting.layout.fsdp
        for name, shape in self.conversion(setting.model).converted.items():
            rows = part_shape(setting.model, name, shape, setting.layout.tensor)[0]
            if rows % ranks:
                rule = f"cannot cut the {rows} rows that a process has of {name} into {ranks} equal parts"
                raise ConfigError("precision.all_gather", True, rule, "try false")


@option("precision", "float8_rowwise")
@dataclass(frozen=True, kw_only=True)
class Float8Rowwise(Float8):
    """Float8 with a power of two as scale for each row and column of a product: finer than tensorwise."""

    kind: str = "float8_rowwise"

    recipe: ClassVar[str] = "rowwise"
    # cast_bytes: each operand is scaled by row for one product and by column for another: twice read 2 + 2, write 1.
    # For gradients torchao turns fast accumulation off: it then multiplies without scales, and scales the result.
    product: ClassVar[ProductFormat] = _E4M3(cast_bytes=10.0, cast_kernels=4, scales_gradients=True)


@option("precision", "float8_rowwise_with_gw_hp")
@dataclass(frozen=True, kw_only=True)
class Float8RowwiseWithGwHp(Float8):
    """Rowwise float8, but gradients of weights are multiplied in bfloat16: the finest of the three."""

    kind: str = "float8_rowwise_with_gw_hp"

    recipe: ClassVar[str] = "rowwise_with_gw_hp"
    multiplies_tokens: ClassVar[bool] = False
    product: ClassVar[ProductFormat] = _E4M3(weight_gradient="bfloat16", cast_bytes=6.0, cast_kernels=2)


@option("precision", "mxfp8")
@dataclass(frozen=True, kw_only=True)
class Mxfp8(Float8):
    """Float8 with a power of two as scale for every 32 neighbouring elements, the format of Blackwell GPUs.

    (OCP Microscaling Formats specification 1.0; arXiv 2506.08027.) It is a prototype in torchao. An older GPU emulates
    it only with `emulate=true`.
    """

    kind: str = "mxfp8"

    capability: ClassVar[tuple[int, int]] = (10, 0)
    multiple: ClassVar[int] = 32
    format: ClassVar[str] = "mxfp8"
    layer_class: ClassVar[str] = "titanlab.techniques.precision.float8.Mxfp8Linear"
    emulates_on_gpu: ClassVar[bool] = False
    splits_products: ClassVar[bool] = False
    # cast_bytes: each operand is cast with scales along each of its two dims: each time read 2, write 1, plus scales.
    product: ClassVar[ProductFormat] = _E4M3(cast_bytes=6.1, cast_kernels=2)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.splits_backward:
            schedule = setting.kinds["schedule"]
            rule = f"computes gradients of weights and inputs together, which schedule={schedule} separates"
            cure = "try schedule=interleaved_1f1b, or precision=float8_rowwise"
            raise ConfigError("precision", self.kind, rule, cure)
        if setting.model.joined:
            rule = "multiplies several layers as one product, which torchao's prototype of mxfp8 does not support"
            raise ConfigError("model.fused", "true", rule, "try false, or precision=float8_rowwise")
        self.check_tokens(setting)

    def implementation(self) -> Precision:
        from titanlab.techniques.precision.float8 import Mxfp8Layers

        return Mxfp8Layers(self)
