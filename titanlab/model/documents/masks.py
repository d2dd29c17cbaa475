"""The forms in which attention kernels take documents.

`starts` [batch, seq] int64 is the place in the sequence of the first token of each token's document. A row attends to
the keys from its start up to itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from titanlab.model.documents.packed import HostStarts

# Rows and keys of a block that FlexAttention computes or skips; torch's default.
_BLOCK = 128

Documents = Tensor | BlockMask


def prepared(starts: Tensor | HostStarts, kernel: str) -> Documents:
    """The form that all blocks of a model share, for a kernel by its name in a model's config."""
    if isinstance(starts, HostStarts):
        return starts.tensor
    return block_mask(starts) if starts.device.type == "cuda" and kernel == "auto" else starts


def visible(starts: Tensor) -> Tensor:
    """Whether a row attends to a key: bool [batch, 1, seq, seq]."""
    places = torch.arange(starts.shape[1], device=starts.device)
    return ((places <= places[:, None]) & (places >= starts.unsqueeze(-1))).unsqueeze(1)


def block_mask(starts: Tensor) -> BlockMask:
    """FlexAttention's form: which blocks of keys a block of rows skips, computes whole, or computes with a mask.

    `create_block_mask` would find them from the whole square. They follow from the starts of a block's first and last
    row, because starts ascend: no keys before the first row's start, and a mask up to the last row's start.
    """
    seq_len = starts.shape[1]
    count = -(-seq_len // _BLOCK)
    blocks = torch.arange(count, device=starts.device)
    last_rows = ((blocks + 1) * _BLOCK).clamp(max=seq_len) - 1
    first = starts[:, blocks * _BLOCK] // _BLOCK
    whole = torch.minimum(-(-starts[:, last_rows] // _BLOCK), blocks)
    if seq_len % _BLOCK:
        # The last block of rows is not full, and rows that do not exist see no keys.
        whole[:, -1] = count - 1
    # Masked: the blocks from `first` to `whole`, and the row block's own.
    masked_count, whole_count = whole - first + 1, blocks - whole
    masked = first.unsqueeze(-1) + blocks
    masked = torch.where(blocks == masked_count.unsqueeze(-1) - 1, blocks.unsqueeze(-1), masked)
    # Places after the counted ones are not read, but have to be numbers of blocks.
    masked, others = (x.clamp(max=count - 1) for x in (masked, whole.unsqueeze(-1) + blocks))

    def mask_mod(sequence: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key <= row) & (key >= starts[sequence, row])

    return BlockMask.from_kv_blocks(
        _table(masked_count),
        _table(masked),
        _table(whole_count),
        _table(others),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(seq_len, seq_len),
    )


def _table(numbers: Tensor) -> Tensor:
    """[batch, …] → int32 [batch, 1, …]: the same for all heads."""
    return numbers.to(torch.int32).unsqueeze(1).contiguous()


def flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """FlexAttention (arXiv 2412.05496), compiled on a GPU: its eager form computes all scores."""
    compiled = q.device.type == "cuda" and not torch.compiler.is_compiling()
    compute: Any = _compiled() if compiled else flex_attention
    output: Tensor = compute(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return output


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)
