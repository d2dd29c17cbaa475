"""The forms in which kernels take documents say what the starts say."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.model.documents.test_tiles import CASES, apart, inputs, starts_of
from titanlab.techniques.model.documents import block_mask, flex, visible


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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_attention_within_documents():
    lengths = CASES[-1]
    leaves = [x.detach() for x in inputs(lengths)]
    torch.testing.assert_close(flex(*leaves, block_mask(starts_of(lengths))), apart(*leaves, lengths))


def test_rows_see_their_document_up_to_themselves():
    assert visible(starts_of([[2, 1, 3]]))[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1, 1],
    ]
