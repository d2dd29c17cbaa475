"""Weights of a run's checkpoint that any layout saved, read with one full tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titanlab.checkpoint.contents import read_contents
from titanlab.checkpoint.reader import read_into, reader_of
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.weights.source import DTYPES, Entry


class CheckpointSource:
    """A Source that needs no process group.

    Args:
        checkpoint: folder of one step.
        model: config of the run's model.
        key: for errors.

    Raises:
        ConfigError: the checkpoint lacks a parameter, or a parameter is not a tensor of a floating-point format.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig, key: str) -> None:
        self.model = model
        self.entries: dict[str, Entry] = {}
        self._name, self._whole = "", torch.empty(0)
        names = {getattr(torch, torch_name): name for name, torch_name in DTYPES.items()}
        # Read once: the metadata of a run on hundreds of ranks has 100,000 entries.
        self._reader = reader_of(checkpoint, read_contents(checkpoint, key), key)
        self._metadata = self._reader.read_metadata()
        saved = self._metadata.state_dict_metadata
        for name in model.account().parameters:
            tensor = saved.get(f"model.{name}")
            if not isinstance(tensor, TensorStorageMetadata) or tensor.properties.dtype not in names:
                rule = f"has no plain tensor {name}"
                raise ConfigError(key, checkpoint, rule, "give a checkpoint of the run that saved it")
            self.entries[name] = Entry(dtype=names[tensor.properties.dtype], shape=tuple(tensor.size))

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """As in Source."""
        if name != self._name:
            # Free the previous tensor before the next is allocated.
            self._name, self._whole = "", torch.empty(0)
            entry = self.entries[name]
            whole = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype]))
            read_into({f"model.{name}": whole}, self._reader, self._metadata)
            self._name, self._whole = name, whole
        box: Tensor = self._whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        return box
