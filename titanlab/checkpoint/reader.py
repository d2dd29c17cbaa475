"""Reads the tensors of a checkpoint of either format into a state dict, without running code in it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from titanlab.checkpoint.contents import Contents
from titanlab.checkpoint.folders import another
from titanlab.checkpoint.index.format import Index
from titanlab.checkpoint.older.reader import PickledPlanner, PickledReader, set_in
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.shard_reader import ShardReader
from titanlab.errors import ConfigError
from titanlab.records.outcome import OutcomeKind, classify, first_line

Reader = ShardReader | PickledReader


class JsonPlanner(dcp.DefaultLoadPlanner):
    """Reads entries that are not tensors from JSON: DefaultLoadPlanner would unpickle them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one object into the state."""
        set_in(self.original_state_dict, self.mappings[read_item.dest_index.fqn], json.loads(value.read()))


def reader_of(checkpoint: Place, contents: Contents, key: str) -> Reader:
    """The reader of a checkpoint whose contents are known."""
    entries = contents.entries
    if isinstance(entries, Index):
        return ShardReader(checkpoint, entries, key)
    assert isinstance(checkpoint, Path), "a store has no checkpoint of the older format"
    return PickledReader(checkpoint, entries, key)


def planner_of(reader: Reader) -> dcp.DefaultLoadPlanner:
    """A new planner for a reader."""
    return JsonPlanner() if isinstance(reader, ShardReader) else PickledPlanner()


def read_into(state: dict[str, Any], reader: Reader, metadata: Metadata) -> None:
    """Read entries in this process alone, in which `dcp.load` would warn that there is no process group.

    Args:
        state: tensors by the names of their entries, which are filled.
        metadata: of the reader; reading it takes long for a checkpoint of many ranks.

    Raises:
        DamagedCheckpoint: a file is missing or damaged.
    """
    planner = planner_of(reader)
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()


def load_state(state: dict[str, Any], reader: Reader) -> None:
    """Read a checkpoint into a state dict without running code in it; all ranks call this together.

    Raises:
        DamagedCheckpoint: a file is missing, damaged or would run code; every rank raises it, also if only one has
            found the damage.
        ConfigError: the checkpoint belongs to another model.
    """
    try:
        dcp.load(state, storage_reader=reader, planner=planner_of(reader))
    except dcp.CheckpointException as error:
        # The exception has the errors of all ranks; a ConfigError among them is the clearest message.
        failures = [failure for failure, _ in error.failures.values()]
        config_errors = [failure for failure in failures if isinstance(failure, ConfigError)]
        failure = next(iter([*config_errors, *failures]), error)
        if isinstance(failure, ConfigError):
            raise failure from error
        # Errors of the machine say nothing about the checkpoint.
        if isinstance(failure, OSError) or classify(failure) in _OF_THE_MACHINE:
            raise
        # The planner's complaint: the checkpoint lacks an entry, or has it in another shape.
        rule = f"cannot be read ({first_line(failure)})"
        raise ConfigError(reader.named_by, reader.checkpoint, rule, another(reader.checkpoint)) from error


_OF_THE_MACHINE = (OutcomeKind.OOM, OutcomeKind.NODE_FAIL, OutcomeKind.HANG)
