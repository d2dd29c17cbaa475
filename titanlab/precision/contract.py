"""The contract of a precision: a torch-free config, and an implementation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from titanlab.costs.account import ModelAccount
from titanlab.costs.setting import Setting
from titanlab.precision.account import Formats, Product

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titanlab.precision.loss_scale import LossScale


class PrecisionConfig(Protocol):
    """Config of a precision. A dataclass that inherits from it has to define `kind` and `formats`.

    Attributes:
        mfu_note: what an MFU means whose products are faster than the peak that it divides by; empty: none is.
        layer_class: full name of the class of the layers of `products`; empty: it replaces no layer.
        splits_products: whether these layers compute the gradients of their input and their weight separately
            (`titanlab.precision.product`).
        multiple: both dims of the weights of these layers, and the tokens of a forward pass, are multiples of it.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    kind: str
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

    def products(self, model: ModelAccount) -> Mapping[str, Product]:
        """Path of each linear layer that does not multiply in the compute precision → how it multiplies."""
        return {}

    def product_bits(self) -> int:
        """Bits of the narrowest numbers that layers multiply; by default those of parameters that compute."""
        return 8 * self.formats().compute_bytes

    def describe(self, model: ModelAccount, *, accelerator: str, device: str) -> str:
        """The text for the table at the start."""
        return self.kind

    def check(self, setting: Setting) -> None:
        """Check that the rest of the recipe fits this precision.

        Raises:
            ConfigError: it does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method

    def check_device(self, *, accelerator: str, device: str) -> None:
        """Check that a device can compute in this precision, whatever else the recipe has.

        Args:
            accelerator: `cpu` or `cuda`.
            device: the accelerator's name.

        Raises:
            ConfigError: it cannot.
        """
        return

    def emulated(self) -> PrecisionConfig:
        """The same precision in a form that every device computes, with the same rounding; by default this one."""
        return self

    def reduced(self, *, layers: int, note: Callable[[str], None]) -> PrecisionConfig:
        """The same precision on a CPU, for a model of few blocks, in proofs and rehearsals; by default this one.

        Args:
            layers: number of blocks.
            note: is called with each difference, in one line.
        """
        return self

    def implementation(self) -> Precision:
        """By default parameters and activations are cast, and no module is replaced."""
        from titanlab.precision.cast import Cast

        return Cast()


class Precision(Protocol):
    """Implementation of a precision; `titanlab.precision.cast.Cast` has a default for each method."""

    @abstractmethod
    def convert(self, model: nn.Module, device: torch.device) -> None:
        """Replace modules of a model on the meta device, in place.

        A linear layer with another `forward` names its product in the attribute `product`
        (`titanlab.precision.product`). Without it no code may compute in the layer's place: tensor parallelism, fused
        projections and a loss in chunks are refused.

        Args:
            device: on which the model will compute.

        Raises:
            ConfigError: the device cannot compute in this precision.
        """

    @abstractmethod
    def loss_scale(self, device: torch.device) -> LossScale:
        """The object that scales the loss and calls the optimizer's step."""

    @abstractmethod
    def after_update(self, model: nn.Module) -> None:
        """Called before the first step and after each update of the parameters."""
