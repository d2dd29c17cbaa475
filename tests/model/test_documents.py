"""Attention in tiles and within documents is each document's own attention: results, gradients, FLOPs, kernels' forms."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.utils import _to_kwargs
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

from titanlab.techniques.model.attention import (
    ROWS_OF_TILE,
    InnerAttention,
    Packed,
    block_mask,
    flex,
    prepared,
    tiled_attention,
    tiles,
    tiles_are_faster,
    visible,
)
from titanlab.techniques.model.llama_schema import Llama

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
F32, B16 = torch.float32, torch.bfloat16


def starts_of(lengths):
    """[sequences, seq] from the lengths of each sequence's documents."""
    rows = []
    for documents in lengths:
        ends = torch.tensor(documents).cumsum(0)
        rows.append(torch.repeat_interleave(ends - torch.tensor(documents), torch.tensor(documents)))
    return torch.stack(rows)


def inputs(lengths, kv_heads=2, dtype=F32, head_dim=16):
    torch.manual_seed(0)
    shape = len(lengths), sum(lengths[0])
    return [
        torch.randn(*shape, heads, head_dim, dtype=dtype).transpose(1, 2).requires_grad_()
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


def found_and_exact(attend, lengths, **given):
    """Output and gradients of a function, and those of each document by itself in 64 bits."""
    leaves = inputs(lengths, **given)
    gradient = torch.randn(leaves[0].shape).to(leaves[0].dtype)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found = computed(attend, leaves, gradient)
    assert [x.dtype for x in found] == [gradient.dtype] * 4
    return found, computed(lambda *qkv: apart(*qkv, lengths), exact, gradient.double())


@pytest.mark.parametrize("lengths", CASES)
@pytest.mark.parametrize("kernel", ["auto", "flash", "math"])
@pytest.mark.parametrize(("dtype", "bar"), [(F32, 2e-6), (B16, 1e-2)])
def test_documents_are_as_if_alone(lengths, kernel, dtype, bar):
    module, starts = InnerAttention(kernel), starts_of(lengths)
    assert largest_error(*found_and_exact(lambda *qkv: module(*qkv, starts), lengths, dtype=dtype)) < bar


def whole(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


# One tile, whole tiles, and a last tile that is not full, of one row too; heads that are shared and not; documents.
@pytest.mark.parametrize(
    ("lengths", "kv_heads"), [([[64]] * 2, 2), ([[192]] * 2, 1), ([[129]] * 2, 4), ([[150]] * 2, 2), (CASES[-1], 4)]
)
@pytest.mark.parametrize(("dtype", "bar"), [(F32, 1e-6), (B16, 3e-3)], ids=str)
def test_tiles_are_the_whole(lengths, kv_heads, dtype, bar):
    starts, given = starts_of(lengths) if len(lengths[0]) > 1 else None, {"kv_heads": kv_heads, "dtype": dtype}
    found, exact = found_and_exact(lambda *qkv: tiled_attention(*qkv, starts, 64)[0], lengths, **given)
    assert max((one.double() - other).norm() / other.norm() for one, other in zip(found, exact, strict=True)) < bar
    # The results are in memory as torch's own.
    torchs, _ = found_and_exact(whole, lengths, **given)
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


@pytest.mark.parametrize("dtype", [F32, B16])
def test_only_short_sequences_on_a_cpu_are_cut(dtype):
    def chosen(seq_len, head_dim=16):
        return tiles_are_faster(*inputs([[seq_len]], head_dim=head_dim, dtype=dtype))

    assert [chosen(64), chosen(2048), chosen(512, head_dim=256)] == [False] * 3
    assert [chosen(128), chosen(512)] == [True] * 2
    q, k, v = inputs([[512]], dtype=dtype)
    assert not tiles_are_faster(*(x.to("meta") for x in (q, k, v)))
    # Other kinds of attention than of a sequence with itself.
    assert not tiles_are_faster(q[:, :, :256], k, v)
    assert not tiles_are_faster(q.double(), k.double(), v.double())


def test_the_module_cuts_only_if_the_kernel_is_not_named():
    names = [InnerAttention(kernel)(*inputs([[192]])).grad_fn.name() for kernel in ("auto", "flash")]
    assert ["tiled_attention" in name for name in names] == [True, False]


@pytest.mark.parametrize("lengths", [[[192]] * 2, CASES[-1]], ids=["whole", "documents"])
def test_flops_are_those_of_the_whole_square(lengths):
    config = Llama(dim=64, layers=1, heads=4, kv_heads=2, ffn_dim=64, vocab_size=64)
    (declared,) = (each for each in config.block_operations(batch=2, seq_len=192) if each.kind == "attention")
    with FlopCounterMode(display=False) as counter:
        output = InnerAttention()(*inputs(lengths), starts_of(lengths) if lengths == CASES[-1] else None)
    assert counter.get_total_flops() == declared.flops
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    # As torch counts its own kernels: five products instead of two.
    assert counter.get_total_flops() == 5 * declared.flops // 2


@pytest.mark.parametrize("starts", [None, starts_of(CASES[-1])], ids=["whole", "documents"])
def test_the_operator_is_what_it_says_without_data(starts):
    leaves = inputs(CASES[-1])
    torch.library.opcheck(
        tiled_attention,
        (*leaves, starts, ROWS_OF_TILE),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.full
def test_compilers_see_one_operator_for_any_documents():
    torch._dynamo.reset()
    module = InnerAttention()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    for lengths in (None, CASES[-1], [[192], [191, 1]], [[1] * 192, [192]]):
        leaves = inputs(lengths or CASES[-1])
        starts = () if lengths is None else (starts_of(lengths),)
        gradient = torch.randn(leaves[0].shape)
        with torch._dynamo.config.patch(error_on_recompile=lengths not in (None, CASES[-1])):
            found, eager = (
                computed(lambda *qkv, each=each, starts=starts: each(*qkv, *starts), leaves, gradient)
                for each in (compiled, module)
            )
        assert all(map(torch.equal, found, eager))


@pytest.mark.parametrize("seq_len", [40, 128, 300, 512])
def test_flex_attention_gets_the_blocks_that_torch_would_find(seq_len):
    torch.manual_seed(seq_len)
    for mean in (1, 5, 100, 1000):
        first = torch.rand(3, seq_len) < 1 / mean
        first[:, 0] = True
        starts = torch.where(first, torch.arange(seq_len), 0).cummax(1).values
        ours = block_mask(starts)
        theirs = create_block_mask(ours.mask_mod, 3, None, seq_len, seq_len, device="cpu")
        for kind in ("kv", "full_kv", "q", "full_q"):
            counts = getattr(ours, f"{kind}_num_blocks")
            assert torch.equal(counts, getattr(theirs, f"{kind}_num_blocks"))
            tables = [getattr(mask, f"{kind}_indices")[:, 0] for mask in (ours, theirs)]
            for row, own in enumerate(counts[:, 0].tolist()):
                for block, count in enumerate(own):
                    one, other = (sorted(table[row, block, :count].tolist()) for table in tables)
                    assert one == other


# `make test` holds its blocks to torch's, above.
@pytest.mark.full
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_attention_within_documents():
    lengths = CASES[-1]
    leaves = [x.detach() for x in inputs(lengths)]
    torch.testing.assert_close(flex(*leaves, block_mask(starts_of(lengths))), apart(*leaves, lengths))


def test_rows_see_their_document_up_to_themselves():
    rows = ["100000", "110000", "001000", "000100", "000110", "000111"]
    assert visible(starts_of([[2, 1, 3]]))[0, 0].int().tolist() == [list(map(int, row)) for row in rows]


def test_starts_that_stay_on_the_host_are_not_moved():
    """By FSDP2, which hands arguments on to its root module on a GPU; here the device is `meta`."""
    starts = torch.tensor([[0, 0, 2], [0, 1, 1], [0, 0, 0]])
    positions = torch.arange(3) - starts

    def moved(packed):
        return _to_kwargs(packed.arguments(slice(1, 3)), {}, torch.device("meta"), False)[0][0]

    on_host = moved(Packed(positions, starts, stays_on_host=True))
    assert on_host[0].is_meta
    for kernel in ("auto", "flash"):
        assert torch.equal(prepared(on_host[1], kernel), starts[1:])
    # Without context parallelism the device reads them.
    assert all(part.is_meta for part in moved(Packed(positions, starts)))


def test_padding_is_of_one_document_and_stays_where_it_is():
    starts = torch.tensor([[0, 0, 2]])
    padded = Packed(torch.arange(3) - starts, starts, stays_on_host=True).padded(2)
    assert padded.stays_on_host
    assert padded.starts.tolist() == [[0, 0, 2], [0, 0, 0], [0, 0, 0]]
    assert padded.positions.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
