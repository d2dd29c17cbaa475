"""torch's reader and planner for folders of torch.distributed.checkpoint, changed so that no code in a folder runs."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

from titanlab.checkpoint.blocks import DamagedCheckpoint
from titanlab.checkpoint.folders import another
from titanlab.checkpoint.reader import Reader, set_in
from titanlab.errors import ConfigError

if TYPE_CHECKING:
    from titanlab.train.dcp_folder import SavedState, SavedTensor


class DcpReader(Reader, dcp.FileSystemReader):
    """Reads `.metadata` as data, and reports faults of the files as ConfigError.

    Args:
        saved: the entries of the folder.
        key: for errors.
    """

    checkpoint: Path

    def __init__(self, checkpoint: Path, saved: SavedState, key: str) -> None:
        super().__init__(checkpoint)
        self.saved, self.checkpoint, self.named_by = saved, checkpoint, key

    def planner(self) -> dcp.DefaultLoadPlanner:
        return DcpPlanner()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Make torch's Metadata from `saved`; FileSystemReader would call pickle.load."""
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
        """Read as FileSystemReader does, with weights_only=True for tensors.

        Raises:
            DamagedCheckpoint: a file is missing or damaged, or asks for a name that no tensor needs.
        """
        with _damage_named(self.checkpoint, self.named_by):
            return super().read_data(plan, planner)


class DcpPlanner(dcp.DefaultLoadPlanner):
    """Reads objects without running code: DefaultLoadPlanner calls torch.load with weights_only=False."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put one object into the state."""
        loaded = torch.load(value, weights_only=True)
        set_in(self.original_state_dict, self.mappings[read_item.dest_index.fqn], loaded)


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
    """Report damaged files as ConfigError; errors of the machine pass unchanged."""
    try:
        yield
    except (ConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            raise
        raise _unreadable(checkpoint, key, f"it has no file {Path(str(error.filename)).name}") from error
    except Exception as error:
        # Damaged bytes can raise any exception; torch's message about a refused name has ten lines.
        reason = f"{type(error).__name__}: a file is damaged, or asks for more than tensors"
        raise _unreadable(checkpoint, key, reason) from error


def _unreadable(checkpoint: Path, key: str, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(key, checkpoint, f"cannot be read ({reason})", another(checkpoint))
