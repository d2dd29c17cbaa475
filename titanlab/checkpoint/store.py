"""A run's checkpoints on disk: one folder per step, complete or absent.

All ranks write a checkpoint into `step-N.part`. When all files are on the disk, rank 0 renames it to `step-N`, so a
folder without the suffix is complete. A remote store has no rename: there all ranks write to `step-N`, which is
complete when it has its index, the last file that is written.

    step-00000100/
        rank-00000.safetensors   the tensors of model and optimizer that this rank has written
        index.json               where each part of a tensor is; a checksum of each block of every file
        position.json            everything else: step, tokens, position in the data, generators, loss scale, tracker id

The states of the random generators are bytes in position.json, so that no pickle is needed to read them.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from titanlab.checkpoint.address_schema import Place, StorePath
from titanlab.checkpoint.blocks import DamagedCheckpoint
from titanlab.checkpoint.contents import Readable, check_optimizer, check_whole, read_contents
from titanlab.checkpoint.contract import OnlyModel, Target
from titanlab.checkpoint.folders import (
    PART,
    another,
    step_folder,
    step_of,
)
from titanlab.checkpoint.position import MODEL, Position, SavedPosition
from titanlab.checkpoint.reader import load_state
from titanlab.checkpoint.saving import (
    PlannedSave,
    Plans,
    give_name,
    make_part,
    remove_old,
    removed_after_errors,
    together,
    write_and_publish,
)
from titanlab.checkpoint.shards import dtype_named
from titanlab.checkpoint.writer import Staged
from titanlab.distributed.world import World

# Of the state of numpy's generator.
_WORDS = 624
# Settings of the optimizer, such as the rate: the recipe decides them, so they are not saved.
_SETTINGS = "param_groups."


def save(
    target: Target, position: Position, *, plans: Plans | None = None, only_model: OnlyModel | None = None
) -> Place:
    """Write `step-N` of a target together with all ranks, and remove the old checkpoints that it does not keep.

    Args:
        plans: of the run, which may have one for this state; None: a new plan.
        only_model: leave the optimizer out; None: save everything.

    Returns:
        the folder of the complete checkpoint.

    Raises:
        OSError: the disk takes no more; nothing of the checkpoint is left.
    """
    planned = begin(target, position, plans=plans, only_model=only_model)
    complete(planned, planned.stage, target)
    return step_folder(target.folder, position.step)


def begin(
    target: Target, position: Position, *, plans: Plans | None = None, only_model: OnlyModel | None = None
) -> PlannedSave:
    """Make the folder of a checkpoint, and agree with all ranks on what each of them writes."""
    world, final = target.world, step_folder(target.folder, position.step)
    made = together(world, lambda: make_part(target.folder, final) if world.logs else None)
    # Only rank 0 asks the store which of the two it is.
    part = world.share(made) if isinstance(final, StorePath) else final.with_name(final.name + PART)
    assert part is not None
    with removed_after_errors(part, world):
        state = _saved_part(_state(target.model, target.optimizer))
        if only_model is not None:
            dtype = only_model.dtype and dtype_named(only_model.dtype)
            state = {
                "model": {
                    name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
                    for name, tensor in state["model"].items()
                }
            }
        planned = (plans or Plans()).plan(state, part, world)
        # Each pipeline stage has only its own parameters.
        shapes = [(name, list(parameter.shape)) for name, parameter in target.model.named_parameters()]
        everyone = world.collect((shapes, generator_states(world)))
        planned.position = SavedPosition(
            position=position,
            parameters=dict(itertools.chain.from_iterable(shapes for shapes, _ in everyone)),
            files={},
            generators={rank: states for rank, (_, states) in enumerate(everyone)},
            recipe=target.recipe,
            contents=None if only_model is None else MODEL,
        )
    return planned


def complete(planned: PlannedSave, staged: Callable[[], Staged], target: Target) -> None:
    """Write a checkpoint, and give it its name. It does not use the model, so another thread may call it.

    Args:
        staged: returns this rank's part, or raises the error with which it could not be staged.
        target: as for `begin`; another thread needs its own `world` and `warn`.

    Raises:
        OSError: the disk takes no more; nothing of the checkpoint is left.
    """

    def finish() -> None:
        final = step_folder(target.folder, planned.position.position.step)
        give_name(planned.folder, final)
        target.saved(step_of(final))
        remove_old(target.folder, target.keep, target.keep_every, target.warn)

    with removed_after_errors(planned.folder, target.world):
        write_and_publish(staged, planned, target.world)
        together(target.world, lambda: finish() if target.world.logs else None)


def load(
    folder: Place,
    key: str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    read: Callable[[Place, str], Readable] = read_contents,
) -> Position:
    """Read a checkpoint that any layout wrote into model, optimizer and generators; all ranks call it together.

    Learning rate, weight decay and other settings of the optimizer are kept, because the recipe decides them. If it
    raises, model and optimizer may hold a part of the checkpoint: load another one, or end. Generators are unchanged.

    Args:
        key: the config key or argument that names the checkpoint, for the error.
        read: reads the contents, also of another format.

    Raises:
        DamagedCheckpoint: the checkpoint is damaged.
        ConfigError: it belongs to another model.
    """
    contents = together(world, lambda: read(folder, key))
    check_whole(folder, contents.saved, key)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    current = generator_states(world)
    whole = _state(model, optimizer)
    # A checkpoint of fewer ranks or of another device lacks some states; those generators keep the state of the seed.
    saved = contents.saved.generators.get(world.rank, {})
    states = {name: saved[name] for name in current if saved.get(name)}
    state = _saved_part(whole)
    names = [f"optimizer.{name}" for name in state["optimizer"]]
    together(world, lambda: check_optimizer(folder, contents, names, key))
    load_state(state, contents.reader(folder, key))
    try:
        together(world, lambda: restore_generators(states, world, folder, key))
    except DamagedCheckpoint:
        set_generators(current, world)
        raise
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict={**whole["optimizer"], **state["optimizer"]},
        options=StateDictOptions(strict=True, flatten_optimizer_state_dict=True),
    )
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    return contents.saved.position


def load_model(
    folder: Place, key: str, model: nn.Module, *, read: Callable[[Place, str], Readable] = read_contents
) -> None:
    """Read only the model of a checkpoint."""
    state = {"model": model.state_dict()}
    load_state(state, read(folder, key).reader(folder, key))
    model.load_state_dict(state["model"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # Flat, so that every key has a parameter's name: each pipeline stage saves and loads only its own parameters.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=flat)
    return {"model": model_state, "optimizer": optimizer_state}


def _saved_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state without the settings of the optimizer."""
    kept = {name: value for name, value in state["optimizer"].items() if not name.startswith(_SETTINGS)}
    return {"model": state["model"], "optimizer": kept}


