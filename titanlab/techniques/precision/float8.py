"""Float8 by torchao: linear layers that cast the operands of their products, forward and backward.

A scale maps the largest element of a tensor, a row or a column to the largest number of the format (arXiv 2209.05433;
torchao's `float8`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlab.dtensor import distributed_like, local_part
from titanlab.errors import ConfigError
from titanlab.system import import_quietly
from titanlab.techniques.precision.cast import Cast
from titanlab.techniques.precision.float8_schema import Float8, Mxfp8
from titanlab.techniques.precision.product import ATTRIBUTE, JOINED, Product, rows

# torchao's lower bound of the largest element; it makes the scale of a zero weight finite.
_SMALLEST = 1e-12


class Float8Layers(Cast):
    """Replaces linear layers with torchao's float8 layers.

    Under tensor parallelism each layer multiplies this rank's part with scales of that part (see `float8_product`):
    these scales are finer than those of the full tensor and need no communication. Only weights that are gathered in
    float8 have the scale of the full weight.
    """

    def __init__(self, config: Float8) -> None:
        self._config = config

    def convert(self, model: nn.Module, device: torch.device) -> None:
        config = self._config
        float8 = import_quietly("torchao.float8")
        settings = dataclasses.replace(
            float8.Float8LinearConfig.from_recipe_name(config.recipe),
            emulate=emulates(config, device),
            enable_fsdp_float8_all_gather=config.gathers_float8,
        )
        float8.convert_to_float8_training(
            model, config=settings, module_filter_fn=lambda layer, name: config.converts(name, layer.weight.shape)
        )
        layers = _layers(model)
        product = float8_product(layers[0].linear_mm_config, layers[0].config) if layers else None
        for layer in layers:
            setattr(layer, ATTRIBUTE, product)
            if config.gathers_float8:
                layer.register_state_dict_post_hook(_save_plain)

    @torch.no_grad()
    def after_update(self, model: nn.Module) -> None:
        """Compute the scales with which FSDP2 will gather the weights, all in one reduction.

        These are the scales of full weights, in every layout. torchao's `precompute_float8_dynamic_scale_for_fsdp`
        computes the same, but fails if tensor parallelism shards weights along different dims, or if a rank has no
        rows.
        """
        if not self._config.gathers_float8:
            return
        layers = [layer for layer in _layers(model) if isinstance(layer.weight, DTensor)]
        weights = [layer.weight for layer in layers]
        # torchao looks for the scale on the shards themselves; `to_local` may return another object.
        shards: list[Any] = [weight._local_tensor for weight in weights]
        if not shards:
            return
        plain = [shard._tensor if shard.numel() else shard._tensor.new_zeros(1) for shard in shards]
        largest = torch.stack(torch._foreach_norm(plain, float("inf")))
        mesh = weights[0].device_mesh
        for axis in range(mesh.ndim):
            if mesh.size(axis) > 1 and any(not weight.placements[axis].is_replicate() for weight in weights):
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
        largest = _of_joined(largest, layers)
        # Divide in 64 bits, as torchao does when it computes a scale itself.
        scales = torch.finfo(shards[0]._dtype).max / largest.clamp(min=_SMALLEST).double()
        for shard, scale in zip(shards, scales.float(), strict=True):
            shard._precomputed_scale = scale


def _of_joined(largest: Tensor, layers: Sequence[nn.Module]) -> Tensor:
    """The largest element of each layer's weight; layers that are joined to one product share the largest of all."""
    groups: dict[object, int] = {}
    # A layer that is not joined with others is its own group.
    numbers = [groups.setdefault(getattr(layer, JOINED, layer), len(groups)) for layer in layers]
    if len(groups) == len(layers):
        return largest
    places = torch.tensor(numbers, device=largest.device)
    return largest.new_zeros(len(groups)).scatter_reduce(0, places, largest, "amax")[places]


def emulates(config: Float8, device: torch.device) -> bool:
    """Whether this device must emulate float8.

    Raises:
        ConfigError: the device cannot multiply in float8, and the config does not allow emulation.
    """
    capability = None if device.type == "cpu" else torch.cuda.get_device_capability(device)
    config.check_capability(capability, device.type)
    return config.emulates(capability)


