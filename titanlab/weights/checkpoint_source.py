"""Weights of a checkpoint that any layout saved, read with one full tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from titanlab.checkpoint.contents import read_contents
from titanlab.checkpoint.older.metadata import read_saved
from titanlab.checkpoint.older.reader import PickledReader
from titanlab.checkpoint.reader import Reader, read_into, reader_of
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.weights.biases import Biases, biases_of
from titanlab.weights.source import DTYPES, Entry

# Before the names of parameters: in titanlab's checkpoints, and in those of torchtitan.
PREFIXES = ("model.", "")


def run_source(checkpoint: Place, model: ModelConfig, key: str) -> CheckpointSource:
    """The weights in a checkpoint of titanlab.

    Args:
        checkpoint: folder of one step.
        model: config of the run's model.
        key: for errors.

    Raises:
        ConfigError: the checkpoint lacks a parameter, or a parameter is not a tensor of a floating-point format.
    """
    contents = read_contents(checkpoint, key)
    reader = reader_of(checkpoint, contents, key)
    biases = biases_of(model, contents.saved.position.routing, key, checkpoint)
    return CheckpointSource(reader, reader.read_metadata(), PREFIXES[0], model, biases)


def dcp_source(folder: Path, model: ModelConfig, key: str) -> CheckpointSource:
    """The weights in a folder of torch.distributed.checkpoint; its pickle is read as data.

    Args:
        model: config of the model that was saved; the folder has none.

    Raises:
        ConfigError: as `run_source`, or a parameter has another shape.
    """
    reader = PickledReader(folder, read_saved(folder, key), key)
    metadata = reader.read_metadata()
    shapes = model.account().parameters
    saved = metadata.state_dict_metadata
    prefix = next((prefix for prefix in PREFIXES if any(f"{prefix}{name}" in saved for name in shapes)), None)
    if prefix is None:
        first, there = next(iter(shapes)), sorted(saved)[:3]
        rule = f"has no parameter of the model, as {first} or model.{first}; it has {', '.join(there) or 'nothing'}"
        raise ConfigError(key, folder, rule, "give the --model that was saved")
    source = CheckpointSource(reader, metadata, prefix, model)
    for name, shape in shapes.items():
        if source.entries[name].shape != tuple(shape):
            rule = f"{name} is {list(source.entries[name].shape)} there and {list(shape)} in the model"
            raise ConfigError(key, folder, rule, "give the --model that was saved")
    return source


class CheckpointSource:
    """A Source that needs no process group.

    Args:
        metadata: of the reader. It is read once: that of a run on hundreds of ranks has 100,000 entries.
        prefix: before the names of parameters.
        model: config of the model.
        biases: of its routers.

    Raises:
        ConfigError: the checkpoint lacks a parameter, or a parameter is not a tensor of a floating-point format.
    """

    def __init__(
        self, reader: Reader, metadata: Metadata, prefix: str, model: ModelConfig, biases: Biases | None = None
    ) -> None:
        self.model = model
        self.biases: Biases = biases or {}
        self.entries: dict[str, Entry] = {}
        self._name, self._whole = "", torch.empty(0)
        self._reader, self._metadata, self._prefix = reader, metadata, prefix
        names = {getattr(torch, torch_name): name for name, torch_name in DTYPES.items()}
        for name in model.account().parameters:
            tensor = metadata.state_dict_metadata.get(f"{prefix}{name}")
            if not isinstance(tensor, TensorStorageMetadata) or tensor.properties.dtype not in names:
                rule = f"has no plain tensor {name}"
                raise ConfigError(reader.named_by, reader.checkpoint, rule, "give a checkpoint of the same model")
            self.entries[name] = Entry(dtype=names[tensor.properties.dtype], shape=tuple(tensor.size))

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """As in Source."""
        if name != self._name:
            # Free the previous tensor before the next is allocated.
            self._name, self._whole = "", torch.empty(0)
            entry = self.entries[name]
            whole = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype]))
            read_into({f"{self._prefix}{name}": whole}, self._reader, self._metadata)
            self._name, self._whole = name, whole
        box: Tensor = self._whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        return box
