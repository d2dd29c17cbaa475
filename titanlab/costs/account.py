"""Accounts: what a part declares about itself as torch-free data.

The planner, the trainer and the tests read the same account; tests hold it to the real modules.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

OperationKind = Literal["matmul", "attention", "norm", "pointwise", "lookup"]
# What a tensor-parallel rank has of a tensor: its tokens of the residual stream if that is shared out (else all), its
# heads or columns, or all of it.
Cut = Literal["stream", "part", "whole"]
# The input of a block, which the block before it has computed.
HIDDEN = "hidden"


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A tensor of a block's forward pass that may have to stay until its backward.

    Attributes:
        name: of the tensor in its block; activations of one name are one tensor.
        shape: over all ranks, of one microbatch.
        cut: what a tensor-parallel rank has of it.
        element_bytes: where it is not an element of the compute precision: 4 for statistics in float32.
        copy_of: name of the tensor of which it is a copy in another precision; where both are as wide there is no copy.
        accelerator: the only one on which it exists; empty: on all.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut = "stream"
    element_bytes: int | None = None
    copy_of: str = ""
    accelerator: str = ""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of torch inside an operation: what a policy can name.

    Attributes:
        names: of the operator, as torch prints it (`aten.mm.default`); several where one of them is chosen by device.
        results: what it returns, in memory of its own.
    """

    names: tuple[str, ...]
    results: tuple[Activation, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank has of a block's activations.

    Attributes:
        element_bytes: of an element in the compute precision.
        accelerator: `cpu` or `cuda`; kernels differ in what they keep.
        tensor, context: degrees.
        sequence_parallel: with tensor > 1, the residual stream is shared out too.
    """

    element_bytes: int
    accelerator: str = "cuda"
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = True

    def bytes_of(self, activations: Iterable[Activation]) -> int:
        """Bytes of these tensors on one rank, each counted once."""
        sizes: dict[str, int] = {}
        for tensor in activations:
            if tensor.accelerator not in ("", self.accelerator):
                continue
            width = tensor.element_bytes or self.element_bytes
            name = tensor.copy_of if tensor.copy_of and width == self.element_bytes else tensor.name
            whole = tensor.cut == "whole" or (tensor.cut == "stream" and not self.sequence_parallel)
            ranks = self.context * (1 if whole else self.tensor)
            sizes[name] = math.prod(tensor.shape) * width // ranks
        return sum(sizes.values())


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a forward pass, for given batch and sequence.

    Attributes:
        name: where it happens, as a path in the module: `attention.wq`, `feed_forward.silu`.
        kind: what bounds it: matrix multiplication, attention, or moving bytes.
        flops: forward floating-point operations (a multiply–add counts as two); attention counts
            the full square, without a causal discount. Zero where moving bytes dominates.
        output: shape of what it produces, `[batch, seq, …]`.
        keeps: what autograd keeps of it for the backward pass, but for parameters and buffers of the whole model.
        operators: of torch inside it, that make something, in the order in which they run.
    """

    name: str
    kind: OperationKind
    flops: int
    output: tuple[int, ...]
    keeps: tuple[Activation, ...] = ()
    operators: tuple[Operator, ...] = ()

    def output_bytes(self, element_bytes: int) -> int:
        """Bytes of the output at the given bytes per element."""
        return math.prod(self.output) * element_bytes


def block_input(block: Sequence[Operation]) -> Activation:
    """The input of a block, which has the shape of its output; the output of the block before is the same tensor."""
    return Activation(name=HIDDEN, shape=block[-1].output)


def kept(block: Iterable[Operation]) -> list[Activation]:
    """All that autograd keeps of a block's operations; a tensor that several keep is named by each."""
    return [activation for operation in block for activation in operation.keeps]


@dataclass(frozen=True, kw_only=True)
class Init:
    """How one parameter starts, as data; `titanlab.weights.initialise` computes the values.

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
        lookups: names of other tables of which rows are looked up, such as one of positions.
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
    lookups: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    attention: str = ""
    tensor_plan: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameter_count(self) -> int:
        """Number of stored scalars."""
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def embedding_count(self) -> int:
        """Scalars that are only looked up: those of tables, but for one that the head shares."""
        tables = {self.embedding, *self.lookups} - set(self.tied.values())
        return sum(math.prod(self.parameters[name]) for name in tables)


def style_of(plan: Mapping[str, str], module: str) -> str:
    """The style that a tensor plan gives to the module at a path, or nothing; `*` stands for one step of a path."""
    for pattern, style in plan.items():
        # One step only, as there are equally many dots.
        if pattern.count(".") == module.count(".") and fnmatch.fnmatchcase(module, pattern):
            return style
    return ""
