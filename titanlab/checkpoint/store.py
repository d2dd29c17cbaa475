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
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from titanlab.checkpoint.address_schema import Place, StorePath
from titanlab.checkpoint.blocks import DamagedCheckpoint
from titanlab.checkpoint.contents import Readable, check_optimizer, check_whole, read_contents
from titanlab.checkpoint.contract import OnlyModel
from titanlab.checkpoint.folders import (
    PART,
    another,
    step_folder,
    step_of,
)
from titanlab.checkpoint.position import MODEL, Position, SavedPosition
from titanlab.checkpoint.reader import load_state
from titanlab.checkpoint.saving import (
    Begun,
    Planned,
    Plans,
    make_part,
    publish,
    remove_old,
    removed_after_errors,
    together,
    write_and_publish,
)
from titanlab.checkpoint.shards import dtype_named
from titanlab.checkpoint.writer import Staged
from titanlab.distributed.world import World

_WORDS = 624


def generator_states(world: World) -> dict[str, Tensor]:
    """The states of this rank's generators."""
    states = {
        "cpu": torch.get_rng_state(),
        "python": _packed(random.getstate()),
        "numpy": _packed(_plain(np.random.get_state())),  # noqa: NPY002 - third-party code uses this generator
    }
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def state_bytes(states: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The states as bytes, for position.json."""
    return {name: bytes(state.tolist()) for name, state in states.items()}


def states_of_bytes(states: Mapping[str, bytes], current: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states as tensors, of the generators that this rank has.

    A checkpoint of fewer ranks or of another device lacks some states; those generators keep the state of the seed.
    """
    return {name: torch.frombuffer(bytearray(states[name]), dtype=torch.uint8) for name in current if states.get(name)}


def restore_generators(states: Mapping[str, Tensor], world: World, checkpoint: Place, key: str) -> None:
    """Set the generators to the states.

    Raises:
        DamagedCheckpoint: a state is not valid.
    """
    try:
        set_generators(states, world)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RuntimeError) as error:
        rule = f"holds no state of a generator ({type(error).__name__})"
        raise DamagedCheckpoint(key, checkpoint, rule, another(checkpoint)) from error


