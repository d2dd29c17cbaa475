"""Configs of optimizer=adamw, adamw_8bit, adamw_4bit, adamw_fp8 and muon. Torch-free."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from titanlab.costs import Setting, hardware, is_in_block, tensor_part
from titanlab.errors import ConfigError
from titanlab.options import NOT_PRICED, OUTSIDE_STEP, option
from titanlab.techniques.optimizer.contract import STEP_BYTES, OptimizerConfig, OptimizerFactory, Scheduled, Stored


@dataclass(frozen=True, kw_only=True)
class Averaged(Scheduled):
    """Adam with decoupled weight decay (arXiv 1711.05101).

    Attributes:
        betas: decay of the averages of gradient and squared gradient; by default as the Llama models were trained
            (arXiv 2302.13971, section 2.3).
        weight_decay: of parameters with two or more dimensions; norms and biases do not decay. The default is Llama's
            too.
    """

    betas: tuple[float, ...] = field(default=(0.9, 0.95), metadata=OUTSIDE_STEP)
    eps: float = field(default=1e-8, metadata={"positive": True, **OUTSIDE_STEP})
    weight_decay: float = field(default=0.1, metadata={"least": 0, **OUTSIDE_STEP})

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError("optimizer.betas", self.betas, "must be two numbers in [0, 1)", "try [0.9,0.95]")

    def reduced(self, *, least_eps: float) -> OptimizerConfig:
        return replace(self, eps=max(self.eps, least_eps))

    def state_bytes(self, parameter: Stored) -> int:
        return 2 * parameter.part_bytes + STEP_BYTES


@dataclass(frozen=True, kw_only=True)
class Rounded(Averaged):
    """AdamW with a choice of the rounding to bfloat16.

    Attributes:
        rounding: `nearest`, which loses an update below 1/256 of its parameter; `stochastic`, up or down with the
            probability that keeps the mean (arXiv 2010.06192); `auto`: stochastic if parameters are stored in bfloat16.
    """

    rounding: str = field(
        default="auto", metadata={"before": "auto", "choices": ("auto", "nearest", "stochastic"), **NOT_PRICED}
    )

    def check(self, setting: Setting) -> None:
        in_bf16 = setting.rests_in == "bfloat16"
        if self.rounding == "stochastic" and not in_bf16:
            precision = setting.kinds["precision"]
            rule = f"rounds parameters that rest in bfloat16, and with precision={precision} they do not"
            raise ConfigError("optimizer.rounding", self.rounding, rule, "try auto, or precision=bf16_full")
        if self.rounding != "nearest" and in_bf16:
            needs_torchao("optimizer.rounding", self.rounding, cure="try nearest")

    def implementation(self) -> OptimizerFactory:
        from titanlab.techniques.optimizer.adamw import AdamWFactory

        return AdamWFactory(self)


@option("optimizer", "adamw")
@dataclass(frozen=True, kw_only=True)
class AdamW(Rounded):
    """torch's AdamW, fused."""

    kind: str = "adamw"


def needs_torchao(key: str, value: object, *, cure: str) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(key, value, "needs the package torchao, which is not installed", f"{cure}, or install it")


# Older GPUs cannot compile conversions to float8.
_FP8_CAPABILITY = (8, 9)
# Matrices of fewer elements keep full-precision averages, as in bitsandbytes: scales would cost more than codes save.
SMALLEST = 4096
# Suffixes of the names of an average's two tensors, in the optimizer's state and in checkpoints.
CODES, SCALE = "_codes", "_scale"
_SCALE_BYTES = 4
# The block size in proofs: in the small model that proofs train, rows are shorter than a usual block.
_REDUCED_BLOCK = 16


def packs(shape: Sequence[int], *, block_size: int, cuts_of_rows: int) -> bool:
    """Whether averages are stored in few bits: if the matrix is large and each rank's part of a row is whole blocks."""
    if len(shape) < 2 or math.prod(shape) < SMALLEST:
        return False
    return shape[-1] % (block_size * cuts_of_rows) == 0


