"""torch's reader and planner of checkpoints, changed so that nothing in a checkpoint is executed."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from titanlab.checkpoint.folders import another
from titanlab.checkpoint.metadata import SavedTensor, read_saved
from titanlab.checkpoint.numpy_state import is_numpy_state, read_numpy_state
from titanlab.errors import ConfigError
from titanlab.records.outcome import OutcomeKind, classify, first_line


class CheckpointReader(dcp.FileSystemReader):
    """Reads `.metadata` as data, once; what it raises about the files is a ConfigError.

    Args:
        checkpoint: folder of one step.
        key: for errors.

    Attributes:
        saved: what the checkpoint holds.
        checkpoint, named_by: as they were given.

    Raises:
        ConfigError: its metadata is missing or damaged, or asks for what no checkpoint needs.
    """

    def __init__(self, checkpoint: Path, key: str) -> None:
        super().__init__(checkpoint)
        self.saved = read_saved(checkpoint, key)
        self.checkpoint = checkpoint
        self.named_by = key

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As in FileSystemReader, which calls pickle.load."""
        saved = self.saved
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        entries |= {name: BytesStorageMetadata() for name in saved.objects}
        entries |= {name: _as_torch(tensor) for name, tensor in saved.tensors.items()}
        places = {MetadataIndex(*index): place for index, place in saved.places.items()}
        return Metadata(
            state_dict_metadata=entries,
            storage_data=places,
            storage_meta=StorageMeta(load_id=self.load_id),
            version=saved.version,
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As in FileSystemReader, which reads tensors with weights_only=True.

        Raises:
            ConfigError: a file is missing or damaged, or asks for what no tensor needs.
        """
        with _damage_named(self.checkpoint, self.named_by):
            return super().read_data(plan, planner)


class CheckpointPlanner(dcp.DefaultLoadPlanner):
    """Reads what is no tensor without running code: DefaultLoadPlanner calls torch.load with weights_only=False."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one object into the state."""
        name = read_item.dest_index.fqn
        loaded = read_numpy_state(value) if is_numpy_state(name) else torch.load(value, weights_only=True)
        *path, last = self.mappings[name]
        node: Any = self.original_state_dict
        for part in path:
            node = node[part]
        node[last] = loaded


def load_state(state: dict[str, Any], reader: CheckpointReader) -> None:
    """Read a checkpoint into a state dict, together with all ranks; nothing in it is executed.

    Raises:
        ConfigError: a file of it is missing or damaged, or would run code; or it is of another model.
    """
    try:
        dcp.load(state, storage_reader=reader, planner=CheckpointPlanner())
    except dcp.CheckpointException as error:
        # It holds the error of every rank. A ConfigError is reported as itself, in one line.
        failures = [failure for failure, _ in error.failures.values()]
        failure = next((each for each in failures if isinstance(each, ConfigError)), failures[0] if failures else error)
        if isinstance(failure, ConfigError):
            raise failure from error
        # Errors of the machine say nothing about the checkpoint.
        if classify(failure) in (OutcomeKind.OOM, OutcomeKind.NODE_FAIL, OutcomeKind.HANG):
            raise
        raise _unreadable(reader.checkpoint, reader.named_by, first_line(failure)) from error


def _as_torch(tensor: SavedTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
        size=torch.Size(tensor.size),
        chunks=[
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            for offsets, sizes in tensor.boxes
        ],
    )


@contextlib.contextmanager
def _damage_named(checkpoint: Path, key: str) -> Iterator[None]:
    """Report errors while files are read in one line; errors of the machine are passed on."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise
        raise _unreadable(checkpoint, key, f"it has no file {Path(str(error.filename)).name}") from error
    except Exception as error:
        # Damaged bytes fail in any way; torch's message about a refused name takes ten lines.
        reason = f"{type(error).__name__}: a file is damaged, or asks for more than tensors"
        raise _unreadable(checkpoint, key, reason) from error


def _unreadable(checkpoint: Path, key: str, reason: str) -> ConfigError:
    return ConfigError(key, checkpoint, f"cannot be read ({reason})", another(checkpoint))
