"""A run's checkpoints on disk: one folder per step, complete or absent.

All ranks write a checkpoint into `step-N.part`; rank 0 renames it to `step-N` when every rank has finished, so a folder
without the suffix is complete.

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
    """Write `folder/step-N` together with all ranks, and remove all but the newest `keep` checkpoints (0: keep all).

    Args:
        warn: called on rank 0 if an old checkpoint cannot be removed.

    Returns:
        the folder of the complete checkpoint.
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
        # dcp.save raises on all ranks, so no rank is still writing.
        refused = refusal(part)
        world.share(None)
        if world.rank == 0:
            # On a full disk the partial files would leave no space for the record of the run's outcome.
            remove(part)
        if refused is not None and disk_fault(refused) is not None:
            raise refused from error
        raise
    # Each pipeline stage has only its own parameters.
    shapes = dict(
        itertools.chain.from_iterable(world.gather([(n, list(p.shape)) for n, p in model.named_parameters()]))
    )
    if world.rank == 0:
        files = {path.name: path.stat().st_size for path in sorted(part.iterdir())}
        write_json(part / POSITION, {**asdict(position), "parameters": shapes, "files": files}, durable=True)
        # The folder exists if an earlier attempt saved this step and the run was then resumed from an earlier step.
        failure = remove(final)
        if failure is not None:
            raise failure
        part.rename(final)
        for old in checkpoints(folder)[:-keep] if keep else []:
            failure = remove(old)
            if failure is not None:
                warn(f"the old checkpoint {old} cannot be removed: {failure.strerror or failure}")
    world.share(None)
    return final


def load(folder: Path, key: str, *, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Position:
    """Read a checkpoint that any layout wrote into model, optimizer and generators.

    Learning rate, weight decay and other settings of the optimizer are kept, because the recipe decides them.

    Args:
        key: the config key or argument that names the checkpoint, for the error.

    Raises:
        ConfigError: the checkpoint is damaged, or belongs to another model.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = _tensors(model, optimizer, world)
    generators = state.pop("generators")[str(world.rank)]
    reader = CheckpointReader(folder, key)
    rank_states = saved_states(generators, reader.saved, world.rank, folder, key)
    if rank_states:
        state["generators"] = {str(world.rank): rank_states}
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
    if rank_states:
        restore_generators(state["generators"][str(world.rank)], world, folder, key)
    return read_checked(folder, key).position


def load_model(folder: Path, key: str, model: nn.Module) -> None:
    """Read only the model of a checkpoint.

    Args:
        key: the config key or argument that names the checkpoint, for the error.

    Raises:
        ConfigError: the checkpoint is damaged, or belongs to another model.
    """
    state = {"model": model.state_dict()}
    load_state(state, CheckpointReader(folder, key))
    model.load_state_dict(state["model"])


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> dict[str, Any]:
    # Flat, so that every key has a parameter's name: each pipeline stage saves and loads only its own parameters.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=flat)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "generators": {str(world.rank): generator_states(world)},
    }
