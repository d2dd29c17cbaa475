"""precision=mxfp8: float8 products with a scale for every 32 elements, by torchao's prototype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titanlab.dtensor import local_part
from titanlab.errors import ConfigError
from titanlab.precision.cast import Cast
from titanlab.precision.float8 import emulates, layer_filter
from titanlab.precision.mxfp8_schema import Mxfp8
from titanlab.precision.product import Product
from titanlab.system.imports import import_quietly

_BLOCK = 32
_PROTOTYPE = "torchao.prototype.moe_training.mxfp8_linear"


class Mxfp8Linear(nn.Linear):
    """A linear layer that multiplies in mxfp8: [batch, seq, in] → [batch, seq, out].

    torchao's layer casts with GPU kernels in the backward pass even when it emulates; this layer then uses torch's.
    Under tensor parallelism it multiplies this rank's part of its weight. A block of 32 is always inside one part, so
    each rank has the scales that one process would have; only the sums over ranks round differently.
    """

    product: Product

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's)
        """See the class."""
        return self.product.forward(input, local_part(self.weight), self.bias)


class Mxfp8Layers(Cast):
    """Replaces linear layers by `Mxfp8Linear`."""

    def __init__(self, config: Mxfp8) -> None:
        self._config = config

    def convert(self, model: nn.Module, device: torch.device) -> None:
        """Replace the linear layers of a model on the meta device, unless the config or their shape excludes them.

        Raises:
            ConfigError: the device can neither multiply in mxfp8 nor emulate it, or torchao lacks the prototype.
        """
        product = mxfp8_product(emulate=emulates(self._config, device))
        is_converted = layer_filter(self._config)
        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and is_converted(layer, name):
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, _mxfp8_layer(layer, product))


def _mxfp8_layer(layer: nn.Linear, product: Product) -> Mxfp8Linear:
    with torch.device("meta"):
        replacement = Mxfp8Linear(layer.in_features, layer.out_features, bias=False)
    replacement.weight, replacement.bias, replacement.product = layer.weight, layer.bias, product
    return replacement


def mxfp8_product(*, emulate: bool) -> Product:
    """Torchao's product, which computes both gradients at once; see `_multiplier`."""
    multiply = _multiplier(emulate=emulate)

    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = multiply(inputs, weight)
        return output if bias is None else output + bias.to(output.dtype)

    return Product(forward)


def _multiplier(*, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of (inputs, weight) that multiplies in e4m3; scales are rounded up, so that nothing overflows.

    Args:
        emulate: cast to mxfp8 and back, and multiply in high precision.

    Raises:
        ConfigError: this torchao lacks the prototype, or has another version of it.
    """
    try:
        linear = import_quietly(_PROTOTYPE)
        formats = import_quietly("torchao.prototype.mx_formats.config")
        kernels = import_quietly("torchao.quantization.quantize_.common.kernel_preference").KernelPreference
        first, second = formats.MXFP8Dim0CastKernelChoice, formats.MXFP8Dim1CastKernelChoice
        product, rounding = linear.mx_mm, formats.ScaleCalculationMode.RCEIL
        kernel = (kernels.EMULATED, first.TORCH, second.TORCH) if emulate else (kernels.AUTO, first.TRITON, second.CUDA)
    except (ImportError, AttributeError) as error:
        rule = f"this torchao lacks the prototype ({' '.join(str(error).split())})"
        raise ConfigError("precision", "mxfp8", rule, "pip install torchao>=0.18, or try precision=bf16") from error
    e4m3 = torch.float8_e4m3fn

    def multiply(inputs: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = product.apply(inputs, weight, e4m3, e4m3, e4m3, _BLOCK, *kernel, rounding, False)
        return output

    return multiply