@dataclass(frozen=True, kw_only=True)
class LowBit(Rounded):
    """AdamW that stores the two averages of every matrix in few bits, with one scale per block.

    Attributes:
        block_size: number of neighbouring elements in a row that share a scale.
        per_byte: elements of an average in one byte.
    """

    kind: str = ""
    per_byte: ClassVar[int] = 1
    block_size: int = 256

    # If a sum rounds differently, the neighbouring code may be stored; that changes an element's update by 5 %. The
    # measured difference is 6e-6.
    tolerances: ClassVar[Mapping[str, float]] = {"parameter": 1e-3, "loss": 1e-5, "grad_norm": 1e-4}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_size < 2 or self.block_size % 2:
            raise ConfigError("optimizer.block_size", self.block_size, "must be even and positive", "try 128 or 256")

    def check(self, setting: Setting) -> None:
        super().check(setting)
        needs_torchao("optimizer.kind", self.kind, cure="try optimizer=adamw")
        degree = setting.layout.tensor
        for name, shape in setting.model.parameters.items():
            columns = tensor_part(setting.model, name, tensor=degree)[-1] if shape else 0
            if packs(shape, block_size=self.block_size, cuts_of_rows=1) and columns % self.block_size:
                size = math.gcd(self.block_size, columns)
                rule = (
                    f"does not divide the {columns} columns of {name} on a rank of parallelism.tensor={degree}; "
                    "the rank would keep averages in full precision, and one process keeps them in few bits"
                )
                cure = f"try {size}" if size > 1 and size % 2 == 0 else "try a smaller parallelism.tensor"
                raise ConfigError("optimizer.block_size", self.block_size, rule, cure)

    def reduced(self, *, least_eps: float) -> OptimizerConfig:
        return replace(self, eps=max(self.eps, least_eps), block_size=_REDUCED_BLOCK)

    def state_bytes(self, parameter: Stored) -> int:
        cuts = parameter.shape[-1] // parameter.part[-1] if len(parameter.shape) > 1 and parameter.part[-1] else 1
        if not packs(parameter.shape, block_size=self.block_size, cuts_of_rows=cuts):
            return super().state_bytes(parameter)
        elements = math.prod(parameter.part)
        return 2 * (elements // self.per_byte + elements // self.block_size * _SCALE_BYTES) + STEP_BYTES


@option("optimizer", "adamw_8bit")
@dataclass(frozen=True, kw_only=True)
class AdamW8bit(LowBit):
    """AdamW with 8-bit averages (arXiv 2110.02861)."""

    kind: str = "adamw_8bit"


@option("optimizer", "adamw_4bit")
@dataclass(frozen=True, kw_only=True)
class AdamW4bit(LowBit):
    """AdamW with 4-bit averages (arXiv 2309.01507)."""

    kind: str = "adamw_4bit"
    per_byte: ClassVar[int] = 2
    block_size: int = 128


@option("optimizer", "adamw_fp8")
@dataclass(frozen=True, kw_only=True)
class AdamWFp8(LowBit):
    """AdamW with averages in float8 e4m3 (after arXiv 2409.12517)."""

    kind: str = "adamw_fp8"

    def check(self, setting: Setting) -> None:
        super().check(setting)
        capability = hardware.compute_capability(setting.device)
        if setting.accelerator == "cuda" and capability is not None and capability < _FP8_CAPABILITY:
            rule = f"converts to float8, which takes compute capability 8.9, and {setting.device} has less"
            raise ConfigError("optimizer.kind", self.kind, rule, "try optimizer=adamw_8bit")


@option("optimizer", "muon")
@dataclass(frozen=True, kw_only=True)
class Muon(Averaged):
    """Muon for the matrices of blocks, AdamW for all else (K. Jordan et al., 2024; at scale: arXiv 2502.16982).

    `betas` and `eps` apply to AdamW only; the fields that are not listed below apply to both.

    Attributes:
        momentum: decay of the average of gradients that is orthogonalised.
        nesterov: mix the current gradient into that average once more.
        newton_schulz_steps: iterations of the orthogonalisation.
        adjust_lr: `match_rms_adamw` scales an update to the size of AdamW's, so that AdamW's learning rates fit
            (0.2·√(larger side)); `original` scales it by √(rows / columns) if there are more rows than columns.
    """

    kind: str = "muon"
    momentum: float = field(default=0.95, metadata=OUTSIDE_STEP)
    nesterov: bool = field(default=True, metadata=NOT_PRICED)
    newton_schulz_steps: int = field(default=5, metadata={"least": 1, "most": 99})
    adjust_lr: str = field(
        default="match_rms_adamw", metadata={"choices": ("match_rms_adamw", "original"), **OUTSIDE_STEP}
    )

    # Matrices are made orthogonal in bf16: the measured difference of parameters after three steps is 3.6e-4.
    tolerances: ClassVar[Mapping[str, float]] = {"parameter": 3e-3, "loss": 1e-4, "grad_norm": 1e-3}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError("optimizer.momentum", self.momentum, "must lie in [0, 1)", "try 0.95")

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if setting.model.experts is not None:
            rule = "orthogonalises single matrices, and the model's experts are stacks of matrices"
            raise ConfigError("optimizer", self.kind, rule, "try optimizer=adamw")

    def applies_to(self, name: str, dims: int) -> bool:
        """Whether Muon updates a parameter; AdamW updates the others."""
        return is_in_block(name) and dims == 2

    def state_bytes(self, parameter: Stored) -> int:
        if self.applies_to(parameter.name, len(parameter.shape)):
            return parameter.part_bytes
        return super().state_bytes(parameter)

    def update_flops(self, parameter: Stored) -> float:
        """FLOPs of all iterations X ← aX + (bA + cA²)X, A = XXᵀ, on one rank's share (K. Jordan et al., 2024)."""
        if not self.applies_to(parameter.name, len(parameter.shape)):
            return 0.0
        short, long = sorted(parameter.shape)
        share = math.prod(parameter.part) / math.prod(parameter.shape)
        return self.newton_schulz_steps * (4.0 * short**2 * long + 2.0 * short**3) * share

    def implementation(self) -> OptimizerFactory:
        from titanlab.techniques.optimizer.muon import MuonFactory

        return MuonFactory(self)
