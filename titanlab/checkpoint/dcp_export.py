"""Writes a checkpoint as a plain folder of torch.distributed.checkpoint, for other tools, one tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.contents import read_contents
from titanlab.checkpoint.position import POSITION, position_bytes
from titanlab.checkpoint.reader import Reader, read_into
from titanlab.system.files import refusal, write_bytes

# Before the names of parameters in titanlab's checkpoints.
_OWN_PREFIX = "model."


class _ReadingPlanner(dcp.DefaultSavePlanner):
    """Plans by shapes alone, and reads each tensor when it is written.

    Args:
        names: name of each tensor in the checkpoint, by its name in the folder that is written.
    """

    def __init__(self, reader: Reader, metadata: Metadata, names: Mapping[str, str]) -> None:
        super().__init__(flatten_state_dict=False)
        self._reader, self._metadata, self._names = reader, metadata, names

    def lookup_object(self, index: MetadataIndex) -> Any:
        """A tensor or object of the state, by its name."""
        value = self.state_dict[index.fqn]
        if not isinstance(value, torch.Tensor):
            return value
        whole = torch.empty(value.shape, dtype=value.dtype)
        read_into({self._names[index.fqn]: whole}, self._reader, self._metadata)
        return whole


def write_dcp(checkpoint: Place, into: Path, key: str, *, prefix: str = _OWN_PREFIX) -> None:
    """Write `.metadata`, `*.distcp` and `position.json` into a new folder.

    The names of the entries are `model.…` and `optimizer.state.….…`. The folder can be given to
    `checkpoint.load_from`; it has no states of generators.

    Args:
        key: names the checkpoint in errors.
        prefix: before the names of parameters; empty: as torchtitan names them. Such a folder has no position.json,
            and `titanlab import` reads it.

    Raises:
        ConfigError: the checkpoint is damaged.
        OSError: the disk takes no more.
    """
    contents = read_contents(checkpoint, key)
    reader = contents.reader(checkpoint, key)
    metadata = reader.read_metadata()
    state: dict[str, Any] = dict(contents.entries.objects)
    written: dict[str, str] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            written[_renamed(name, prefix)] = name
            state[_renamed(name, prefix)] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
    with warnings.catch_warnings():
        # One process without a process group is what is wanted here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(into),
                planner=_ReadingPlanner(reader, metadata, written),
                no_dist=True,
            )
        except dcp.CheckpointException as error:
            # Of the one process that writes.
            raise _cause(error, into) from error
    if prefix != _OWN_PREFIX:
        return
    files = {path.name: path.stat().st_size for path in sorted(into.iterdir())}
    saved = replace(contents.saved, files=files, generators={})
    write_bytes(into / POSITION, position_bytes(saved), durable=True)


def _cause(error: dcp.CheckpointException, into: Path) -> BaseException:
    """The error with which a file was not written; a full disk, if that is what native code has hidden."""
    failure: BaseException = next((failure for failure, _ in error.failures.values()), error)
    return (refusal(into) if isinstance(failure, RuntimeError) else None) or failure


def _renamed(name: str, prefix: str) -> str:
    return prefix + name.removeprefix(_OWN_PREFIX) if name.startswith(_OWN_PREFIX) else name
