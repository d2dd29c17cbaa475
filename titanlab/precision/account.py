"""What a precision declares about itself: which number format where, and the bytes that follow. Torch-free."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from titanlab.costs.account import ModelAccount

# Bytes of an element, by torch's name of its dtype.
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# Words of the config for torch's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Words for a piece of the model whose name differs from model to model.
EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Number formats of a run, by torch's names of dtypes.

    Attributes:
        master: of parameters and gradients at rest, and of the states that an optimizer makes like its parameters.
        compute: of gathered parameters and of activations.
        reduce: of gradients while they are summed over processes and microbatches.
        fp32_parts: what computes in float32 all the same: `embedding`, `head`, pieces, or patterns of pieces.
    """

    master: str
    compute: str
    reduce: str
    fp32_parts: tuple[str, ...] = ()

    @property
    def master_bytes(self) -> int:
        """Of an element at rest: of a parameter, of its gradient, and of each state that follows it."""
        return BYTES[self.master]

    @property
    def compute_bytes(self) -> int:
        """Of an element that is gathered or handed on."""
        return BYTES[self.compute]

    @property
    def reduce_bytes(self) -> int:
        """Of an element of a gradient on its way."""
        return BYTES[self.reduce]

    @property
    def mixed(self) -> bool:
        """Parameters are cast before they compute, or gradients before they are summed: FSDP2 does both."""
        return self.compute != self.master or self.reduce != self.master


def matched(account: ModelAccount, parts: Sequence[str]) -> tuple[str, ...]:
    """The pieces of a model that some words name, in the order of the forward pass; unknown words name none."""
    found = {piece for part in parts for piece in account.pieces if fnmatch.fnmatchcase(piece, _pattern(account, part))}
    return tuple(piece for piece in account.pieces if piece in found)


def _pattern(account: ModelAccount, part: str) -> str:
    """A word as a pattern of pieces."""
    if part == HEAD and account.pieces:
        return account.pieces[-1]
    if part == EMBEDDING:
        return next((piece for piece in account.pieces if account.embedding.startswith(f"{piece}.")), part)
    return part
