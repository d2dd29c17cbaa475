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

import contextlib
import itertools
import json
import pickle
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.contents import Readable, check_optimizer, check_whole, read_contents
from titanlab.checkpoint.contract import OnlyModel, Saver, Target
from titanlab.checkpoint.folders import checkpoints, earlier_hint, remove, remove_unfinished, step_folder, step_of
from titanlab.checkpoint.position import Position, SavedPosition
from titanlab.checkpoint.reader import load_state
from titanlab.checkpoint.storage import DamagedCheckpoint, folder_at
from titanlab.checkpoint.writer import (
    CheckpointShard,
    HostBuffer,
    SavePlannerOfJson,
    Staged,
    dtype_named,
    publish,
    shard_of,
    stage,
    write,
)
from titanlab.distributed import World
from titanlab.errors import ConfigError
from titanlab.records import first_line
from titanlab.system import disk_fault

T = TypeVar("T")
# The number of words in the state of numpy's generator.
_WORDS = 624
# Settings of the optimizer, such as the rate: the recipe decides them, so they are not saved.
_SETTINGS = "param_groups."


def save(
    target: Target, position: Position, *, plans: Plans | None = None, only_model: OnlyModel | None = None
) -> Place:
    """Write `step-N` of a target together with all ranks, and remove old checkpoints that the target does not keep.

    Args:
        plans: plans of the run, in which one may fit this state; None: make a new plan.
        only_model: leave the optimizer out; None: save everything.

    Returns:
        the folder of the complete checkpoint.

    Raises:
        OSError: the disk is full; the partial checkpoint is removed.
    """
    planned = begin(target, position, plans=plans, only_model=only_model)
    complete(planned, planned.stage, target)
    return step_folder(target.folder, position.step)


def begin(
    target: Target, position: Position, *, plans: Plans | None = None, only_model: OnlyModel | None = None
) -> PlannedSave:
    """Make the folder of a checkpoint, and agree with all ranks on what each of them writes."""
    world, final = target.world, step_folder(target.folder, position.step)
    # Only rank 0 asks the store for the folder.
    part = world.share(on_all_ranks(world, lambda: make_part(target.folder, final) if world.logs else None))
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
            **structs.asdict(position),
            parameters=dict(itertools.chain.from_iterable(shapes for shapes, _ in everyone)),
            files={},
            generators={rank: states for rank, (_, states) in enumerate(everyone)},
            recipe=target.recipe,
            contents=None if only_model is None else "model",
        )
    return planned


def complete(planned: PlannedSave, staged: Callable[[], Staged], target: Target) -> None:
    """Write a checkpoint, and give it its name. Does not use the model, so another thread may call this.

    Args:
        staged: returns this rank's part, or raises the error with which it could not be staged.
        target: as for `begin`; another thread needs its own `world` and `warn`.

    Raises:
        OSError: the disk is full; the partial checkpoint is removed.
    """

    def finish() -> None:
        final = step_folder(target.folder, planned.position.step)
        give_name(planned.folder, final)
        target.saved(step_of(final))
        remove_old(target.folder, target.keep, target.keep_every, target.warn)

    with removed_after_errors(planned.folder, target.world):
        write_and_publish(staged, planned, target.world)
        on_all_ranks(target.world, lambda: finish() if target.world.logs else None)


def on_all_ranks(world: World, action: Callable[[], T]) -> T:
    """Do an action on this rank, and wait for the others; all ranks call it.

    Raises:
        Exception: an error of this rank, or of another one. A ConfigError of any rank is raised on all ranks, because
        users see that line.
    """
    value, failure = attempted(action)
    raise_first(world.gather(failure), own=failure)
    return value  # type: ignore[return-value]  # None only if the action returns it.