def float8_product(multiplication: Any, config: Any) -> Product:
    """The product of torchao's layers, but with a separate function for each gradient: torchao computes both at once.

    `multiplication`: the `linear_mm_config` of a torchao layer.
    """
    multiply = import_quietly("torchao.float8.float8_linear").matmul_with_hp_or_float8_args
    scaling = import_quietly("torchao.float8.float8_scaling_utils")
    roles = import_quietly("torchao.float8.float8_training_tensor").GemmInputRole
    is_cast = import_quietly("torchao.float8.distributed_utils").tensor_already_casted_to_fp8
    tensor_class = import_quietly("torchao.float8.float8_training_tensor").Float8TrainingTensor
    disabled = import_quietly("torchao.float8.config").ScalingType.DISABLED

    def cast(tensor: Tensor, how: Any, role: Any, dim: int) -> Tensor:
        """A tensor in float8, with a scale for each slice along `dim` or one for the whole tensor."""
        # Do not cast what is in float8 already, or what the config wants to multiply in high precision.
        if is_cast(tensor) or how.scaling_type is disabled:
            return tensor
        result: Tensor = scaling.hp_tensor_to_float8_dynamic(
            tensor,
            how.target_dtype,
            multiplication,
            gemm_input_role=role,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=scaling.get_maybe_axiswise_dim(dim, how.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )
        return result

    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = multiply.apply(inputs, weight.t(), multiplication, config)
        return output if bias is None else output + bias.to(output.dtype)

    def of_inputs(gradient: Tensor, weight: Tensor) -> Tensor:
        left = cast(rows(gradient), config.cast_config_grad_output, roles.GRAD_OUTPUT, -1)
        right = cast(weight.t(), config.cast_config_weight_for_grad_input, roles.WEIGHT, -1)
        return torch.mm(left, right.t()).view(*gradient.shape[:-1], weight.shape[1])

    def of_weight(gradient: Tensor, inputs: Tensor) -> Tensor:
        left = cast(rows(gradient), config.cast_config_grad_output_for_grad_weight, roles.GRAD_OUTPUT, 0)
        right = cast(rows(inputs), config.cast_config_input_for_grad_weight, roles.INPUT, 0)
        return torch.mm(left.t(), right)

    def for_forward(weight: Tensor) -> Tensor:
        return cast(weight.t(), config.cast_config_weight, roles.WEIGHT, 0).t()

    def for_inputs(weight: Any) -> Tensor:
        factor: Any = cast(weight.t(), config.cast_config_weight_for_grad_input, roles.WEIGHT, -1).t()
        if not is_cast(factor):
            return weight  # type: ignore[no-any-return]
        # The kernels need the right operand in column-major order; torchao would copy it at each product.
        data = factor._data.t().contiguous().t()
        by_columns: Tensor = tensor_class(
            data,
            factor._scale,
            factor._orig_dtype,
            factor._linear_mm_config,
            factor._gemm_input_role,
            factor._axiswise_dim,
        )
        return by_columns

    @torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
    def join_cast(*weights: Any) -> Tensor:
        # torchao's own concatenation requires that all parts share one scale object.
        first = weights[0]
        data = torch.cat([weight._data.view(torch.uint8) for weight in weights]).view(first._data.dtype)
        joined: Tensor = tensor_class(
            data, first._scale, first._orig_dtype, first._linear_mm_config, first._gemm_input_role
        )
        return joined

    def join(weights: Sequence[Tensor]) -> Tensor:
        return join_cast(*weights) if is_cast(weights[0]) else torch.cat(list(weights))

    return Product(forward, of_inputs, of_weight, for_forward, for_inputs, join)


def _layers(model: nn.Module) -> list[Any]:
    float8_linear = import_quietly("torchao.float8.float8_linear").Float8Linear
    return [module for module in model.modules() if isinstance(module, float8_linear)]


def _save_plain(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the weight as a plain tensor (same storage) into a state dict: checkpoints do not depend on the precision."""
    name = f"{prefix}weight"
    weight = state[name]
    shard = weight._local_tensor if isinstance(weight, DTensor) else weight
    plain = getattr(shard, "_tensor", None)
    if plain is None:
        return
    state[name] = distributed_like(weight, plain)


_BLOCK = 32
_PROTOTYPE = "torchao.prototype.moe_training.mxfp8_linear"


class Mxfp8Linear(nn.Linear):
    """A linear layer that multiplies in mxfp8: [batch, seq, in] → [batch, seq, out].

    torchao's layer casts with GPU kernels in the backward pass even when it emulates; this layer emulates with torch's
    operators. Under tensor parallelism it multiplies this rank's part of its weight. A block of 32 is always inside one
    part, so each rank has the scales that one process would have; only the sums over ranks round differently.
    """

    product: Product

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's)
        return self.product.forward(input, local_part(self.weight), self.bias)


class Mxfp8Layers(Cast):
    """Replaces linear layers by `Mxfp8Linear`."""

    def __init__(self, config: Mxfp8) -> None:
        self._config = config

    def convert(self, model: nn.Module, device: torch.device) -> None:
        multiply = _multiplier(emulate=emulates(self._config, device))

        def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            output = multiply(inputs, weight)
            return output if bias is None else output + bias.to(output.dtype)

        # This product has no functions for separate gradients: torchao computes both gradients at once.
        product = Product(forward)
        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and self._config.converts(name, layer.weight.shape):
                owner, _, leaf = name.rpartition(".")
                with torch.device("meta"):
                    replacement = Mxfp8Linear(layer.in_features, layer.out_features, bias=False)
                replacement.weight, replacement.bias, replacement.product = layer.weight, layer.bias, product
                setattr(model.get_submodule(owner), leaf, replacement)


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
