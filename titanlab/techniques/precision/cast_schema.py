"""Configs of the precisions that only cast: fp32, bf16, bf16_full and fp16."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from titanlab.costs import BLOCKS, Setting, compute_capability, is_in_block
from titanlab.errors import ConfigError
from titanlab.options import OUTSIDE_STEP, option
from titanlab.techniques.precision.contract import DTYPES, EMBEDDING, HEAD, Formats, Precision, PrecisionConfig, matched

KEY = "precision.fp32_parts"
# Finds the block's number, or the pattern of numbers, in the name of a part.
_LAYER = re.compile(r"layers\.([^.]+)")


@dataclass(frozen=True, kw_only=True)
class Parts(PrecisionConfig):
    """The config field of pieces that compute in float32 while the rest computes in 16 bits.

    Attributes:
        fp32_parts: pieces of the model that compute in float32: `embedding`, `head`, names such as `norm` or
            `layers.0`, and patterns such as `layers.*`. Their inputs and outputs are cast; logits stay in float32.
    """

    fp32_parts: tuple[str, ...] = field(default=(), metadata={"before": ()})

    def check(self, setting: Setting) -> None:
        if not self.fp32_parts:
            return
        account, shown = setting.model, f"[{','.join(self.fp32_parts)}]"
        if not account.pieces:
            raise ConfigError(KEY, shown, "the model does not say what its pieces are", "try []")
        for part in self.fp32_parts:
            if not matched(account, [part]):
                families = (f"{BLOCKS}.*" if is_in_block(piece) else piece for piece in account.pieces)
                names = (EMBEDDING, HEAD, *dict.fromkeys(families))
                rule = f"no piece of the model is called {part or 'nothing'}"
                raise ConfigError(KEY, shown, rule, f"choose from {', '.join(names)}")
        if account.tied:
            chosen = matched(account, self.fp32_parts)
            pair = set(matched(account, [EMBEDDING, HEAD]))
            if pair & set(chosen) and not pair <= set(chosen):
                rule = "the head is the embedding's table, which cannot be gathered in two dtypes"
                raise ConfigError(KEY, shown, rule, f"name both, {EMBEDDING} and {HEAD}, or neither")

    def reduced(self, *, layers: int, note: Callable[[str], None]) -> PrecisionConfig:
        return replace(self, fp32_parts=parts_within(layers, self.fp32_parts, key=KEY, note=note))


def parts_within(layers: int, names: tuple[str, ...], *, key: str, note: Callable[[str], None]) -> tuple[str, ...]:
    """The names of parts, without those of blocks that a model of `layers` blocks does not have."""
    numbers = [str(number) for number in range(layers)]
    kept = tuple(part for part in names if not (block := _LAYER.search(part)) or fnmatch.filter(numbers, block[1]))
    if kept != names:
        note(f"{key} names blocks that the reduced model lacks")
    return kept


def check_bf16(setting: Setting, kind: str) -> None:
    """Check that the GPU multiplies in bfloat16: NVIDIA GPUs do from compute capability 8.0 (Ampere) on."""
    capability = compute_capability(setting.device) if setting.accelerator == "cuda" else None
    if capability is not None and capability < (8, 0):
        rule = f"{setting.device} has no units for bfloat16: they came with compute capability 8.0"
        raise ConfigError("precision", kind, rule, "try precision=fp16 or precision=fp32")


@option("precision", "bf16")
@dataclass(frozen=True, kw_only=True)
class Bf16(Parts):
    """Forward and backward in bfloat16; parameters and optimizer state in float32.

    Attributes:
        reduce: dtype of sums of gradients over processes and microbatches: `fp32`, or `bf16`, which sends half the
            bytes and rounds every sum to 8 bits.
    """

    kind: str = "bf16"
    reduce: str = field(default="fp32", metadata={"before": "fp32", "choices": ("fp32", "bf16")})

    def formats(self) -> Formats:
        parts = tuple(self.fp32_parts)
        return Formats(master="float32", compute="bfloat16", reduce=DTYPES[self.reduce], fp32_parts=parts)

    def check(self, setting: Setting) -> None:
        check_bf16(setting, self.kind)
        super().check(setting)


@option("precision", "bf16_full")
@dataclass(frozen=True, kw_only=True)
class Bf16Full(PrecisionConfig):
    """All stored values in bfloat16: parameters, gradients and the states of the optimizer.

    Attributes:
        reduce: dtype of sums of gradients over processes and microbatches, before they are stored in bfloat16: `fp32`
            or `bf16`.
    """

    kind: str = "bf16_full"
    reduce: str = field(default="fp32", metadata={"choices": ("fp32", "bf16")})

    def formats(self) -> Formats:
        return Formats(master="bfloat16", compute="bfloat16", reduce=DTYPES[self.reduce])

    def check(self, setting: Setting) -> None:
        check_bf16(setting, self.kind)


LARGEST = 2.0**127


@option("precision", "fp16")
@dataclass(frozen=True, kw_only=True)
class Fp16(Parts):
    """Forward and backward in float16 with a scaled loss, so that gradients do not vanish; float32 master weights.

    Attributes:
        reduce: dtype of sums of gradients over processes and microbatches: `fp32` or `fp16`.
        init_scale: the first scale of the loss. If it and the two factors are powers of two, scaling does not round.
        dynamic: whether the scale grows and shrinks; otherwise it is constant.
        growth_factor, growth_interval: after `growth_interval` steps in a row without an overflow the scale is
            multiplied by `growth_factor`.
        backoff_factor: factor of the scale after an overflow; the step with the overflow updates no parameter.
        min_scale: the smallest scale; an overflow at this scale ends the run.
        max_skips: the run ends after this many steps in a row without an update.
    """

    kind: str = "fp16"
    reduce: str = field(default="fp32", metadata={"choices": ("fp32", "fp16")})
    init_scale: float = field(default=65536.0, metadata=OUTSIDE_STEP)
    dynamic: bool = field(default=True, metadata=OUTSIDE_STEP)
    growth_factor: float = field(default=2.0, metadata=OUTSIDE_STEP)
    growth_interval: int = field(default=2000, metadata={"least": 1, **OUTSIDE_STEP})
    backoff_factor: float = field(default=0.5, metadata=OUTSIDE_STEP)
    min_scale: float = field(default=1.0, metadata=OUTSIDE_STEP)
    max_skips: int = field(default=20, metadata={"least": 1, **OUTSIDE_STEP})

    def __post_init__(self) -> None:
        if not 0 < self.init_scale <= LARGEST:
            rule = "must be positive and at most 2¹²⁷, where float32 ends"
            raise ConfigError("precision.init_scale", self.init_scale, rule, "try 65536")
        if not (math.isfinite(self.growth_factor) and self.growth_factor > 1):
            rule = "must be above 1 for the scale to grow"
            raise ConfigError("precision.growth_factor", self.growth_factor, rule, "try 2, or dynamic=false")
        if not 0 < self.backoff_factor < 1:
            rule = "must lie between 0 and 1 for the scale to shrink"
            raise ConfigError("precision.backoff_factor", self.backoff_factor, rule, "try 0.5, or dynamic=false")
        if not 0 < self.min_scale <= self.init_scale:
            rule = f"must be positive and at most init_scale={self.init_scale:g}"
            raise ConfigError("precision.min_scale", self.min_scale, rule, f"try {min(1.0, self.init_scale):g}")

    def formats(self) -> Formats:
        parts = tuple(self.fp32_parts)
        return Formats(master="float32", compute="float16", reduce=DTYPES[self.reduce], fp32_parts=parts)

    def implementation(self) -> Precision:
        from titanlab.techniques.precision.cast import ScaledCast

        return ScaledCast(self)


@option("precision", "fp32")
@dataclass(frozen=True, kw_only=True)
class Fp32(PrecisionConfig):
    """Everything in float32.

    Attributes:
        reduce: dtype of sums of gradients: only `fp32`, because this precision is the reference for others.
    """

    kind: str = "fp32"
    reduce: str = field(default="fp32", metadata={"before": "fp32", "choices": ("fp32",)})

    def formats(self) -> Formats:
        return Formats(master="float32", compute="float32", reduce="float32")
