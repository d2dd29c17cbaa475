"""Paths and names of checkpoints; finds the checkpoint that a user means."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeGuard, TypeVar

from titanlab.checkpoint.address_schema import (
    Place,
    StorePath,
    check_address,
    check_installed,
    is_address,
    place_of,
)
from titanlab.checkpoint.storage import INDEX, DamagedCheckpoint, StoreFolder, folder_at, one_line
from titanlab.errors import ConfigError
from titanlab.records import RunFolder, find_run
from titanlab.system import StoreFault, parse_json, read_bytes, user_path

OWNER = "run.json"
"""The object that says which run's checkpoints a folder of a store holds."""
_MOST_BYTES = 1 << 16
# The pickle that lists what a folder of torch.distributed.checkpoint contains.
METADATA = ".metadata"
# Suffix of a checkpoint that is newer than the one from which the user restarted: it is kept, but not used any more.
ASIDE = ".aside"
# Suffix of a checkpoint that was found damaged: it is kept, but not used any more.
DAMAGED = ".damaged"
_STEP = re.compile(r"step-([0-9]+)")


def checkpoints_of(run: RunFolder) -> Place:
    """The folder of a run's checkpoints.

    In a store it is `checkpoint.folder/SWEEP/NAME-HASH8`, with the names from when the run was made: the run's folder
    on this host may have moved since.
    """
    config = run.path / "config.yaml"
    try:
        # Most configs contain no address. Parsing takes milliseconds, too long for a table of many runs.
        if b"://" not in read_bytes(config):
            return run.checkpoints
    except OSError:
        return run.checkpoints
    values = run.config()
    folder = run.section("checkpoint").get("folder")
    identity = run.identity()
    if not isinstance(folder, str) or identity is None or not {"sweep", "name"} <= set(values):
        return run.checkpoints
    # Check the address, because the run may come from a stranger.
    check_address("checkpoint.folder", folder)
    return StorePath(folder.rstrip("/")) / str(values["sweep"]) / f"{values['name']}-{identity.hash8}"


def claim_place(run: RunFolder) -> None:
    """Claim the folder of a store for this run, before its first attempt; this also tests that the store accepts files.

    Without the claim this run could use another run's checkpoints: the same recipe has the same name on each host, and
    an earlier run with this name may have lost its folder on this host.

    Raises:
        ConfigError: the folder holds checkpoints of another run.
        StoreFault: the store does not answer, or refuses.
    """
    place = checkpoints_of(run)
    if not isinstance(place, StorePath):
        return
    identity = run.identity()
    own = {"sha256": identity.sha256 if identity else "", "created": run.created()}
    folder = StoreFolder(place)
    objects = folder.objects()
    if not objects:
        folder.put(OWNER, json.dumps(own).encode())
        return
    with contextlib.suppress(ValueError):
        if OWNER in objects and parse_json(folder.read(OWNER, _MOST_BYTES)) == own:
            return
    rule = f"{place} holds the checkpoints of another run"
    cure = f"choose another folder; or remove that one; or go on from them with checkpoint.load_from={place}"
    raise ConfigError("checkpoint.folder", place.parent.parent, rule, cure)


def step_folder(folder: Place, step: int) -> Place:
    return folder / f"step-{step:08d}"


def step_named(checkpoint: Place) -> int | None:
    """The step in the name of a path, which may be short (`step-8`); None: it is not the name of a checkpoint."""
    match = _STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def step_of(checkpoint: Place) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name.partition("-")[2])


def checkpoints(folder: Place) -> list[Place]:
    """Complete checkpoints in a run's folder of checkpoints, oldest first; anything else there is ignored."""
    paths = [folder / name for name, counts in folder_at(folder).steps().items() if counts and _STEP.fullmatch(name)]
    return sorted(paths, key=lambda path: (step_of(path), path.name))


def has_pickle(checkpoint: Place) -> TypeGuard[Path]:
    """Whether a folder is a torch.distributed.checkpoint, whose metadata is a pickle; a store never has one."""
    return (
        isinstance(checkpoint, Path)
        and os.path.lexists(checkpoint / METADATA)
        and not os.path.lexists(checkpoint / INDEX)
    )


def exists(checkpoint: Place) -> bool:
    """Whether a folder has files of a checkpoint, also of a torch.distributed.checkpoint."""
    return folder_at(checkpoint).is_checkpoint() or has_pickle(checkpoint)


def latest(folder: Place) -> Place | None:
    known = checkpoints(folder)
    return known[-1] if known else None


def of_step(folder: Place, step: int, key: str, value: object) -> Place:
    """The complete checkpoint of one step in a run's folder of checkpoints."""
    known = checkpoints(folder)
    for path in known:
        if step_of(path) == step:
            return path
    steps = ", ".join(str(step_of(path)) for path in known)
    raise ConfigError(
        key, value, "the run has no whole checkpoint of this step", f"it has {steps}" if steps else "it has none at all"
    )


