"""One step of one rank: its parameters, its optimizer's state, what it communicates, and what its blocks keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titanlab.costs.account import BLOCKS
from titanlab.distributed.mesh import build_mesh
from titanlab.distributed.traffic import axis_groups, traced
from titanlab.dtensor import local_part
from titanlab.parallelism.gradients import Gradients
from titanlab.recipe.recipe import Recipe
from titanlab.tracing.declared import RankAccount
from titanlab.tracing.fake_world import fake_world
from titanlab.tracing.saved_bytes import SavedBytes
from titanlab.train.assemble import StepBatch, assemble
from titanlab.train.initialise import plain_name
from titanlab.train.totals import Reduction


def trace_rank(recipe: Recipe, rank: int) -> RankAccount:
    """Assemble a rank's part of a resolved recipe on tensors without data, and run one step.

    Args:
        recipe: runs in eager mode; see `titanlab.tracing.request.for_tracing`.
    """
    layout = recipe.layout
    with fake_world(rank, layout.world, nccl=recipe.cluster.accelerator == "cuda") as (world, mode):
        mesh = build_mesh(layout, "cpu")
        assembled = assemble(recipe, world, mesh)
        parameters = {plain_name(name): parameter for name, parameter in assembled.model.named_parameters()}
        saved = SavedBytes(_blocks(assembled.model))
        axes = axis_groups(mesh)
        with mode:
            optimizer = recipe.optimizer.implementation().build(parameters)
            gradients = Gradients(parameters.values(), world.world // layout.pipeline)
            assembled.after_update()
            tokens = torch.zeros(recipe.local_batch, recipe.training.seq_len // layout.context, dtype=torch.int64)
            with traced(axes) as step:
                sums = assembled.forward_backward(StepBatch(tokens, tokens, tokens.numel()))
                Reduction(
                    world,
                    squared_norm=gradients.squared_norm(),
                    loss_sum=sums.loss_sum,
                    tokens=sums.tokens,
                    stop=0,
                    nominal_tokens=recipe.tokens_per_step,
                    balance=assembled.balance,
                )
            with traced(axes) as update:
                optimizer.step()
                assembled.after_update()
        return RankAccount(
            rank=rank,
            parameters=sum(parameter.numel() for parameter in parameters.values()),
            parameter_bytes=_bytes(parameters.values()),
            optimizer_bytes=_bytes(_tensors(optimizer.state)),
            saved=saved.by_block,
            traffic=tuple(step.rows()),
            update_traffic=tuple(update.rows()),
        )


def _blocks(model: nn.Module) -> dict[int, nn.Module]:
    """Blocks of this rank by their number in the model."""
    blocks = dict(model.named_children()).get(BLOCKS, nn.Module())
    return {int(name): block for name, block in blocks.named_children()}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of this rank's parts: with FSDP2's padding."""
    storages = {}
    for tensor in tensors:
        for part in _plain(local_part(tensor)):
            storages[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return sum(storages.values())


def _plain(tensor: Any) -> list[Tensor]:
    """A tensor, or the plain tensors of which a subclass consists."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _tensors(state: Mapping[Any, Mapping[str, Any]]) -> list[Tensor]:
    return [value for values in state.values() for value in values.values() if isinstance(value, Tensor)]
