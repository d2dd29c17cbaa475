"""Reads the tensors of a checkpoint into a state dict, and verifies the blocks that it reads."""

from __future__ import annotations

import io
import itertools
import json
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.folders import damaged, earlier_hint
from titanlab.checkpoint.index import BYTES, FILE, START, CheckpointIndex, IndexedTensor, needed_spans
from titanlab.checkpoint.storage import BLOCK, ITEM_BYTES, BlockReader, DamagedFile
from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind, classify, first_line


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, without a copy."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content).cast("B")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name in the index."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Reader(dcp.StorageReader):
    """A storage for `torch.distributed.checkpoint` that reports faults of the files as ConfigError.

    Attributes:
        checkpoint: folder of one step.
        named_by: the config key or argument that names the checkpoint, for errors.
    """

    checkpoint: Place
    named_by: str

    @abstractmethod
    def decode(self, content: io.BytesIO) -> Any:
        """The value of an entry that is not a tensor, without running code."""

    def planner(self) -> dcp.DefaultLoadPlanner:
        return _Planner(self.decode)


class _Planner(dcp.DefaultLoadPlanner):
    """DefaultLoadPlanner, which would unpickle entries that are not tensors."""

    def __init__(self, decode: Callable[[io.BytesIO], Any]) -> None:
        super().__init__()
        self._decode = decode

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        state: Any = self.original_state_dict
        *folders, last = self.mappings[read_item.dest_index.fqn]
        for step in folders:
            state = state[step]
        state[last] = self._decode(value)


WITHOUT_GROUP = "torch.distributed is disabled, unavailable or uninitialized"
"""The beginning of torch's warning that one process reads or writes alone."""


