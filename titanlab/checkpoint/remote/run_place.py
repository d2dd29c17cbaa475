"""The place of a run's checkpoints: in its folder, or in a remote store that its config names. Free of torch."""

from __future__ import annotations

import json
from pathlib import Path

from titanlab.checkpoint.remote import objects
from titanlab.checkpoint.remote.address_schema import Place, StorePath, check_address
from titanlab.errors import ConfigError
from titanlab.records.run_records import RunRecords
from titanlab.system.files import read_bytes

OWNER = "run.json"
"""The object that says which run's checkpoints a folder of a store holds."""
_MOST_BYTES = 1 << 16


def checkpoints_of(run: RunRecords) -> Place:
    """The folder of a run's checkpoints.

    In a store it is `checkpoint.folder/SWEEP/NAME-HASH8`, with the names that the run has got when it was made: its
    folder on this host may have moved since.
    """
    config = run.path / "config.yaml"
    try:
        # Most configs have no address in them, and parsing takes milliseconds that a table of many runs would notice.
        if b"://" not in read_bytes(config):
            return run.checkpoints
    except OSError:
        return run.checkpoints
    values = run.config()
    folder = run.section("checkpoint").get("folder")
    identity = run.identity()
    if not isinstance(folder, str) or identity is None or not {"sweep", "name"} <= set(values):
        return run.checkpoints
    # The run may be a stranger's.
    check_address("checkpoint.folder", folder)
    return StorePath(folder.rstrip("/")) / str(values["sweep"]) / f"{values['name']}-{identity.hash8}"


def checkpoints_of_folder(path: Path) -> Place:
    """The folder of the checkpoints of the run in a folder, which may also be no run."""
    return checkpoints_of(RunRecords(path))


def claim_place(run: RunRecords) -> None:
    """Make the folder of a store this run's own, before its first attempt; it also shows whether the store takes files.

    Another run's checkpoints would else be taken for this run's: the same recipe has the same name on each host, and
    the folder of a run on this host may have been removed.

    Raises:
        ConfigError: the folder holds checkpoints of another run.
        StoreFault: the store does not answer, or refuses.
    """
    place = checkpoints_of(run)
    if not isinstance(place, StorePath):
        return
    identity = run.identity()
    own = {"sha256": identity.sha256 if identity else "", "created": run.created()}
    try:
        owner = json.loads(objects.read_all(place / OWNER, _MOST_BYTES))
    except FileNotFoundError:
        owner = None
    except (ValueError, RecursionError):
        owner = {}
    if owner == own:
        return
    if owner is None and not objects.objects_below(place):
        objects.put(place / OWNER, json.dumps(own).encode())
        return
    rule = f"{place} holds the checkpoints of another run"
    cure = f"choose another folder; or remove that one; or go on from them with checkpoint.load_from={place}"
    raise ConfigError("checkpoint.folder", place.parent.parent, rule, cure)
