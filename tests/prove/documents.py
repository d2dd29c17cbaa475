"""Packed documents for the comparisons of `test_document_mask.py`: sequences, and the logits of a layout's ranks."""

import os
from unittest.mock import patch

import numpy as np
import torch

from titanlab.data import Batch
from titanlab.distributed import ALONE, build_mesh, joined, open_world
from titanlab.parallelism import positions
from titanlab.train import assemble
from titanlab.train.starting_weights import fill_start

SEQ = 32
# Lengths of the documents of each sequence. Chunks of context parallelism have 8 tokens with two ranks, 4 with four.
LENGTHS = (
    (32,),  # longer than the sequence
    (1,) * 32,
    (8, 8, 8, 8),
    (4,) * 8,
    (7, 1, 1, 9, 14),
    (3, 29),
    (31, 1),
    (16, 15, 1),
)


def packed() -> Batch:
    """Sequences in which each document ends with token 0, but for those that the sequence's end cuts off."""
    tokens = np.random.default_rng(5).integers(1, 256, (len(LENGTHS), SEQ + 1))
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths)[:-1] - 1
        tokens[row, ends] = 0
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy())


def alone(model) -> torch.Tensor:
    """Logits of each document by itself, of a model that is called with [1, tokens]; [sequences, seq, vocab]."""
    tokens = torch.from_numpy(packed().tokens)
    with torch.no_grad():
        return torch.stack(
            [
                torch.cat([model(piece[None])[0] for piece in row.split(list(lengths))])
                for row, lengths in zip(tokens, LENGTHS, strict=True)
            ]
        )


def of_rank(made):
    """Where in the logits of the batch this rank's are, and they: data rank, positions, columns, logits."""
    seen, right = [], assemble._loss

    def recorded(*arguments):
        loss = right(*arguments)

        def call(compute, labels):
            logits = compute()
            seen.append(logits.detach().clone())
            return loss(lambda: logits, labels)

        return call

    with (
        patch.object(assemble, "_loss", recorded),
        open_world(joined(os.environ) or ALONE, accelerator="cpu", seed=0, deterministic=False) as world,
    ):
        mesh, layout = build_mesh(made.layout, "cpu"), made.layout
        assembled = assemble.assemble(made, world, mesh)
        fill_start(made, assembled.model, world)
        assembled.after_update()
        own = [rows[mesh.data_rank :: layout.data] for rows in packed()]
        for start in range(0, len(own[0]), assembled.evaluation_rows):
            part = Batch(*(rows[start : start + assembled.evaluation_rows] for rows in own))
            assembled.evaluate(assembled.to_device(part))
        if not seen:
            return None
        logits = torch.cat(seen)
        width = logits.shape[-1]
        first = mesh.coordinate("tensor") * width if width < made.model.vocab_size else 0
        places = positions(SEQ, ranks=layout.context, rank=mesh.coordinate("context"))
        return mesh.data_rank, places, slice(first, first + width), logits


def of_layout(pool, made) -> torch.Tensor:
    """The logits of all ranks together; every element comes from at least one rank."""
    whole = torch.full((len(LENGTHS), SEQ, made.model.vocab_size), torch.nan)
    for found in pool.run(made.world, of_rank, made, limit_seconds=300):
        if found is not None:
            data_rank, places, columns, logits = found
            # Advanced indexing of the positions, so that views do not do.
            rows = whole[data_rank :: made.layout.data]
            part = rows[..., columns]
            part[:, places] = logits
    return whole
