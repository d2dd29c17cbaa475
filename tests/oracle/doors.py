"""The functions of titanlab that the oracle calls. When a module moves, this file alone changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titanlab.cli.compose import compose
from titanlab.data import source
from titanlab.recipe import Recipe, check, resolve
from titanlab.records import identify
from titanlab.train.initialise import initialise


def recipe(overrides: Sequence[str]) -> Recipe:
    """The resolved and checked recipe of a command line, for H100s whatever this machine has."""
    (composed,) = compose(list(overrides))
    resolved = resolve(composed, world=None, accelerator="cuda", device="NVIDIA H100 80GB HBM3")
    check(resolved)
    return resolved


def identity(overrides: Sequence[str]) -> str:
    """The sha256 of a run's identity with a fixed fingerprint of the data."""
    return identify(recipe(overrides), data="oracle", hardware="NVIDIA H100 80GB HBM3").sha256


def tokens(overrides: Sequence[str], *, ranks: int, count: int) -> list[int]:
    """The first inputs of the training stream, over all ranks in the global order of samples."""
    (composed,) = compose(list(overrides))
    training = composed.training
    source.prepare(composed.data, report=lambda line: None)
    streams = [
        source.open_train(
            composed.data,
            seed=composed.seed,
            seq_len=training.seq_len,
            global_batch=training.global_batch,
            rank=rank,
            ranks=ranks,
        )
        for rank in range(ranks)
    ]
    taken: list[int] = []
    while len(taken) < count:
        # Sample g belongs to rank g % ranks.
        batches = [stream.next_batch().tokens for stream in streams]
        for sample in range(training.global_batch):
            taken += batches[sample % ranks][sample // ranks].tolist()
    for stream in streams:
        stream.close()
    return taken[:count]


def initial_values(overrides: Sequence[str]) -> dict[str, torch.Tensor]:
    """The parameters of a new model."""
    made = recipe(overrides)
    model: torch.nn.Module = made.model.implementation().build(seq_len=made.training.seq_len)  # type: ignore[assignment]
    model = model.to_empty(device="cpu")
    initialise(model, made.model.initial_values(), made.seed)
    return dict(model.named_parameters())
