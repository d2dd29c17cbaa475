"""When the head and the loss are computed in chunks of tokens, and of how many. Torch-free."""

from __future__ import annotations

AUTO = "auto"
# The rule of `auto`, in bytes of logits in float32. A chunk of 512 MiB is 1,024 tokens of a vocabulary of 128,256: large
# enough for full matrix products, and few enough chunks that the weight's gradient is summed up seldom
# (benchmarks/results/loss_chunk.json).
LARGE_BYTES = 2**30
CHUNK_BYTES = 2**29
_FLOAT = 4


def automatic(*, tokens: int, columns: int) -> int:
    """Tokens of a chunk; 0: the logits are small enough to exist whole.

    Args:
        tokens: that one process has in a microbatch.
        columns: of the vocabulary that it has.
    """
    if tokens * columns * _FLOAT <= LARGE_BYTES:
        return 0
    return 1 << max(0, (CHUNK_BYTES // (columns * _FLOAT)).bit_length() - 1)


def chunk_of(tokens: int, chunk: int) -> int:
    """Tokens whose logits exist together, of those that one process has in a microbatch."""
    return min(tokens, chunk) if chunk else tokens
