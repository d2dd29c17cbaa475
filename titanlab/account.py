"""Accounts: what a part declares about itself as torch-free data.

The planner, the trainer and the tests read the same account; tests hold it to the real modules.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OperationKind = Literal["matmul", "attention", "norm", "pointwise", "lookup"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a forward pass, for given batch and sequence.

    Attributes:
        name: where it happens, as a path in the module: `attention.wq`, `feed_forward.silu`.
        kind: what bounds it: matrix multiplication, attention, or moving bytes.
        flops: forward floating-point operations (a multiply–add counts as two); attention counts
            the full square, without a causal discount. Zero where moving bytes dominates.
        output: shape of what it produces, `[batch, seq, …]`.
    """

    name: str
    kind: OperationKind
    flops: int
    output: tuple[int, ...]

    def output_bytes(self, element_bytes: int) -> int:
        """Bytes of the output at the given bytes per element."""
        return math.prod(self.output) * element_bytes


@dataclass(frozen=True, kw_only=True)
class Init:
    """How one parameter starts, as data; `titanlab.initialise` computes the values.

    Attributes:
        kind: `normal` (truncated at three standard deviations), `ones` or `zeros`.
        std: standard deviation of the normal before its truncation (which takes 1.3 % off it).
    """

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelAccount:
    """What a model declares about itself.

    Attributes:
        parameters: every stored parameter by name, tied ones once, with its shape.
        embedding: name of the token embedding's table.
        tied: names that share another's storage: alias → owner.
        layers: number of blocks.
        heads, head_dim: of the queries, for attention's FLOPs.
        kv_heads: key/value heads.
        dim: width of the residual stream.
        vocab_size: rows of the embedding.
        pieces: top-level modules in the order of the forward pass, `layers.0` for a block: where a pipeline
            may cut. Each takes what the one before it returns. Empty: the model cannot be cut.
        attention: path in a block of the module that mixes positions, (q, k, v) → output, for q
            [batch, heads, seq, head_dim]: what context parallelism replaces. Empty: there is none.
        tensor_plan: how tensor parallelism treats a module: path → name of a style in
            `titanlab.parallelism.tensor`; `layers.*` stands for every block. Empty: not at all.
    """

    parameters: Mapping[str, tuple[int, ...]]
    embedding: str
    tied: Mapping[str, str]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    vocab_size: int
    pieces: tuple[str, ...] = ()
    attention: str = ""
    tensor_plan: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameter_count(self) -> int:
        """Number of stored scalars."""
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def embedding_count(self) -> int:
        """Scalars that are only looked up: the embedding's, or none where the head shares it."""
        if self.embedding in self.tied.values():
            return 0
        return math.prod(self.parameters[self.embedding])


def style_of(plan: Mapping[str, str], module: str) -> str:
    """The style that a tensor plan gives to the module at a path, or nothing; `*` stands for one step of a path."""
    for pattern, style in plan.items():
        # One step only, as there are equally many dots.
        if pattern.count(".") == module.count(".") and fnmatch.fnmatchcase(module, pattern):
            return style
    return ""
