"""The contract of a precision: its number formats, a torch-free config, and an implementation."""

from __future__ import annotations

import fnmatch
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from titanlab.costs import ModelAccount, OptionConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titanlab.techniques.precision.cast import LossScale


# Bytes of an element, by torch's name of its dtype.
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# Names in configs → torch's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Config names of two pieces of any model; the names of their modules differ from model to model.
EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The dtypes of a run's tensors, by torch's names. Each attribute says which tensors have the dtype.

    Attributes:
        master: of stored parameters and gradients, and of optimizer states that have the parameters' dtype.
        compute: of gathered parameters and of activations.
        reduce: of gradients while they are summed over processes and microbatches.
        fp32_parts: parts that compute in float32 anyway: `embedding`, `head`, pieces, or patterns of pieces.
    """

    master: str
    compute: str
    reduce: str
    fp32_parts: tuple[str, ...] = ()

    @property
    def master_bytes(self) -> int:
        return BYTES[self.master]

    @property
    def compute_bytes(self) -> int:
        return BYTES[self.compute]

    @property
    def reduce_bytes(self) -> int:
        return BYTES[self.reduce]

    @property
    def mixed(self) -> bool:
        """Whether parameters are cast before they compute, or gradients before they are summed. FSDP2 does both."""
        return self.compute != self.master or self.reduce != self.master


@dataclass(frozen=True, kw_only=True)
class ProductFormat:
    """How a linear layer multiplies, if not in the precision of its activations.

    Attributes:
        forward, input_gradient, weight_gradient: torch's name of the dtype of each of the layer's three products.
        cast_bytes: bytes that casts in compiled code read and write for each element of its input, its weight and the
            gradient of its output, over the three products.
        cast_kernels: number of kernels that these casts take, for each of the three tensors.
        eager_cast_bytes, eager_cast_kernels: the same for casts outside compiled code.
        scales_gradients: whether a separate kernel scales the results of the products of gradients.
    """

    forward: str
    input_gradient: str
    weight_gradient: str
    cast_bytes: float
    cast_kernels: int
    # Each operand is cast for two products, by six kernels: |x| reads 2 and writes 2, the maximum reads 2, the copy in
    # float32 reads 2 and writes 4, its product with the scale and the clamp read 4 and write 4 each, and the cast
    # reads 4 and writes 1.
    eager_cast_bytes: float = 66.0
    eager_cast_kernels: int = 12
    scales_gradients: bool = False


def matched(account: ModelAccount, parts: Sequence[str]) -> tuple[str, ...]:
    """The pieces of a model that names or patterns match, in the order of the forward pass."""
    named = {EMBEDDING: next((p for p in account.pieces if account.embedding.startswith(f"{p}.")), EMBEDDING)}
    named |= {HEAD: account.pieces[-1]} if account.pieces else {}
    patterns = [named.get(part, part) for part in parts]
    return tuple(piece for piece in account.pieces if any(fnmatch.fnmatchcase(piece, part) for part in patterns))


class PrecisionConfig(OptionConfig, Protocol):
    """Config of a precision. A dataclass that inherits from it has to define `kind` and `formats`.

    Attributes:
        mfu_note: what MFU means if some products are faster than the peak FLOP/s in its denominator; empty: none are.
        layer_class: full name of the class that replaces the layers in `products`; empty: no layer is replaced.
        splits_products: whether the replaced layers compute the gradients of their input and their weight separately
            (`titanlab.techniques.precision.product`).
        multiple: both dims of a replaced layer's weight, and the tokens of a forward pass, must be multiples of this
            number.
    """

    mfu_note: ClassVar[str] = ""
    layer_class: ClassVar[str] = ""
    splits_products: ClassVar[bool] = True
    multiple: ClassVar[int] = 1

    @abstractmethod
    def formats(self) -> Formats:
        """The number formats of the run."""

    def float8_gathered(self, model: ModelAccount) -> frozenset[str]:
        """Names of the parameters that FSDP2 gathers with one byte per element."""
        return frozenset()

    @property
    def gathers_activations(self) -> bool:
        """Whether tensor parallelism gathers inputs and output gradients of the layers in `products` in float8.

        Each rank then casts only its own part.
        """
        return False

    def products(self, model: ModelAccount) -> Mapping[str, ProductFormat]:
        """Path of each linear layer that does not multiply in the compute dtype → its format."""
        return {}

    def on_device(self, *, accelerator: str, device: str) -> PrecisionConfig:
        """For estimates: the emulation of this precision if the device emulates it; by default this precision."""
        return self

    def product_bits(self) -> int:
        """Bits of the narrowest format in which layers multiply; by default the compute dtype of parameters."""
        return 8 * self.formats().compute_bytes

    def describe(self, model: ModelAccount, *, accelerator: str, device: str) -> str:
        """The text that describes the precision in the table at a run's start."""
        return self.kind

    def check_device(self, *, accelerator: str, device: str) -> None:
        """Raise ConfigError if no recipe can use this precision on the device; by default, every device can."""
        return

    def emulated(self) -> PrecisionConfig:
        """This precision in a form that every device can compute, with the same rounding; by default unchanged."""
        return self

    def reduced(self, *, layers: int, note: Callable[[str], None]) -> PrecisionConfig:
        """This precision for the small copy, of `layers` blocks, that proofs and rehearsals train on a CPU.

        `note` is called with each difference, in one line.
        """
        return self

    def implementation(self) -> Precision:
        """The implementation; by default it casts parameters and activations, and replaces no module."""
        from titanlab.techniques.precision.cast import Cast

        return Cast()


class Precision(Protocol):
    """Implementation of a precision; `titanlab.techniques.precision.cast.Cast` has a default for each method."""

    @abstractmethod
    def convert(self, model: nn.Module, device: torch.device) -> None:
        """Replace modules of a model on the meta device, in place.

        A linear layer with its own `forward` must name its product in the attribute `product`
        (`titanlab.techniques.precision.product`). Without this attribute no other code may compute in the layer's
        place: tensor parallelism, fused projections and a loss in chunks are then refused.

        Raises:
            ConfigError: the device cannot compute in this precision.
        """

    @abstractmethod
    def loss_scale(self, device: torch.device) -> LossScale:
        """The object that scales the loss and calls the optimizer's step."""

    @abstractmethod
    def after_update(self, model: nn.Module) -> None:
        """Called before the first step and after each update of the parameters."""