def find(text: str, key: str) -> Place:
    """The checkpoint at a path, whose name may be short (`step-8`), or the newest checkpoint of the run at the path.

    A path may also be an address in a store: of a checkpoint, or of a run's folder of checkpoints.
    """
    if is_address(text):
        check_address(key, text)
        check_installed(key, text)
    path = place_of(text)
    step = step_named(path)
    known = [path] if step is None else [path, step_folder(path.parent, step)]
    for place in known:
        if exists(place):
            return place
    newest = None
    if isinstance(path, Path):
        if not any(os.path.exists(str(place)) for place in known):
            cure = "give the folder of a run, or of one of its checkpoints"
            raise ConfigError(key, text, "there is no such folder", cure)
        newest = latest(checkpoints_of(RunFolder(path)))
    newest = newest or latest(path)
    if newest is None:
        cure = "give the folder of a run that has saved one, or that of a checkpoint"
        raise ConfigError(key, text, "holds no complete checkpoint", cure)
    return newest


def remove(checkpoint: Place) -> OSError | None:
    """Remove a complete or incomplete checkpoint. Returns the error, if any: a failure to remove must not end a run."""
    try:
        folder_at(checkpoint).remove()
    except OSError as error:
        return error
    return None


def remove_unfinished(folder: Place) -> None:
    """Remove the incomplete checkpoints of any step, left by processes that died while they saved."""
    for name in folder_at(folder).unfinished():
        remove(folder / name)


def put_aside(folder: Place, *, after: int) -> list[Place]:
    """Rename the checkpoints after a step, so that an earlier checkpoint is the newest. Returns the renamed ones."""
    return [_renamed(path, ASIDE) for path in checkpoints(folder) if step_of(path) > after]


def put_back(renamed: Iterable[Place]) -> None:
    """Undo `put_aside`: give checkpoints their old names."""
    for aside in renamed:
        path = aside.with_name(aside.name.partition(ASIDE)[0])
        if not folder_at(path).is_taken():
            folder_at(aside).rename(path)


def fall_back(error: DamagedCheckpoint) -> str:
    """Rename a damaged checkpoint, so that it no longer counts as one of the run's. Returns a line for the user.

    Raises:
        DamagedCheckpoint: there is no earlier checkpoint to fall back to; nothing was renamed.
    """
    checkpoint = place_of(str(error.value))
    older = before(checkpoint)
    if older is None:
        raise error
    renamed = _renamed(checkpoint, DAMAGED)
    return f"goes on from step {step_of(older)}: {checkpoint.name} {error.rule}; it is kept as {renamed.name}"


def before(checkpoint: Place) -> Place | None:
    known = checkpoints(checkpoint.parent)
    older = known[: known.index(checkpoint)] if checkpoint in known else []
    return older[-1] if older else None


def _renamed(checkpoint: Place, suffix: str) -> Place:
    renamed, number = checkpoint.with_name(checkpoint.name + suffix), 1
    while folder_at(renamed).is_taken():
        number += 1
        renamed = checkpoint.with_name(f"{checkpoint.name}{suffix}-{number}")
    folder_at(checkpoint).rename(renamed)
    return renamed


def earlier_hint(checkpoint: Place) -> str:
    """The hint for a checkpoint that cannot be used: the checkpoint before it, if there is one."""
    try:
        older = before(checkpoint)
    except StoreFault:
        older = None
    if older is None:
        return "give another checkpoint, or a whole copy of this one"
    return f"give another checkpoint of the run: the one before it is {older}"


def damaged(checkpoint: Place, key: str, reason: object) -> DamagedCheckpoint:
    """The error about a damaged checkpoint; it names the checkpoint before it."""
    if not exists(checkpoint):
        rule = "was removed while it was read"
        return DamagedCheckpoint(key, checkpoint, rule, "try again: its run keeps newer ones (checkpoint.keep)")
    return DamagedCheckpoint(key, checkpoint, f"is damaged: {one_line(reason)}", earlier_hint(checkpoint))


T = TypeVar("T")


def read_while_kept(choose: Callable[[], Place], read: Callable[[Place], T], warn: Callable[[str], None]) -> T:
    """Choose a checkpoint and read it; if its run removes it meanwhile (checkpoint.keep), choose and read again."""
    while True:
        checkpoint = choose()
        try:
            return read(checkpoint)
        except (ConfigError, OSError):
            if exists(checkpoint):
                raise
        warn(f"{checkpoint.name} was removed while it was read (checkpoint.keep of its run): the next one is read")


def find_run_or_checkpoint(text: str, runs: Path | str, key: str = "run") -> tuple[RunFolder, Place | None]:
    """Find the run that a text names, and the checkpoint if the text names one.

    `RUN/checkpoints/step-00000008` and `RUN/checkpoints/step-8` name a checkpoint; `RUN/checkpoints` names the run.
    """
    for candidate in (user_path(text), user_path(runs) / text):
        # Try the unresolved path first: a checkpoint may be a symbolic link to a folder outside the run.
        for path in (Path(os.path.abspath(candidate)), candidate.resolve()):
            step = step_named(path)
            folder = path if step is None else path.parent
            if folder.name != "checkpoints" or not (folder.parent / "config.yaml").is_file():
                continue
            run = RunFolder(folder.parent)
            return run, None if step is None else of_step(checkpoints_of(run), step, key, text)
    return find_run(text, runs), None
