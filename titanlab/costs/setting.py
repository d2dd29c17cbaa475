"""What rules of options may read of a resolved recipe; and the number, size and memory of the loss's chunks."""

from __future__ import annotations

from dataclasses import Field, dataclass
from typing import Any, ClassVar, Protocol

from titanlab.costs.account import ModelAccount
from titanlab.costs.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The facts of a resolved recipe that the options' rules may read.

    A schema whose rule needs more than its own fields has a method `check(setting)`, which raises ConfigError.
    So every option has its own rules, and no group depends on another.

    Attributes:
        seq_len: tokens of a sequence.
        microbatch: sequences of one forward pass.
        accelerator: `cpu` or `cuda`.
        compiled: backend that compiles the blocks; empty: blocks are not compiled.
        sequence_parallel: with tensor > 1, the residual stream is cut too.
        cpu_offload: parameters are kept in host memory.
        splits_backward: the pipeline's schedule computes gradients of weights later than those of inputs.
        rests_in, computes_in: dtype in which parameters are stored, and in which they compute: `bfloat16`.
        kinds: name of the option by group, such as precision → bf16. Only for messages: a rule that compares names
            would miss options of other packages.
    """

    model: ModelAccount
    layout: Layout
    seq_len: int
    microbatch: int
    accelerator: str
    device: str
    compiled: str
    sequence_parallel: bool
    cpu_offload: bool
    splits_backward: bool
    rests_in: str
    computes_in: str
    kinds: dict[str, str]


class OptionConfig(Protocol):
    """A config of one option of a group: a frozen dataclass that inherits from the class of the group's contract.

    Attributes:
        kind: name of the option.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    kind: str

    def __hash__(self) -> int:
        # The fields of a frozen dataclass make its hash.
        return object.__hash__(self)

    def check(self, setting: Setting) -> None:
        """Check rules that need more of the recipe than the option's own fields; by default there are none.

        Raises:
            ConfigError: the first rule that is broken.
        """
        return  # the default; mypy takes an empty body for an abstract method


# The value of training.loss_chunk that leaves the choice to `automatic_chunk`.
AUTO = -1
# Bytes of float32 logits: above LARGE_BYTES the loss is computed in chunks of at most CHUNK_BYTES. With a vocabulary of
# 128,256 a chunk has 1,024 tokens. That is enough for efficient matrix products, and the chunks are few: each of them
# reads and writes the gradient of the head's weight (benchmarks/results/loss_chunk.json).
LARGE_BYTES = 2**30
CHUNK_BYTES = 2**29
# Eager mode computes the loss of a chunk in parts of some tokens. The logits of a part fit into a CPU's cache; on a GPU
# they are large enough that a kernel runs longer than its launch.
_PART_BYTES = {"cpu": 2**23, "cuda": 2**26}
_FLOAT = 4


def automatic_chunk(*, tokens: int, columns: int) -> int:
    """Number of tokens in a chunk of the loss; 0: no chunks, because the logits of all tokens are small enough."""
    if tokens * columns * _FLOAT <= LARGE_BYTES:
        return 0
    return 1 << max(0, (CHUNK_BYTES // (columns * _FLOAT)).bit_length() - 1)


def chunks_of(tokens: int, chunk: int, *, pads: bool) -> list[int]:
    """Number of tokens in each chunk; `pads`: the last chunk is padded to the size of the others."""
    if not chunk:
        return [tokens]
    sizes = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
    return [chunk] * len(sizes) if pads else sizes


def part_rows(columns: int, accelerator: str) -> int:
    """Number of tokens for which eager mode computes the loss at once."""
    return max(1, _PART_BYTES.get(accelerator, _PART_BYTES["cuda"]) // (_FLOAT * columns))


def chunk_bytes(
    *, tokens: int, chunk: int, columns: int, dim: int, width: int, accelerator: str, compiled: bool
) -> int:
    """Bytes that head and loss need in addition to the parameters, their gradients and the head's input.

    In eager mode the gradient of a chunk's logits overwrites the logits. Float32 copies exist for `part_rows` tokens at
    a time: log-probabilities, and the logits if these have 16 bits. Compiled code does not overwrite the logits. The
    gradient of the head's input has the size of the input.

    Args:
        tokens: number of tokens of one process in a microbatch.
        columns: number of the vocabulary's entries on this process.
    """
    chunks = width * min(chunk, tokens) * columns
    if compiled:
        chunks *= 2
    else:
        copies = 1 if width == _FLOAT else 2
        chunks += copies * _FLOAT * min(chunk, tokens, part_rows(columns, accelerator)) * columns
    return chunks + tokens * dim * width
