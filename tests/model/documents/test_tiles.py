"""Attention within documents is each document's own attention: results, gradients, FLOPs, and every kernel's form."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from titanlab.techniques.model.attention import InnerAttention
from titanlab.techniques.model.documents import document_tiling, tiled_attention, tiles
from titanlab.techniques.model.llama_schema import Llama

ROWS = 64
# Documents of one token; edges at tiles' edges; just before and after them; longer than a tile; as long as the
# sequence; and short ones between long ones.
CASES = [
    [[1] * 192],
    [[64, 64, 64], [32, 32, 64, 64]],
    [[63, 1, 65, 63], [1, 64, 64, 63]],
    [[150, 42]],
    [[192], [191, 1]],
    [[5, 7, 100, 1, 1, 40, 38], [30, 40, 20, 3, 99]],
]


def starts_of(lengths):
    """[sequences, seq] from the lengths of each sequence's documents."""
    rows = []
    for documents in lengths:
        ends = torch.tensor(documents).cumsum(0)
        rows.append(torch.repeat_interleave(ends - torch.tensor(documents), torch.tensor(documents)))
    return torch.stack(rows)


def inputs(lengths, kv_heads=2, dtype=torch.float32):
    torch.manual_seed(0)
    shape = len(lengths), sum(lengths[0])
    return [
        torch.randn(*shape, heads, 16, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]


def apart(q, k, v, lengths):
    """Each document by itself."""
    rows = []
    for row, documents in enumerate(lengths):
        pieces = zip(*(x[row : row + 1].split(documents, dim=2) for x in (q, k, v)), strict=True)
        shared = q.shape[1] != k.shape[1]
        rows.append(
            torch.cat([F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=shared) for each in pieces], 2)
        )
    return torch.cat(rows)


def computed(attend, leaves, gradient):
    output = attend(*leaves)
    return [output, *torch.autograd.grad(output, leaves, gradient.to(output.dtype))]


def largest_error(found, exact):
    """As a share of the largest value, or of 1: of documents of one token, gradients of queries and keys are zero."""
    pairs = zip(found, exact, strict=True)
    return max(((one.double() - other).abs().max() / other.abs().max().clamp(min=1)).item() for one, other in pairs)


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("kernel", ["auto", "flash", "math"])
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_documents_are_as_if_alone(lengths, kernel, dtype, bar):
    leaves = inputs(lengths, dtype=dtype)
    gradient = torch.randn(leaves[0].shape, dtype=torch.float64)
    exact = computed(
        lambda *qkv: apart(*qkv, lengths),
        [x.detach().double().requires_grad_() for x in leaves],
        gradient.to(dtype).double(),
    )
    found = computed(lambda *qkv: InnerAttention(kernel)(*qkv, starts_of(lengths)), leaves, gradient)
    assert largest_error(found, exact) < bar
    assert [x.dtype for x in found] == [dtype] * 4


def test_the_result_is_in_memory_as_torchs_own_is():
    leaves = inputs(CASES[-1], kv_heads=4)
    found, torchs = (
        computed(attend, leaves, torch.ones(leaves[0].shape))
        for attend in (
            lambda *qkv: InnerAttention()(*qkv, starts_of(CASES[-1])),
            lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True),
        )
    )
    assert [x.stride() for x in found] == [x.stride() for x in torchs]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.sampled_from([1, 2, 7, 64]))
def test_tiles_have_every_row_once_and_every_key_that_it_sees(documents, rows):
    starts = starts_of([documents])[0].tolist()
    cut = list(tiles(starts, rows))
    assert [row for tile in cut for row in range(tile.start, tile.end)] == list(range(len(starts)))
    assert all(tile.end - tile.start <= rows for tile in cut)
    for tile in cut:
        assert tile.first <= starts[tile.start]
        assert tile.shared == (len(set(starts[tile.start : tile.end])) > 1)
        # No keys of an earlier document, unless they are in the tile itself.
        assert tile.first == (tile.start if tile.shared else starts[tile.start])
    # The last tile that meets a key is the one that writes its gradients.
    for key in range(len(starts)):
        meeting = [tile for tile in cut if tile.first <= key < tile.end]
        assert [tile.last for tile in meeting] == [False] * (len(meeting) - 1) + [True]


def test_flops_are_those_of_the_whole_square():
    config = Llama(dim=64, layers=1, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64)
    (declared,) = (each for each in config.block_operations(batch=2, seq_len=192) if each.kind == "attention")
    leaves = inputs(CASES[-1])
    with FlopCounterMode(display=False) as counter:
        output = InnerAttention()(*leaves, starts_of(CASES[-1]))
    assert counter.get_total_flops() == declared.flops
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 5 * declared.flops // 2


def test_the_operator_is_what_it_says_without_data():
    leaves = inputs(CASES[-1])
    torch.library.opcheck(
        tiled_attention,
        (*leaves, starts_of(CASES[-1]), *document_tiling(leaves[0])),
        test_utils=("test_schema", "test_faketensor"),
    )


def within(attention, starts, *qkv):
    return attention(*qkv, starts)


@pytest.mark.full
def test_other_documents_need_no_other_compilation():
    torch._dynamo.reset()
    module = InnerAttention()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in (CASES[-1], [[192], [191, 1]], [[1] * 192, [192]]):
            leaves = inputs(lengths)
            gradient = torch.randn(leaves[0].shape)
            pair = (
                computed(functools.partial(within, each, starts_of(lengths)), leaves, gradient)
                for each in (compiled, module)
            )
            for one, other in zip(*pair, strict=True):
                assert torch.equal(one, other)
