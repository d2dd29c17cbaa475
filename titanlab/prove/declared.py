"""A rank's bytes and communication in a step, as the parts of a recipe declare them. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from titanlab.costs import (
    AXES,
    FSDP_AXES,
    Coordinate,
    Layout,
    ModelAccount,
    TrafficRow,
    account_for,
    block_input,
    cuts_of,
    is_in_block,
    kept_activations,
    sharded_dim,
    step_traffic,
    stored_part,
    tensor_part,
)
from titanlab.plan import share_of
from titanlab.recipe import Recipe, pieces_by_stage, step_of
from titanlab.techniques.optimizer.contract import Stored


@dataclass(frozen=True, kw_only=True)
class RankAccount:
    """What one rank stores, keeps and sends in a step."""

    rank: int  # in the world
    parameters: int  # number of parameters in the rank's pieces of the model, counted before sharding
    # Bytes that the rank stores; `parameter_bytes` includes FSDP2's padding.
    parameter_bytes: int
    optimizer_bytes: int
    saved: Mapping[int, int]  # by block, bytes that the rank keeps of a microbatch between forward and backward
    traffic: Sequence[TrafficRow]  # of forward, backward and the reduction of the step's totals
    update_traffic: Sequence[TrafficRow] = ()  # of the optimizer's step: only traced, never declared


def place_of(layout: Layout, rank: int) -> Coordinate:
    """The coordinate of a rank of the world on the axes of a layout."""
    numbers, rest, degrees = {}, rank, layout.degrees()
    for axis in reversed(AXES):
        rest, numbers[axis] = divmod(rest, degrees[axis])
    fsdp = 0
    for axis in FSDP_AXES:
        fsdp = fsdp * degrees[axis] + numbers[axis]
    return Coordinate(pipeline=numbers["pipeline"], context=numbers["context"], tensor=numbers["tensor"], fsdp=fsdp)


def declared(recipe: Recipe, rank: int) -> RankAccount:
    """The account of a rank, as the parts of a resolved recipe (model, optimizer, …) declare it."""
    layout = recipe.layout
    model = account_for(recipe.account, layout)
    place = place_of(layout, rank)
    if layout.pipeline == 1:
        stages: list[tuple[int, Sequence[str]]] = [(0, recipe.model.account().pieces)]
    else:
        placed = zip(pieces_by_stage(recipe), recipe.schedule.placement(ranks=layout.pipeline), strict=True)
        stages = [(number, pieces) for number, (pieces, owner) in enumerate(placed) if owner == place.pipeline]
    pieces = [piece for _, stage in stages for piece in stage]
    names = [name for name in model.parameters if any(name.startswith(f"{piece}.") for piece in pieces)]
    names = names or list(model.parameters)
    stored = [_stored(recipe, model, name, place, padded=True) for name in names]
    # The optimizer has no state for a shard's padding.
    updated = [_stored(recipe, model, name, place, padded=False) for name in names if name not in model.frozen]
    return RankAccount(
        rank=rank,
        parameters=sum(math.prod(parameter.shape) for parameter in stored),
        parameter_bytes=sum(parameter.part_bytes for parameter in stored),
        optimizer_bytes=sum(recipe.optimizer.state_bytes(parameter) for parameter in updated),
        saved=_saved_by_block(recipe, stages),
        traffic=tuple(step_traffic(step_of(recipe), place)),
    )


def _stored(recipe: Recipe, model: ModelAccount, name: str, place: Coordinate, *, padded: bool) -> Stored:
    layout, formats = recipe.layout, recipe.precision.formats()
    cuts = cuts_of(model, name, layout)
    # Parameters of experts, which are cut by other degrees, have equal parts: the first one stands for all.
    number, fsdp = (place.tensor, place.fsdp) if (cuts.tensor, cuts.fsdp) == (layout.tensor, layout.fsdp) else (0, 0)
    part = list(tensor_part(model, name, tensor=cuts.tensor, number=number))
    if layout.data_parallelism(mixed=formats.mixed) == "fsdp2":
        dim = sharded_dim(model, name, **cuts._asdict())
        shard = stored_part(model, name, **cuts._asdict(), number=number)[dim]
        part[dim] = shard if padded else max(0, min(shard, part[dim] - fsdp * shard))
    return Stored(name=name, shape=model.parameters[name], part=tuple(part), element_bytes=formats.master_bytes)


def _saved_by_block(recipe: Recipe, stages: Sequence[tuple[int, Sequence[str]]]) -> dict[int, int]:
    step = step_of(recipe)
    block = recipe.model.block_operations(batch=recipe.microbatch, seq_len=recipe.training.seq_len)
    by_block = {}
    for stage, pieces in stages:
        for place, piece in enumerate(pieces):
            if not is_in_block(piece):
                continue
            number = int(piece.rpartition(".")[2])
            if piece in step.account.idle:
                continue
            # A trace runs CPU kernels, so count what these save.
            share = replace(share_of(recipe), element_bytes=step.element_bytes(piece), accelerator="cpu")
            saved = recipe.ac.saved_bytes(block, share, number=number)
            if stage > 0 and place == 0 and saved == share.bytes_of(kept_activations(block)):
                # A pipeline keeps the input of a stage, even if the stage's first block does not.
                saved = share.bytes_of([*kept_activations(block), block_input(block)])
            by_block[number] = saved
    return by_block
