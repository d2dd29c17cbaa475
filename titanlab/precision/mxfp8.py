"""precision=mxfp8: float8 products with a scale for every 32 elements, by torchao's prototype."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlab.errors import ConfigError
from titanlab.precision import bf16
from titanlab.precision.dtypes import Dtypes
from titanlab.precision.float8 import PRODUCTS, chooser, emulates
from titanlab.precision.mxfp8_schema import Mxfp8
from titanlab.system.quiet_import import import_quietly

_BLOCK = 32
_PROTOTYPE = "torchao.prototype.moe_training.mxfp8_linear"


class Mxfp8Linear(nn.Linear):
    """A linear layer that multiplies in mxfp8: [batch, seq, in] → [batch, seq, out].

    torchao's own names kernels of one GPU for the casts of the backward, emulated or not; here emulation has torch's.

    Attributes:
        multiply: (inputs, weight) → inputs · weightᵀ.
    """

    multiply: Callable[[Tensor, Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's)
        """See the class."""
        return _product(self, input, self.bias)


def dtypes(config: Mxfp8) -> Dtypes:
    """As in bf16."""
    return bf16.dtypes(config)


def convert(config: Mxfp8, model: nn.Module, device: torch.device) -> nn.Module:
    """Exchange the linear layers of a model on meta, but those that the config or their shape excepts.

    Args:
        device: where the model is going to compute.

    Raises:
        ConfigError: the device cannot, and is not to be emulated; or torchao does not have the prototype.
    """
    model = bf16.convert(config, model, device)
    multiply, chosen = _multiplier(emulate=emulates(config, device)), chooser(config)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and chosen(layer, name):
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, _exchanged(layer, multiply))
    return model


def tensor_styles(config: Mxfp8) -> Mapping[str, Callable[[nn.Module, Tensor, Tensor | None], Tensor]]:
    """How layers that the tensor plan cuts multiply with what a rank has of their weight, by style.

    Blocks of 32 do not cross the borders of parts: each rank scales as one process would, but for sums over ranks.
    """
    return dict.fromkeys(PRODUCTS, _product)


def _exchanged(layer: nn.Linear, multiply: Callable[[Tensor, Tensor], Tensor]) -> Mxfp8Linear:
    with torch.device("meta"):
        made = Mxfp8Linear(layer.in_features, layer.out_features, bias=False)
    made.weight, made.bias, made.multiply = layer.weight, layer.bias, multiply
    return made


def _product(layer: Any, inputs: Tensor, bias: Tensor | None) -> Tensor:
    weight: Any = layer.weight
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    output: Tensor = layer.multiply(inputs, local)
    return output if bias is None else output + bias.to(output.dtype)


def _multiplier(*, emulate: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """How to multiply inputs and weightᵀ, cast to e4m3 with scales that are rounded up: nothing overflows.

    Args:
        emulate: cast there and back, and multiply in high precision.

    Raises:
        ConfigError: this torchao does not have it, or not in this form.
    """
    try:
        linear = import_quietly(_PROTOTYPE)
        formats = import_quietly("torchao.prototype.mx_formats.config")
        kernels = import_quietly("torchao.quantization.quantize_.common.kernel_preference").KernelPreference
        first, second = formats.MXFP8Dim0CastKernelChoice, formats.MXFP8Dim1CastKernelChoice
    except (ImportError, AttributeError) as error:
        rule = f"this torchao lacks the prototype ({error})"
        raise ConfigError("precision", "mxfp8", rule, "pip install torchao>=0.18, or try precision=bf16") from error
    product, e4m3, rounding = linear.mx_mm, torch.float8_e4m3fn, formats.ScaleCalculationMode.RCEIL
    how = (kernels.EMULATED, first.TORCH, second.TORCH) if emulate else (kernels.AUTO, first.TRITON, second.CUDA)

    def multiply(inputs: Tensor, weight: Tensor) -> Tensor:
        output: Tensor = product.apply(inputs, weight, e4m3, e4m3, e4m3, _BLOCK, *how, rounding, False)
        return output

    return multiply
