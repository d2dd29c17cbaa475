"""Float8 by torchao: linear layers that cast what they multiply, forward and backward. What its options share.

A scale maps the largest element of a tensor, a row or a column to the largest number of the format (arXiv 2209.05433;
torchao's `float8`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlab.precision import bf16
from titanlab.precision.dtypes import Dtypes
from titanlab.precision.float8_account import matches
from titanlab.precision.float8_schema import Float8
from titanlab.precision.product import ATTRIBUTE, Product, rows
from titanlab.system.quiet_import import import_quietly

# The scale of a weight that is zero: torchao's own bound.
_SMALLEST = 1e-12
PRODUCTS = ("colwise", "rowwise", "head")


def dtypes(config: Float8) -> Dtypes:
    """As in bf16: torchao casts from what everything else computes in."""
    return bf16.dtypes(config)


def convert(config: Float8, model: nn.Module, device: torch.device) -> nn.Module:
    """Exchange the linear layers of a model on meta, but those that the config or their shape excepts.

    Args:
        device: where the model is going to compute.

    Raises:
        ConfigError: the device cannot, and is not to be emulated.
    """
    model = bf16.convert(config, model, device)
    float8 = import_quietly("torchao.float8")
    gathers = bool(getattr(config, "all_gather", False))
    settings = dataclasses.replace(
        float8.Float8LinearConfig.from_recipe_name(config.recipe),
        emulate=emulates(config, device),
        enable_fsdp_float8_all_gather=gathers,
    )
    chosen = chooser(config)
    model = float8.convert_to_float8_training(model, config=settings, module_filter_fn=chosen)
    layers = _layers(model)
    if layers:
        product = float8_product(layers[0].linear_mm_config, layers[0].config)
        for layer in layers:
            setattr(layer, ATTRIBUTE, product)
    if gathers:
        for layer in layers:
            layer.register_state_dict_post_hook(_save_plain)
    return model


def emulates(config: Float8, device: torch.device) -> bool:
    """Whether this device is to emulate, now that it is there to be asked.

    Raises:
        ConfigError: it cannot multiply so, and is not to be emulated.
    """
    capability = None if device.type == "cpu" else torch.cuda.get_device_capability(device)
    config.check_capability(capability, device.type)
    return config.emulates(capability)


def chooser(config: Float8) -> Callable[[nn.Module, str], bool]:
    """Which of a model's linear layers change; the account's rule, for modules."""

    def chosen(layer: nn.Module, name: str) -> bool:
        if any(matches(name, pattern) for pattern in config.skip):
            return False
        return not any(size % config.multiple for size in layer.weight.shape)  # type: ignore[union-attr]

    return chosen


def tensor_styles(config: Float8) -> Mapping[str, Callable[[nn.Module, Tensor, Tensor | None], Tensor]]:
    """None: layers say themselves how they multiply with what a rank has of their weight, see `float8_product`.

    Each rank scales what it has: a tensor's scale is that of this rank's part, which is finer than one for all of it
    and asks no other rank. Weights that are gathered in float8 have the scale of the whole.
    """
    return {}


def float8_product(multiplication: Any, config: Any) -> Product:
    """The product of torchao, and in halves its backward, which `matmul_with_hp_or_float8_args` has as one.

    Args:
        multiplication: a layer's `linear_mm_config`, of torchao.
        config: its `config`.
    """
    multiply = import_quietly("torchao.float8.float8_linear").matmul_with_hp_or_float8_args
    scaling = import_quietly("torchao.float8.float8_scaling_utils")
    roles = import_quietly("torchao.float8.float8_training_tensor").GemmInputRole
    is_cast = import_quietly("torchao.float8.distributed_utils").tensor_already_casted_to_fp8
    disabled = import_quietly("torchao.float8.config").ScalingType.DISABLED

    def cast(tensor: Tensor, how: Any, role: Any, dim: int) -> Tensor:
        """In float8, with scales along a dim if they are not of the whole, unless it is so or is to stay as it is."""
        if is_cast(tensor) or how.scaling_type is disabled:
            return tensor
        found: Tensor = scaling.hp_tensor_to_float8_dynamic(
            tensor,
            how.target_dtype,
            multiplication,
            gemm_input_role=role,
            scaling_granularity=how.scaling_granularity,
            axiswise_dim=scaling.get_maybe_axiswise_dim(dim, how.scaling_granularity),
            round_scales_to_power_of_2=config.round_scales_to_power_of_2,
        )
        return found

    def forward(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = multiply.apply(inputs, weight.t(), multiplication, config)
        return output if bias is None else output + bias.to(output.dtype)

    def of_inputs(gradient: Tensor, weight: Tensor) -> Tensor:
        left = cast(rows(gradient), config.cast_config_grad_output, roles.GRAD_OUTPUT, -1)
        right = cast(weight.t(), config.cast_config_weight_for_grad_input, roles.WEIGHT, -1)
        found: Tensor = torch.mm(left, right.t()).unflatten(0, gradient.shape[:-1])
        return found

    def of_weight(gradient: Tensor, inputs: Tensor) -> Tensor:
        left = cast(rows(gradient), config.cast_config_grad_output_for_grad_weight, roles.GRAD_OUTPUT, 0)
        right = cast(rows(inputs), config.cast_config_input_for_grad_weight, roles.INPUT, 0)
        return torch.mm(left.t(), right)

    return Product(forward, of_inputs, of_weight)


@torch.no_grad()
def after_update(config: Float8, model: nn.Module) -> None:
    """Compute the scales with which FSDP2 is going to gather the weights, all in one reduction.

    They are those of whole weights, whatever the layout. torchao's own `precompute_float8_dynamic_scale_for_fsdp` gives
    the same, but not for weights that tensor parallelism cuts along different dims, nor where a rank has no rows.
    """
    if not getattr(config, "all_gather", False):
        return
    weights = [layer.weight for layer in _layers(model) if isinstance(layer.weight, DTensor)]
    # The shards themselves, on which torchao looks for the scale: `to_local` may return another object.
    shards: list[Any] = [weight._local_tensor for weight in weights]
    if not shards:
        return
    plain = [shard._tensor if shard.numel() else shard._tensor.new_zeros(1) for shard in shards]
    largest = torch.stack(torch._foreach_norm(plain, float("inf")))
    mesh = weights[0].device_mesh
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1 and any(not weight.placements[axis].is_replicate() for weight in weights):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    # In 64 bits, as torchao divides where it computes a scale by itself.
    scales = torch.finfo(shards[0]._dtype).max / largest.clamp(min=_SMALLEST).double()
    for shard, scale in zip(shards, scales.float(), strict=True):
        shard._precomputed_scale = scale


def _layers(model: nn.Module) -> list[Any]:
    kind = import_quietly("torchao.float8.float8_linear").Float8Linear
    return [module for module in model.modules() if isinstance(module, kind)]


def _save_plain(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put plain tensors, of the same storage, into a state dict: a checkpoint knows nothing of float8."""
    name = f"{prefix}weight"
    weight = state[name]
    shard = weight._local_tensor if isinstance(weight, DTensor) else weight
    plain = getattr(shard, "_tensor", None)
    if plain is None:
        return
    if isinstance(weight, DTensor):
        plain = DTensor.from_local(
            plain, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    state[name] = plain