def generator_states(world: World) -> dict[str, bytes]:
    """The states of this rank's generators, as position.json has them."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - third-party code uses this generator
    states = {
        "cpu": torch.get_rng_state().numpy().tobytes(),
        # Numbers are exact in JSON.
        "python": json.dumps(random.getstate()).encode(),
        "numpy": json.dumps([kind, np.asarray(words).tolist(), *rest]).encode(),
    }
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device).numpy().tobytes()
    return states


def set_generators(states: Mapping[str, bytes], world: World) -> None:
    """Set the generators to states of `generator_states`; a generator without one stays as it is."""
    if "cpu" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["cpu"]), dtype=torch.uint8))
    if "python" in states:
        version, words, gauss = json.loads(states["python"])
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        kind, words, position, has_gauss, gauss = json.loads(states["numpy"])
        # numpy does not check the position, and could read memory behind the words.
        if len(words) != _WORDS or not 0 <= position <= _WORDS:
            raise ValueError("no state of numpy's generator")
        np.random.set_state((kind, np.array(words, np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    if "cuda" in states:
        state = torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8)
        torch.cuda.set_rng_state(state, world.device)


def restore_generators(states: Mapping[str, bytes], world: World, checkpoint: Place, key: str) -> None:
    """Set the generators to the states of a checkpoint."""
    try:
        set_generators(states, world)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RuntimeError) as error:
        rule = f"holds no state of a generator ({type(error).__name__})"
        raise DamagedCheckpoint(key, checkpoint, rule, another(checkpoint)) from error