def attempted(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """The value of an action, or its error in a form that other ranks can receive."""
    try:
        return action(), None
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            # Any exception class may be impossible to pickle, and then no rank would learn of the failure.
            portable = RuntimeError(first_line(error))
            portable.__cause__ = error
            return None, portable
        return None, error


def raise_first(failures: Sequence[Exception | None], *, own: Exception | None = None) -> None:
    """Raise the most informative error of the ranks; does nothing if no rank failed."""
    known = [failure for failure in failures if failure is not None]
    if not known:
        return
    config_error = next((failure for failure in known if isinstance(failure, ConfigError)), None)
    raise config_error or own or known[0]


@dataclass(kw_only=True)
class PlannedSave:
    """A save that all ranks have agreed on."""

    planner: SavePlannerOfJson
    plan: SavePlan
    rank: int
    folder: Place
    shards: Sequence[CheckpointShard]
    position: SavedPosition = field(default_factory=lambda: SavedPosition(step=0, parameters={}))

    def stage(self, into: HostBuffer | None = None) -> Staged:
        """Take this rank's part from the model; see `writer.stage`."""
        return stage(self.plan, self.planner, self.rank, into)


class Plans:
    """Plans the saves of one run.

    A plan is valid while names, shapes, formats and cuts of the state stay the same on every rank, so it is made once:
    for 405B parameters on 512 ranks planning takes a rank 10 s, and rank 0 minutes (benchmarks/save_planning.py).
    """

    def __init__(self) -> None:
        self._outline: Mapping[str, Any] | None = None
        self._plan: SavePlan | None = None
        self._shards: Sequence[CheckpointShard] = ()

    def plan(self, state: Mapping[str, Any], folder: Place, world: World) -> PlannedSave:
        """Agree with all ranks on who writes what; `dcp.save` does the same at its beginning."""
        planner = SavePlannerOfJson()
        _, failure = attempted(lambda: planner.set_up_planner(dict(state), None, world.logs))
        outline = None if failure else _outline(planner.state_dict)
        if not all(world.gather(outline is not None and outline == self._outline)):
            self._plan, self._shards = _planned_together(planner, world, failure)
            self._outline = outline
        assert self._plan is not None
        plan = planner.finish_plan(self._plan)
        return PlannedSave(planner=planner, plan=plan, rank=world.rank, folder=folder, shards=self._shards)


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """The properties on which a plan depends, by the names of the entries."""
    outline: dict[str, Any] = dict.fromkeys(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            cut = (value.placements, value.device_mesh) if isinstance(value, DTensor) else None
            outline[name] = (type(value), value.shape, value.dtype, cut)
    return outline


def _planned_together(
    planner: SavePlannerOfJson, world: World, failure: Exception | None
) -> tuple[SavePlan, Sequence[CheckpointShard]]:
    """This rank's part of a new plan of all ranks; on rank 0 also the layouts of all ranks' files.

    Args:
        failure: the error with which this rank could not set up its planner.
    """

    def local() -> SavePlan:
        raise_first([failure])
        return planner.create_local_plan()

    def all_of(gathered: list[tuple[SavePlan | None, Exception | None]]) -> list[SavePlan]:
        raise_first([failure for _, failure in gathered])
        plans, _ = planner.create_global_plan([plan for plan, _ in gathered if plan is not None])
        shards.extend(shard_of(plan, rank) for rank, plan in enumerate(plans))
        return plans

    shards: list[CheckpointShard] = []
    gathered = world.collect(attempted(local))
    answers: list[tuple[SavePlan | None, Exception | None]] = []
    if world.logs:
        plans, error = attempted(lambda: all_of(gathered))
        answers = [(None, error)] * world.world if plans is None else [(plan, None) for plan in plans]
    own, error = world.scatter(answers)
    raise_first([error])
    assert own is not None
    return own, shards


def write_and_publish(staged: Callable[[], Staged], planned: PlannedSave, world: World) -> None:
    """Write every rank's file, then position.json and the index. Does not use the model.

    Args:
        staged: returns this rank's part, or raises the error with which it could not be staged.
    """
    written, own = attempted(lambda: write(staged(), planned.folder))
    # Only to rank 0: the checksums of a large checkpoint take tens of megabytes.
    everyone = world.collect((written, own))

    def finish() -> None:
        raise_first([failure for _, failure in everyone])
        publish(planned.folder, planned.shards, [part for part, _ in everyone if part is not None], planned.position)

    failure = attempted(finish)[1] if world.logs else None
    raise_first([world.share(failure)], own=own)


def make_part(folder: Place, final: Place) -> Place:
    """Make the folder into which all ranks write, and remove remains of earlier saves."""
    remove_unfinished(folder)
    return folder_at(folder).begin(final.name)


@contextlib.contextmanager
def removed_after_errors(part: Place, world: World) -> Iterator[None]:
    """Inside the block, ranks write into the folder; after an error the folder is removed."""
    try:
        yield
    except Exception as error:
        # All ranks raise, so no rank is still writing.
        if world.logs:
            # On a full disk the partial files would leave no space for the record of the run's outcome.
            remove(part)
        if isinstance(error, OSError) and disk_fault(error) is not None:
            # The error of a write has no file name.
            error.filename = str(part.parent)
        raise


def give_name(part: Place, final: Place) -> None:
    """Give a checkpoint whose files are all on the disk its name."""
    if part != final:
        # The folder exists if an earlier attempt saved this step and the run then resumed from an earlier step.
        failure = remove(final)
        if failure is not None:
            raise failure
        folder_at(part).commit(final)


def remove_old(folder: Place, keep: int, keep_every: int, warn: Callable[[str], None]) -> None:
    """Remove all but the newest `keep` checkpoints (0: keep all), and those whose step `keep_every` divides."""
    for old in checkpoints(folder)[:-keep] if keep else []:
        if keep_every and step_of(old) % keep_every == 0:
            continue
        failure = remove(old)
        if failure is not None:
            warn(f"the old checkpoint {old} cannot be removed: {failure.strerror or failure}")


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

    Learning rate, weight decay and other settings of the optimizer stay, because the recipe decides them. After an
    error, model and optimizer may hold a part of the checkpoint: load another one, or end. Generators are unchanged.

    Args:
        key: the config key or argument that names the checkpoint, for the error.
        read: reads the contents, also of another format.

    Raises:
        DamagedCheckpoint: the checkpoint is damaged.
        ConfigError: it belongs to another model.
    """
    contents = on_all_ranks(world, lambda: read(folder, key))
    check_whole(folder, contents.saved, key)
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    current = generator_states(world)
    whole = _state(model, optimizer)
    # A checkpoint of fewer ranks or of another device lacks some states; those generators keep the state of the seed.
    saved = contents.saved.generators.get(world.rank, {})
    states = {name: saved[name] for name in current if saved.get(name)}
    state = _saved_part(whole)
    names = [f"optimizer.{name}" for name in state["optimizer"]]
    on_all_ranks(world, lambda: check_optimizer(folder, contents, names, key))
    load_state(state, contents.reader(folder, key))
    try:
        on_all_ranks(world, lambda: restore_generators(states, world, folder, key))
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
    state = {"model": model.state_dict()}
    load_state(state, read(folder, key).reader(folder, key))
    model.load_state_dict(state["model"])


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # Flat, so that every key has a parameter's name: each pipeline stage saves and loads only its own parameters.
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=flat)
    return {"model": model_state, "optimizer": optimizer_state}


def _saved_part(state: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in state["optimizer"].items() if not name.startswith(_SETTINGS)}
    return {"model": state["model"], "optimizer": kept}


def generator_states(world: World) -> dict[str, bytes]:
    """The states of this rank's generators, as position.json has them."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - third-party code uses this generator
    states = {
        "cpu": torch.get_rng_state().numpy().tobytes(),
        # JSON keeps these numbers exactly.
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
        # numpy does not check the position: it could read memory beyond the words.
        if len(words) != _WORDS or not 0 <= position <= _WORDS:
            raise ValueError("no state of numpy's generator")
        np.random.set_state((kind, np.array(words, np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    if "cuda" in states:
        state = torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8)
        torch.cuda.set_rng_state(state, world.device)


def restore_generators(states: Mapping[str, bytes], world: World, checkpoint: Place, key: str) -> None:
    try:
        set_generators(states, world)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RuntimeError) as error:
        rule = f"holds no state of a generator ({type(error).__name__})"
        raise DamagedCheckpoint(key, checkpoint, rule, earlier_hint(checkpoint)) from error


class NoSaver(Saver):
    """Saves nothing."""

    saved_step = 0

    def save(self, position: Position) -> None:
        pass

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        pass


class SyncSaver(Saver):
    """`save` returns when the checkpoint is on the disk."""

    def __init__(self, target: Target, plans: Plans | None = None) -> None:
        self._target = target
        self._plans = plans or Plans()
        self.saved_step = 0

    def save(self, position: Position) -> None:
        self.save_last(position)

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        save(self._target, position, plans=self._plans, only_model=only_model)
        self.saved_step = position.step


class AsyncSaver(Saver):
    """`save` returns when the states are copied.

    The threads of all ranks communicate in a separate group. Only `wait` waits for a thread: if the training ends with
    an error on one rank, threads of the others may wait for that rank until their processes end.
    """

    def __init__(self, target: Target, buffer: HostBuffer | None = None) -> None:
        self._target = target
        self._plans = Plans()
        # Warnings of the thread, for the main thread, which owns the console.
        self._warnings: list[str] = []
        self._beside = replace(target, world=target.world.beside(), warn=self._warnings.append)
        self._buffer = buffer or HostBuffer()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.saved_step = 0

    @property
    def is_done(self) -> bool:
        return self._thread is not None and not self._thread.is_alive()

    def save(self, position: Position) -> None:
        assert self._thread is None, "the last save is under way"
        planned = begin(self._target, position, plans=self._plans)
        # Pass an error on to the thread, in which all ranks exchange their errors.
        staged = self._staged(planned)

        def finish() -> None:
            try:
                complete(planned, staged, self._beside)
                self.saved_step = position.step
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=finish, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        while self._warnings:
            self._target.warn(self._warnings.pop(0))
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        # Without a copy, because no step follows.
        SyncSaver(self._target, self._plans).save_last(position, only_model)
        self.saved_step = position.step

    def _staged(self, planned: PlannedSave) -> Callable[[], Staged]:
        """Copy; return a function for the thread that returns the copy, or raises the error."""
        staged, error = attempted(lambda: planned.stage(self._buffer))

        def result() -> Staged:
            if staged is None:
                assert error is not None
                raise error
            return staged

        return result


class PinnedSaver(AsyncSaver):
    """`save` returns when the copies are queued; the next update of the model waits for them on the device."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, HostBuffer(page_locked=True))
        self._device = target.world.device
        self._stream = torch.cuda.Stream(self._device)
        self._copied: torch.cuda.Event | None = None

    def before_update(self) -> None:
        # The device waits for the copies; the host does not.
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None

    def _staged(self, planned: PlannedSave) -> Callable[[], Staged]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            staged = super()._staged(planned)
            copied.record(self._stream)
        self._copied = copied

        def waited() -> Staged:
            copied.synchronize()
            return staged()

        return waited
