"""Tensors of folders of torch.distributed.checkpoint: read without running code in them, and written for others."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from msgspec import structs
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from titanlab.checkpoint import (
    POSITION,
    DamagedCheckpoint,
    Place,
    Reader,
    earlier_hint,
    metadata_of,
    position_bytes,
    read_contents,
    read_into,
    set_in,
)
from titanlab.errors import ConfigError
from titanlab.system import refusal, write_bytes

if TYPE_CHECKING:
    from titanlab.train.dcp_folder import SavedState


class DcpReader(Reader, dcp.FileSystemReader):
    """Reads `.metadata` as data, and reports faults of the files as ConfigError."""

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
        entries |= {
            name: metadata_of(tensor.dtype, tensor.size, tensor.boxes) for name, tensor in saved.tensors.items()
        }
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
    return DamagedCheckpoint(key, checkpoint, f"cannot be read ({reason})", earlier_hint(checkpoint))


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
            # One process writes, so there is one failure; native code raises a RuntimeError about a full disk.
            failure: BaseException = next((failure for failure, _ in error.failures.values()), error)
            raise ((refusal(into) if isinstance(failure, RuntimeError) else None) or failure) from error
    if prefix != _OWN_PREFIX:
        return
    files = {path.name: path.stat().st_size for path in sorted(into.iterdir())}
    saved = structs.replace(contents.saved, files=files, generators={})
    write_bytes(into / POSITION, position_bytes(saved), durable=True)


def _renamed(name: str, prefix: str) -> str:
    return prefix + name.removeprefix(_OWN_PREFIX) if name.startswith(_OWN_PREFIX) else name
