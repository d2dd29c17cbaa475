"""Number formats of a run, and the bytes that follow from them. Torch-free."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from titanlab.costs.account import ModelAccount

# Bytes of an element, by torch's name of its dtype.
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# Names in configs → torch's names.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Names in configs for pieces whose names differ from model to model.
EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Number formats of a run, by torch's names of dtypes.

    Attributes:
        master: of stored parameters and gradients, and of optimizer states that have the parameters' dtype.
        compute: of gathered parameters and of activations.
        reduce: of gradients while they are summed over processes and microbatches.
        fp32_parts: parts that compute in float32 anyway: `embedding`, `head`, pieces, or patterns of pieces.
    """

    master: str
    compute: str
    reduce: str
    fp32_parts: tuple[str, ...] = ()

    @property
    def master_bytes(self) -> int:
        """Bytes per element of a parameter, its gradient, and each optimizer state of the same dtype."""
        return BYTES[self.master]

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of a gathered parameter and of an activation."""
        return BYTES[self.compute]

    @property
    def reduce_bytes(self) -> int:
        """Bytes per element of a gradient that is being summed."""
        return BYTES[self.reduce]

    @property
    def mixed(self) -> bool:
        """Whether parameters are cast before they compute, or gradients before they are summed. FSDP2 does both."""
        return self.compute != self.master or self.reduce != self.master


@dataclass(frozen=True, kw_only=True)
class Product:
    """How a linear layer multiplies, if not in the precision of its activations.

    Attributes:
        forward, input_gradient, weight_gradient: torch's name of the dtype of each of its three products.
        cast_bytes: bytes that casts read and write for each element of its input, its weight and the gradient of its
            output, over the three products.
        cast_kernels: kernels of these casts, for each of the three tensors.
    """

    forward: str
    input_gradient: str
    weight_gradient: str
    cast_bytes: float
    cast_kernels: int


def matched(account: ModelAccount, parts: Sequence[str]) -> tuple[str, ...]:
    """The pieces of a model that names or patterns match, in the order of the forward pass."""
    patterns = [_pattern(account, part) for part in parts]
    return tuple(piece for piece in account.pieces if any(fnmatch.fnmatchcase(piece, part) for part in patterns))


def _pattern(account: ModelAccount, part: str) -> str:
    """The piece of this model for `embedding` or `head`; other patterns are not changed."""
    if part == HEAD and account.pieces:
        return account.pieces[-1]
    if part == EMBEDDING:
        return next((piece for piece in account.pieces if account.embedding.startswith(f"{piece}.")), part)
    return part
