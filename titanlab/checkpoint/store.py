"""A run's checkpoints: one folder per step, complete or absent.

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
import json
import pickle
import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from msgspec import structs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.contents import (
    Position,
    Readable,
    SavedPosition,
    check_optimizer,
    check_whole,
    read_contents,
)
from titanlab.checkpoint.contract import OnlyModel, Saver, Target
from titanlab.checkpoint.folders import checkpoints, earlier_hint, remove, remove_unfinished, step_folder, step_of
from titanlab.checkpoint.index import IndexedFile, IndexEntry
from titanlab.checkpoint.reader import dtype_named, load_state
from titanlab.checkpoint.storage import DamagedCheckpoint, folder_at
from titanlab.checkpoint.writer import (
    CheckpointShard,
    HostBuffer,
    Part,
    Staged,
    entries_of,
    flat,
    parts_of,
    publish,
    shard_of,
    shared_out,
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
    started = begin(target, position, plans or Plans(), only_model)
    complete(started, started.stage, target)
    return step_folder(target.folder, position.step)


def begin(target: Target, position: Position, plans: Plans, only_model: OnlyModel | None = None) -> StartedSave:
    """Make the folder of a checkpoint, and agree with all ranks on what each of them writes."""

    def state() -> dict[str, Any]:
        whole = _saved_part(_state(target.model, target.optimizer))
        if only_model is None:
            return whole
        dtype = only_model.dtype and dtype_named(only_model.dtype)
        return {
            "model": {
                name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
                for name, tensor in whole["model"].items()
            }
        }

    def folder() -> Place:
        # Remains of earlier saves go first.
        remove_unfinished(target.folder)
        return folder_at(target.folder).begin(step_folder(target.folder, position.step).name)

    saved = SavedPosition(
        **structs.asdict(position),
        # Each pipeline stage has only its own parameters.
        parameters={name: list(parameter.shape) for name, parameter in target.model.named_parameters()},
        generators={target.world.rank: generator_states(target.world)},
        recipe=target.recipe,
        contents=None if only_model is None else "model",
    )
    return plans.start(state, folder, saved, target.world)


def complete(started: StartedSave, staged: Callable[[], Staged], target: Target) -> None:
    """Write a checkpoint, and give it its name. Does not use the model, so another thread may call this.

    Args:
        staged: returns this rank's part, or raises the error with which it could not be staged.
        target: as for `begin`; another thread needs its own `world` and `warn`.
    """

    def finish() -> None:
        final = step_folder(target.folder, started.saved.step)
        if started.folder != final:
            # The folder exists if an earlier attempt saved this step and the run then resumed from an earlier step.
            failure = remove(final)
            if failure is not None:
                raise failure
            folder_at(started.folder).commit(final)
        target.saved(step_of(final))
        remove_old(target.folder, target.keep, target.keep_every, target.warn)

    write_and_publish(staged, started, target.world, finish)


def write_and_publish(
    staged: Callable[[], Staged], started: StartedSave, world: World, finish: Callable[[], None] = lambda: None
) -> None:
    """Write every rank's file, then position.json and the index; rank 0 calls `finish` when all are durable."""

    def written() -> tuple[IndexedFile, Mapping[str, str]]:
        data = staged()
        return write(data, started.folder), data.objects

    def published() -> None:
        raise_first([failure for _, failure, _, _ in everyone])
        files: list[IndexedFile] = []
        objects: dict[str, str] = {}
        parameters: dict[str, list[int]] = {}
        generators: dict[int, dict[str, bytes]] = {}
        for of_rank, _, own_parameters, own_generators in everyone:
            assert of_rank is not None
            files.append(of_rank[0])
            objects |= of_rank[1]
            parameters |= own_parameters
            generators |= own_generators
        position = structs.replace(started.saved, parameters=parameters, generators=generators)
        publish(started.folder, position, started.tensors, files, objects)
        finish()

    with removed_after_errors(started.folder, world):
        own, failure = attempted(written)
        # Only to rank 0: the checksums of a large checkpoint take tens of megabytes.
        everyone = world.collect((own, failure, started.saved.parameters, started.saved.generators))
        raise_first([world.share(attempted(published)[1] if world.logs else None)], own=failure)


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


@dataclass(frozen=True, kw_only=True)
class StartedSave:
    """A save that all ranks have agreed on.

    Attributes:
        folder: into which all ranks write.
        state: flat, as the model and the optimizer have it.
        shard: the layout of this rank's file.
        tensors: on rank 0, the index's entries of all ranks.
        saved: the content of position.json, with the parameters and generators of this rank only.
    """

    folder: Place
    state: Mapping[str, Any]
    shard: CheckpointShard
    tensors: dict[str, IndexEntry]
    saved: SavedPosition

    def stage(self, into: HostBuffer | None = None) -> Staged:
        """Take this rank's data; see `writer.stage`."""
        return stage(self.shard, self.state, into)


