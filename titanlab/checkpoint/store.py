"""A run's state on disk: one folder a step, complete or absent.

A checkpoint is written by all ranks into `step-N.part`, which rank 0 renames to `step-N` when every
rank has finished: a folder without the suffix is whole.

    step-000100/
        .metadata, *.distcp   model, optimizer and generators, by torch.distributed.checkpoint
        position.json         step, tokens seen, position in the data, tracker id, shapes of the model, sizes of files
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from titanlab.checkpoint.folders import PART, checkpoints, read_checked, remove, remove_unfinished, step_folder
from titanlab.checkpoint.generators import generator_states, restore_generators, saved_states
from titanlab.checkpoint.position import POSITION, Position
from titanlab.checkpoint.reader import CheckpointReader, load_state
from titanlab.distributed.world import World
from titanlab.system.atomic_file import write_json
from titanlab.system.disk import disk_fault, refusal


def save(
    folder: Path,
    position: Position,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    keep: int,
    warn: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write `folder/step-N` together with all ranks and drop the oldest beyond `keep` (0: none).

    Args:
        warn: told, on rank 0, of an old checkpoint that cannot be removed.

    Returns:
        the checkpoint's folder, complete.
    """
    final = step_folder(folder, position.step)
    part = final.with_name(final.name + PART)
    if world.rank == 0:
        remove_unfinished(folder)
        part.mkdir(parents=True)
    world.share(None)
    try:
        dcp.save(_tensors(model, optimizer, world), checkpoint_id=part)
    except CheckpointException as error:
        # All ranks learn of it, and none writes any more.
        refused = refusal(part)
        world.share(None)
        if world.rank == 0:
            # On a full disk the partial files take the space that the record of the run's end needs.
            remove(part)
        if refused is not None and disk_fault(refused) is not None:
            raise refused from error
        raise
    # Each stage of a pipeline knows only its own.
    shapes = dict(
        itertools.chain.from_iterable(world.gather([(n, list(p.shape)) for n, p in model.named_parameters()]))
    )
    if world.rank == 0:
        files = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        write_json(part / POSITION, {**asdict(position), "parameters": shapes, "files": files}, durable=True)
        # From an attempt that was later resumed from an earlier step.
        obstacle = remove(final)
        if obstacle is not None:
            raise obstacle
        part.rename(final)
        for old in checkpoints(folder)[:-keep] if keep else []:
            obstacle = remove(old)
            if obstacle is not None:
                warn(f"the old checkpoint {old} cannot be removed: {obstacle.strerror or obstacle}")
    world.share(None)
    return final


def load(folder: Path, key: str, *, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Position:
    """Read a checkpoint into model, optimizer and generators, written by any layout.

    Learning rate, weight decay and the like stay as the optimizer has them: they are the recipe's.

    Args:
        key: how the checkpoint was given, for the error.

    Raises:
        ConfigError: it is damaged, or of another model.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = _tensors(model, optimizer, world)
    generators = state.pop("generators")[str(world.rank)]
    reader = CheckpointReader(folder, key)
    mine = saved_states(generators, reader.saved, world.rank, folder, key)
    if mine:
        state["generators"] = {str(world.rank): mine}
    load_state(state, reader)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=True, flatten_optimizer_state_dict=True),
    )
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    if mine:
        restore_generators(state["generators"][str(world.rank)], world, folder, key)
    return read_checked(folder, key).position


def load_model(folder: Path, key: str, model: nn.Module) -> None:
    """Read only a checkpoint's model; in a world of one rank the model is whole.

    Args:
        key: how the checkpoint was given, for the error.

    Raises:
        ConfigError: it is damaged, or of another model.
    """
    state = {"model": model.state_dict()}
    load_state(state, CheckpointReader(folder, key))
    model.load_state_dict(state["model"])


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    # Flat: every key names a parameter, so that stages of a pipeline save and find what is theirs.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=flat)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "generators": {str(world.rank): generator_states(world)},
    }
