"""Assembly: from a recipe to one function that trains a step, in one fixed order.

meta → precision → shard → materialise → initial values. The parts do not know each other; here they
meet, and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanlab.initialise import initialise
from titanlab.mesh import shard_view
from titanlab.model.contract import LanguageModel
from titanlab.options import account_of, implementation
from titanlab.parallelism.shard import Sharded, fully_shard_model, keep_whole, replicate_model
from titanlab.precision.dtypes import Dtypes
from titanlab.recipe import Recipe
from titanlab.world import World

IGNORE = -100


class StepBatch(NamedTuple):
    """One rank's share of a step, on its device.

    tokens: [sequences, seq] int64
    labels: [sequences, seq] int64; -100 does not count
    valid: labels that count, as a number
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    valid: int


class Sums(NamedTuple):
    """What one rank adds to a step's totals.

    loss_sum: float32 scalar, cross-entropy summed over the valid labels
    tokens: number of valid labels
    """

    loss_sum: torch.Tensor
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A model ready to train.

    Attributes:
        model: the module whose parameters this rank holds, named as in the model's account.
        forward_backward: runs all microbatches of a step; leaves gradients of
            loss_sum / recipe.tokens_per_step, summed over data-parallel ranks.
        evaluate: the same sums without gradients.
    """

    model: nn.Module
    forward_backward: Callable[[StepBatch], Sums]
    evaluate: Callable[[StepBatch], Sums]


def assemble(recipe: Recipe, world: World, mesh: DeviceMesh) -> Assembled:
    """Build, spread, materialise and initialise the recipe's model."""
    part = implementation(recipe.model)
    precision = implementation(recipe.precision)
    dtypes: Dtypes = precision.dtypes(recipe.precision)
    with torch.device("meta"), default_dtype(dtypes.master):
        model: LanguageModel = part.build(recipe.model, seq_len=recipe.training.seq_len)
    model = precision.convert(recipe.precision, model)
    if recipe.layout.shard > 1 or dtypes.mixed:
        # FSDP2 also casts for compute, so that one process in bf16 computes what many do.
        sharded = fully_shard_model(model, list(model.layers.values()), shard_view(mesh), recipe.parallelism, dtypes)
        materialise(model, recipe, world)
    else:
        materialise(model, recipe, world)
        sharded = replicate_model(model, mesh["replicate"]) if recipe.layout.replicate > 1 else keep_whole(model)
    return Assembled(
        model=model,
        forward_backward=_trainer(sharded, recipe),
        evaluate=_evaluator(sharded, recipe),
    )


def materialise(model: LanguageModel, recipe: Recipe, world: World) -> None:
    """Give a model on meta its storage, this rank's part only, and its initial values."""
    model.to_empty(device="cpu" if recipe.parallelism.cpu_offload else world.device)
    model.init_buffers(world.device)
    initialise(model, account_of(recipe.model).initial_values(recipe.model), recipe.seed)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating-point tensors have this dtype inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32, summed over labels that are not IGNORE.

    logits: [batch, seq, vocab]; labels: [batch, seq]; returns a scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def _trainer(sharded: Sharded, recipe: Recipe) -> Callable[[StepBatch], Sums]:
    # A constant known to all ranks: dividing by it here keeps gradients small in low precision, and
    # the loop corrects them exactly where fewer labels were valid.
    scale = sharded.divides_by / recipe.tokens_per_step
    size = recipe.microbatch

    def forward_backward(batch: StepBatch) -> Sums:
        total: torch.Tensor | None = None
        count = batch.tokens.shape[0]
        for start in range(0, count, size):
            with sharded.microbatch(last=start + size >= count):
                loss = loss_sum(sharded.forward(batch.tokens[start : start + size]), batch.labels[start : start + size])
                (loss * scale).backward()
            loss = loss.detach()
            total = loss if total is None else total + loss
        assert total is not None
        return Sums(total, batch.valid)

    return forward_backward


def _evaluator(sharded: Sharded, recipe: Recipe) -> Callable[[StepBatch], Sums]:
    @torch.no_grad()
    def evaluate(batch: StepBatch) -> Sums:
        sums = Sums(loss_sum(sharded.forward(batch.tokens), batch.labels), batch.valid)
        sharded.release()
        return sums

    return evaluate