class ShardReader(Reader):
    """Reads a checkpoint of titanlab.

    Attributes:
        blocks_read: how many blocks this rank has read and verified.
    """

    def __init__(self, checkpoint: Place, index: CheckpointIndex, key: str) -> None:
        self.checkpoint, self.named_by = checkpoint, key
        self.blocks_read = 0
        self._index = index
        self._metadata: Metadata | None = None

    def decode(self, content: io.BytesIO) -> Any:
        return json.load(content)

    # A reader reads one checkpoint, and DCP never chooses this storage by itself.
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is not None:
            # A checkpoint of hundreds of ranks has 100,000 chunks, and weights are read one by one.
            return self._metadata
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: BytesStorageMetadata() for name in self._index.objects
        }
        for name, tensor in self._index.tensors.items():
            boxes = zip(tensor.offsets.tolist(), tensor.sizes.tolist(), strict=True)
            entries[name] = metadata_of(tensor.dtype, tensor.shape, boxes)
        self._metadata = Metadata(state_dict_metadata=entries)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify the chunks that this rank needs; reads a block once, also if it has parts of several tensors.

        Raises:
            DamagedCheckpoint: a file is missing, or a block differs from the saved one.
        """
        parts: dict[tuple[int, int, str, int], list[ReadItem]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(json.dumps(self._index.objects[item.storage_index.fqn]).encode()))
                continue
            tensor, number = self._index.tensors[item.storage_index.fqn], item.storage_index.index
            if number is None:
                number = tensor.chunk_at(item.storage_index.offset or ())
            chunk = tensor.chunks[number]
            key = (int(chunk[FILE]), int(chunk[START]), item.storage_index.fqn, number)
            parts.setdefault(key, []).append(item)
        # In the order of files and bytes, so that one file is open at a time.
        ordered = sorted(parts.items(), key=lambda part: part[0])
        try:
            for number, of_file in itertools.groupby(ordered, key=lambda part: part[0][0]):
                entry = self._index.files[number]
                with BlockReader(self.checkpoint / entry.name, entry.size, entry.checksums) as file:
                    try:
                        for (_, start, name, chunk_number), items in of_file:
                            self._read_chunk(file, start, self._index.tensors[name], chunk_number, items, planner)
                    finally:
                        self.blocks_read += file.blocks_read
        except DamagedFile as error:
            raise damaged(self.checkpoint, self.named_by, error) from error
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_chunk(
        self,
        file: BlockReader,
        start: int,
        tensor: IndexedTensor,
        number: int,
        items: list[ReadItem],
        planner: LoadPlanner,
    ) -> None:
        sizes, dtype = tensor.sizes[number].tolist(), dtype_named(tensor.dtype)
        item_bytes = ITEM_BYTES[tensor.dtype]
        spans = [
            needed_spans(sizes, list(item.storage_offsets), list(item.lengths), item_bytes, BLOCK) for item in items
        ]
        if len(items) == 1 and len(spans[0]) == 1:
            target = planner.resolve_tensor(items[0]).detach()
            first, end = spans[0][0]
            # If the bytes in the file are exactly those of the tensor, read into it without a buffer.
            if (
                type(target) is Tensor
                and target.device.type == "cpu"
                and (target.dtype, target.shape, target.nbytes) == (dtype, items[0].lengths, end - first)
                and target.is_contiguous()
            ):
                file.read_into(start + first, bytes_of(target))
                planner.commit_tensor(items[0], target)
                return
        # The rows of the chunk from the first to the last that an item needs; only needed bytes are read.
        low, rows = 0, 1
        if sizes:
            low = min(item.storage_offsets[0] for item in items)
            rows = max(item.storage_offsets[0] + item.lengths[0] for item in items) - low
        buffer = torch.empty([rows, *sizes[1:]] if sizes else [], dtype=dtype)
        skipped = low * (int(tensor.chunks[number, BYTES]) // sizes[0] if sizes and sizes[0] else 0)
        content = bytes_of(buffer)
        for first, end in _joined(spans):
            file.read_into(start + first, content[first - skipped : end - skipped])
        for item in items:
            part = buffer
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                part = part.narrow(dim, offset - (low if dim == 0 else 0), length)
            target = planner.resolve_tensor(item).detach()
            if target.shape != part.shape:
                raise ValueError(f"a part of {item.dest_index.fqn} has the shape {list(target.shape)} in the model")
            target.copy_(part)
            planner.commit_tensor(item, target)


def _joined(spans: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, end in sorted(span for of_item in spans for span in of_item):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((first, end))
    return joined


def metadata_of(
    dtype: str, shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]
) -> TensorStorageMetadata:
    """The metadata of a tensor for DCP's planner."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype_named(dtype)),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)) for offsets, sizes in boxes],
    )


def load_state(state: dict[str, Any], reader: Reader) -> None:
    """Read a checkpoint into a state dict without running code in it; all ranks call this together.

    Without a process group this process reads alone.

    Raises:
        DamagedCheckpoint: a file is missing, damaged or would run code; every rank raises it, also if only one has
            found the damage.
        ConfigError: the checkpoint belongs to another model.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=WITHOUT_GROUP)
            dcp.load(state, storage_reader=reader, planner=reader.planner())
    except dcp.CheckpointException as error:
        # The exception has the errors of all ranks; a ConfigError among them is the clearest message.
        failures: list[BaseException] = [failure for failure, _ in error.failures.values()]
        config_errors = [failure for failure in failures if isinstance(failure, ConfigError)]
        failure = next(iter([*config_errors, *failures]), error)
        # An error of the machine does not mean a damaged checkpoint.
        kinds = (OutcomeKind.OOM, OutcomeKind.NODE_FAIL, OutcomeKind.HANG)
        if isinstance(failure, (ConfigError, OSError)) or classify(failure) in kinds:
            raise failure from error
        # An error of the planner: the checkpoint lacks an entry, or the entry has another shape.
        rule = f"cannot be read ({first_line(failure)})"
        raise ConfigError(reader.named_by, reader.checkpoint, rule, earlier_hint(reader.checkpoint)) from error