class Plans:
    """Starts the saves of one run, and plans them.

    A plan is valid while names, shapes, formats and cuts of the state stay the same on every rank, so it is made once:
    for 405B parameters on 512 ranks planning takes a rank 3 s, and rank 0 21 s (benchmarks/save_planning.py).
    """

    def __init__(self) -> None:
        self._outline: Mapping[str, Any] | None = None
        self._shard: CheckpointShard | None = None
        self._tensors: dict[str, IndexEntry] = {}

    def start(
        self, state: Callable[[], Mapping[str, Any]], folder: Callable[[], Place], saved: SavedPosition, world: World
    ) -> StartedSave:
        """Agree with all ranks on the folder, and on who writes what.

        Args:
            state: takes this rank's state.
            folder: makes the folder into which all ranks write; called on rank 0, which alone asks a store.
        """
        entries, failure = attempted(lambda: flat(state()))
        part, refused = attempted(folder) if world.logs else (None, None)
        outline = None if entries is None else _outline(entries)
        fits = outline is not None and outline == self._outline
        everyone = world.gather((part, refused or failure, fits))
        part = everyone[0][0]
        with removed_after_errors(part, world):
            raise_first([error for _, error, _ in everyone], own=refused or failure)
            assert part is not None
            assert entries is not None
            if not all(fits for _, _, fits in everyone):
                self._outline = None
                self._shard, self._tensors = _planned_together(entries, world)
                self._outline = outline
        assert self._shard is not None
        return StartedSave(folder=part, state=entries, shard=self._shard, tensors=self._tensors, saved=saved)


def _outline(state: Mapping[str, Any]) -> dict[str, Any]:
    """The properties on which a plan depends, by the names of the entries."""
    outline: dict[str, Any] = dict.fromkeys(state)
    for name, value in state.items():
        if isinstance(value, Tensor):
            cut = (value.placements, value.device_mesh) if isinstance(value, DTensor) else None
            outline[name] = (type(value), value.shape, value.dtype, cut)
    return outline


def _planned_together(state: Mapping[str, Any], world: World) -> tuple[CheckpointShard, dict[str, IndexEntry]]:
    """The layout of this rank's file in a new plan of all ranks; on rank 0 also the index's entries."""

    def shared() -> tuple[list[list[Part]], dict[str, IndexEntry]]:
        raise_first([failure for _, failure in gathered])
        plans = shared_out([parts or [] for parts, _ in gathered])
        return plans, entries_of([shard_of(parts, rank) for rank, parts in enumerate(plans)])

    gathered = world.collect(attempted(lambda: parts_of(state)))
    answers: list[tuple[list[Part] | None, Exception | None]] = []
    tensors: dict[str, IndexEntry] = {}
    if world.logs:
        planned, failure = attempted(shared)
        answers = [(None, failure)] * world.world
        if planned is not None:
            tensors = planned[1]
            answers = [(parts, None) for parts in planned[0]]
    own, failure = world.scatter(answers)
    raise_first([failure])
    assert own is not None
    return shard_of(own, world.rank), tensors


@contextlib.contextmanager
def removed_after_errors(part: Place | None, world: World) -> Iterator[None]:
    """Inside the block, ranks write into the folder; after an error the folder is removed."""
    try:
        yield
    except Exception as error:
        # All ranks raise, so no rank is still writing.
        if world.logs and part is not None:
            # On a full disk the partial files would leave no space for the record of the run's outcome.
            remove(part)
        if part is not None and isinstance(error, OSError) and disk_fault(error) is not None:
            # The error of a write has no file name.
            error.filename = str(part.parent)
        raise


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
    folder: Place,
    key: str,
    model: nn.Module,
    *,
    read: Callable[[Place, str], Readable] = read_contents,
    without: Collection[str] = (),
) -> None:
    """Fill a model; parameters named in `without` keep their values."""
    state = {"model": {name: value for name, value in model.state_dict().items() if name not in without}}
    load_state(state, read(folder, key).reader(folder, key))
    model.load_state_dict(state["model"], strict=not without)


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
        started = begin(self._target, position, self._plans)
        # Pass an error on to the thread, in which all ranks exchange their errors.
        staged = self._staged(started)

        def finish() -> None:
            try:
                complete(started, staged, self._beside)
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

    def _staged(self, started: StartedSave) -> Callable[[], Staged]:
        """Copy; return a function for the thread that returns the copy, or raises the error."""
        staged, error = attempted(lambda: started.stage(self._buffer))

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

    def _staged(self, started: StartedSave) -> Callable[[], Staged]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            staged = super()._staged(started)
            copied.record(self._stream)
        self._copied = copied

        def waited() -> Staged:
            copied.synchronize()
            return staged()

        return waited
