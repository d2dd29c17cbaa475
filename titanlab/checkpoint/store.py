"""A run's state on disk: one folder a step, complete or absent.

A checkpoint is written by all ranks into `step-N.part`, which rank 0 renames to `step-N` when every
rank has finished: a folder without the suffix is whole.

    step-000100/
        .metadata, *.distcp   model, optimizer and generators, by torch.distributed.checkpoint
        position.json         step, tokens seen, position in the data, tracker id, shapes of the model
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from titanlab.atomic_file import write_json
from titanlab.checkpoint.folders import PART, POSITION, checkpoints, step_folder
from titanlab.checkpoint.generators import generator_states, restore_generators, saved_states
from titanlab.checkpoint.reader import CheckpointReader, load_state
from titanlab.world import World

KEY = "checkpoint"
"""For errors of a checkpoint that is being read: which key named it is checked before ranks start."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands, apart from its tensors.

    Attributes:
        step: optimizer steps done.
        tokens: labels that have counted so far.
        data: the data stream's own state.
        tracker: id under which the tracker knows the run.
        layout: degrees of the layout that saved it, for people.
        loss_scale: state of the loss's scale, see `titanlab.precision.loss_scale`; empty: there was none.
    """

    step: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    tracker: str | None = None
    layout: dict[str, int] = field(default_factory=dict)
    loss_scale: dict[str, float] = field(default_factory=dict)


def save(
    folder: Path, position: Position, *, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, keep: int
) -> Path:
    """Write `folder/step-N` together with all ranks and drop the oldest beyond `keep` (0: none).

    Returns:
        the checkpoint's folder, complete.
    """
    final = step_folder(folder, position.step)
    part = final.with_name(final.name + PART)
    if world.rank == 0:
        # Of this step or another: what a process left that died while it saved.
        for unfinished in folder.glob(f"step-*{PART}"):
            shutil.rmtree(unfinished)
        part.mkdir(parents=True)
    world.share(None)
    dcp.save(_tensors(model, optimizer, world), checkpoint_id=part)
    # Each stage of a pipeline knows its own.
    shapes = dict(
        itertools.chain.from_iterable(world.gather([(n, list(p.shape)) for n, p in model.named_parameters()]))
    )
    if world.rank == 0:
        write_json(part / POSITION, {**asdict(position), "parameters": shapes}, durable=True)
        if final.exists():
            # Left by an attempt that was resumed from before this step.
            shutil.rmtree(final)
        part.rename(final)
        if keep:
            for old in checkpoints(folder)[:-keep]:
                shutil.rmtree(old)
    world.share(None)
    return final


def load(folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Position:
    """Read a checkpoint into model, optimizer and generators, whatever layout wrote it.

    Learning rate, weight decay and the like stay as the optimizer has them: they are the recipe's.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = _tensors(model, optimizer, world)
    generators = state.pop("generators")[str(world.rank)]
    reader = CheckpointReader(folder, KEY)
    mine = saved_states(generators, reader.saved, world.rank, folder, KEY)
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
        restore_generators(state["generators"][str(world.rank)], world, folder, KEY)
    position = json.loads((folder / POSITION).read_text())
    del position["parameters"]
    return Position(**position)


def load_model(folder: Path, model: nn.Module) -> None:
    """Read only a checkpoint's model; in a world of one rank the model is whole."""
    state = {"model": model.state_dict()}
    load_state(state, CheckpointReader(folder, KEY))
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