def set_generators(states: Mapping[str, Tensor], world: World) -> None:
    """Set the generators to states of `generator_states`."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "python" in states:
        version, words, gauss = _unpacked(states["python"])
        random.setstate((version, tuple(words), gauss))
    if "numpy" in states:
        kind, words, position, has_gauss, gauss = _unpacked(states["numpy"])
        # numpy does not check the position, and could read memory behind the words.
        if len(words) != _WORDS or not 0 <= position <= _WORDS:
            raise ValueError("no state of numpy's generator")
        np.random.set_state((kind, np.array(words, np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], world.device)


def _plain(state: Any) -> tuple[Any, ...]:
    kind, words, position, has_gauss, gauss = state
    return kind, words.tolist(), position, has_gauss, gauss


def _packed(state: Any) -> Tensor:
    """Encode a state as the bytes of its JSON, in which numbers are exact."""
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _unpacked(state: Tensor) -> Any:
    return json.loads(bytes(state.tolist()))


# Settings of the optimizer, such as the rate: the recipe decides them, so they are not saved.
_SETTINGS = "param_groups."


def save(
    folder: Place,
    position: Position,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    keep: int,
    keep_every: int = 0,
    recipe: str | None = None,
    plans: Plans | None = None,
    warn: Callable[[str], None] = lambda text: None,
    saved: Callable[[int], None] = lambda step: None,
    only_model: OnlyModel | None = None,
) -> Place:
    """Write `folder/step-N` together with all ranks, and remove all but the newest `keep` checkpoints (0: keep all).

    Args:
        keep_every: checkpoints of steps that are multiples of it are not removed; 0: none.
        recipe: SHA-256 of the run's identity.
        plans: of the run, which may have one for this state; None: a new plan.
        warn: called on rank 0 if an old checkpoint cannot be removed.
        saved: called on rank 0 when the checkpoint is complete.
        only_model: leave the optimizer out; None: save everything.

    Returns:
        the folder of the complete checkpoint.

    Raises:
        OSError: the disk takes no more; nothing of the checkpoint is left.
    """
    begun = begin(
        folder,
        position,
        model=model,
        optimizer=optimizer,
        world=world,
        plans=plans,
        recipe=recipe,
        only_model=only_model,
    )
    complete(begun, begun.planned.stage, world, keep=keep, keep_every=keep_every, warn=warn, saved=saved)
    return begun.final


def begin(
    folder: Place,
    position: Position,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    plans: Plans | None = None,
    recipe: str | None = None,
    only_model: OnlyModel | None = None,
) -> Begun:
    """Make the folder of a checkpoint, and agree with all ranks on what each of them writes.

    Raises:
        OSError: the disk takes no more; nothing of the checkpoint is left.
    """
    final = step_folder(folder, position.step)
    made = together(world, lambda: make_part(folder, final) if world.logs else None)
    # Only rank 0 asks the store which of the two it is.
    part = world.share(made) if isinstance(final, StorePath) else final.with_name(final.name + PART)
    assert part is not None
    with removed_after_errors(part, world):
        planned = plan_save(
            part,
            position,
            model=model,
            optimizer=optimizer,
            world=world,
            plans=plans or Plans(),
            recipe=recipe,
            only_model=only_model,
        )
    return Begun(planned=planned, part=part, final=final)


def complete(
    begun: Begun,
    staged: Callable[[], Staged],
    world: World,
    *,
    keep: int,
    keep_every: int,
    warn: Callable[[str], None],
    saved: Callable[[int], None],
) -> None:
    """Write a checkpoint, and give it its name. It does not use the model, so another thread may call it.

    Args:
        staged: returns this rank's part, or raises the error with which it could not be staged.
        keep, keep_every, warn, saved: as for `save`.

    Raises:
        OSError: the disk takes no more; nothing of the checkpoint is left.
    """

    def finish() -> None:
        publish(begun)
        saved(step_of(begun.final))
        remove_old(begun.final.parent, keep, keep_every, warn)

    with removed_after_errors(begun.part, world):
        write_and_publish(staged, begun.planned.writer, world)
        together(world, lambda: finish() if world.logs else None)


def plan_save(
    part: Place,
    position: Position,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    plans: Plans,
    recipe: str | None,
    only_model: OnlyModel | None = None,
) -> Planned:
    """Agree with all ranks on what each of them writes into a folder."""
    state = _saved_part(_state(model, optimizer))
    planned = plans.plan(state if only_model is None else _model_part(state, only_model), part, world)
    # Each pipeline stage has only its own parameters.
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    everyone = world.collect((shapes, state_bytes(generator_states(world))))
    if world.logs:
        planned.writer.position = SavedPosition(
            position=position,
            parameters=dict(itertools.chain.from_iterable(shapes for shapes, _ in everyone)),
            files={},
            generators={rank: states for rank, (_, states) in enumerate(everyone)},
            recipe=recipe,
            contents=None if only_model is None else MODEL,
        )
    return planned


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
    states = states_of_bytes(contents.saved.generators.get(world.rank, {}), current)
    state = _saved_part(whole)
    names = [f"optimizer.{name}" for name in state["optimizer"]]
    together(world, lambda: check_optimizer(folder, contents, names, key))
    load_state(state, contents.reader(folder, key))
    try:
        together(world, lambda: restore_generators(states, world, folder, key))
    except DamagedCheckpoint:
        restore_generators(current, world, folder, key)
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
    """Read only the model of a checkpoint.

    Args:
        key: the config key or argument that names the checkpoint, for the error.

    Raises:
        DamagedCheckpoint: the checkpoint is damaged.
        ConfigError: it belongs to another model.
    """
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


def _model_part(state: Mapping[str, Any], only_model: OnlyModel) -> dict[str, Any]:
    if only_model.dtype is None:
        return {"model": state["model"]}
    dtype = dtype_named(only_model.dtype)
    tensors = state["model"].items()
    return {"model": {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors}}
