"""Building a model or a pipeline stage: from modules on the meta device to this rank's initialised parameters.

The order matters: meta → precision → tensor → context → expert → ac → compile → shard → materialise → initial values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titanlab.costs import account_for
from titanlab.distributed import Mesh, World
from titanlab.parallelism import (
    ExpertModules,
    Sharded,
    TensorParallel,
    check_attention,
    fully_shard_model,
    join_products,
    keep_whole,
    parallelise,
    replicate_model,
    scale_gradients,
    spread_attention,
    spread_experts,
    sum_gradients,
)
from titanlab.recipe import Recipe
from titanlab.techniques.model.language_model import LanguageModel, shapes_only
from titanlab.techniques.precision.cast import dtype_named, keep_in_fp32
from titanlab.techniques.precision.product import take_over
from titanlab.train.initialise import initialise


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A model, or some pieces of it, ready to compute.

    Attributes:
        sharded: the model distributed over data-parallel ranks.
        summands: parameters whose gradients have to be summed over the tensor axis after the backward.
        experts: parameters whose gradients have to be multiplied by `expert_factor` after the backward.
    """

    model: LanguageModel
    sharded: Sharded
    summands: Sequence[nn.Parameter]
    summed_in: torch.dtype
    mesh: Mesh
    experts: Sequence[nn.Parameter] = ()

    @property
    def expert_factor(self) -> float:
        """What FSDP2 divides other gradients by, relative to those of experts.

        It divides by the ranks that it sums over: replicate · shard · context, and of experts replicate ·
        shard · context · tensor / expert.
        """
        return self.mesh.layout.tensor / self.mesh.layout.expert

    def finish_gradients(self) -> None:
        """Sum the gradients of `summands` and scale those of `experts`, after a step's backward passes."""
        if self.summands:
            sum_gradients(self.summands, self.mesh.axis("tensor").get_group(), self.summed_in)
        if self.experts and self.expert_factor != 1:
            scale_gradients(self.experts, self.expert_factor)


def build_stage(recipe: Recipe, world: World, mesh: Mesh, *, pieces: Sequence[str] | None = None) -> Stage:
    """Build, cut, shard, materialise and initialise the recipe's model, or some pieces of it."""
    layout, config = recipe.layout, recipe.parallelism
    account = recipe.model.account()
    precision, formats = recipe.precision.implementation(), recipe.precision.formats()
    with shapes_only(), default_dtype(dtype_named(formats.master)):
        model = recipe.model.implementation().build(seq_len=recipe.training.seq_len)
    if pieces is not None:
        thin(model, account.pieces, pieces)
    precision.convert(model, world.device)
    if recipe.loss_chunk and (pieces is None or account.head in pieces):
        setting: Any = {"key": "training.loss_chunk", "value": recipe.loss_chunk, "cure": "try 0"}
        take_over(model.get_submodule(account.head), account.head, **setting)
    summands: frozenset[str] = frozenset()
    cut = None
    if layout.tensor > 1:
        cut = tensor_cut(recipe, mesh)
        summands = parallelise(model, account_for(account, layout).tensor_plan, cut)
    join_products(model, account.joined, cut)
    if layout.context > 1:
        check_attention(model, account, seq_len=recipe.training.seq_len, context=layout.context)
        spread_attention(model, account.attention, method=config.context_method, group=mesh.axis("context").get_group())
    experts = spread_experts(model, mesh.expert_axis) if layout.expert > 1 else []
    recipe.ac.implementation().apply({int(index): block for index, block in model.layers.items()})
    recipe.compile.implementation().compile_blocks(
        model.layers.values(),
        async_group=mesh.axis("tensor").get_group() if config.async_tensor else None,
        memory_budget=recipe.ac.compiler_budget(),
    )
    sharded = _apply_data_parallelism(model, recipe, world, mesh, experts)
    scaled = [parameter for module in experts for parameter in module.parameters()]
    summed = [parameter for name, parameter in model.named_parameters() if name in summands]
    # They are few numbers, so a wide dtype costs little and avoids another rounding.
    summed_in = torch.promote_types(dtype_named(formats.master), dtype_named(formats.reduce))
    return Stage(model=model, sharded=sharded, summands=summed, summed_in=summed_in, mesh=mesh, experts=scaled)


def tensor_cut(recipe: Recipe, mesh: Mesh) -> TensorParallel:
    """How tensor parallelism cuts the recipe's model."""
    return TensorParallel(
        mesh=mesh.axis("tensor"),
        seq_len=recipe.training.seq_len // recipe.layout.context,
        sequence_parallel=recipe.parallelism.sequence_parallel,
        loss_parallel=recipe.parallelism.loss_parallel,
    )


def _apply_data_parallelism(
    model: LanguageModel, recipe: Recipe, world: World, mesh: Mesh, experts: Sequence[nn.Module]
) -> Sharded:
    """Apply DDP or FSDP2, allocate storage and compute initial values."""
    layout, formats = recipe.layout, recipe.precision.formats()
    method = layout.data_parallelism(mixed=formats.mixed)
    sharded = keep_whole(model)
    if method == "fsdp2":
        units = keep_in_fp32(model, recipe.model.account(), formats)
        sharded = fully_shard_model(
            model,
            list(model.layers.values()),
            mesh.data_parallel,
            formats,
            reshard_after_forward=recipe.parallelism.frees_after_forward,
            cpu_offload=recipe.parallelism.cpu_offload,
            whole=units.whole,
            apart=units.apart,
            experts=ExpertModules(modules=experts, mesh=mesh.expert_data_parallel) if experts else None,
            symmetric_memory=recipe.parallelism.symmetric_memory,
        )
    with world.without_data or contextlib.nullcontext():
        materialise(model, recipe, world)
        if method == "ddp":
            sharded = replicate_model(model, mesh.axis("replicate"))
    return sharded


def thin(model: LanguageModel, pieces: Sequence[str], kept: Sequence[str]) -> None:
    """Remove the pieces of other stages from a model on the meta device."""
    for piece in pieces:
        if piece not in kept:
            container, _, key = piece.rpartition(".")
            owner = model.get_submodule(container)
            if isinstance(owner, nn.ModuleDict):
                del owner[key]
            else:
                setattr(owner, key, None)


def together(owners: Mapping[str, LanguageModel]) -> nn.Module:
    """A module with the given pieces of several stages, under their names in the whole model."""
    whole = nn.Module()
    for piece, stage in owners.items():
        container, _, key = piece.rpartition(".")
        if container and container not in dict(whole.named_children()):
            whole.add_module(container, nn.Module())
        whole.get_submodule(container).add_module(key, stage.get_submodule(piece))
    return whole


def materialise(model: LanguageModel, recipe: Recipe, world: World) -> None:
    """Allocate this rank's storage of a model on the meta device, and compute initial values."""
    model.to_empty(device="cpu" if recipe.parallelism.cpu_offload else world.device)
    model.init_buffers(world.device)
    if world.without_data is None:
        initialise(model, recipe.model.initial_values(), recipe.seed)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have this dtype by default inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
