"""The rules of a dense Qwen3's config, and what it changes in a Llama."""

import pytest
import torch

from tests.model.published import load
from titanlab.errors import ConfigError
from titanlab.techniques.model.llama import LlamaModel


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"head_dim": 0}, "model.head_dim=0: must be an even number of at least 2: heads are turned in pairs; try 128"),
        ({"head_dim": 7}, "model.head_dim=7: must be an even number of at least 2"),
        ({"kv_heads": 3}, "model.kv_heads=3: must divide 4 query heads; try 2 or 4"),
        ({"heads": 0}, "model.heads=0: must be at least 1; try 8"),
    ],
)
def test_a_broken_rule_is_one_line(change, line):
    with pytest.raises(ConfigError) as refused:
        load("qwen3_debug", **change)
    assert line in str(refused.value)


def test_heads_need_not_divide_the_stream():
    assert load("qwen3_debug", heads=6, kv_heads=3, head_dim=10).attention_dim == 60


def test_queries_and_keys_have_unit_mean_square_in_each_head():
    """Whatever the size of the stream, because each head is normalised before it is rotated."""
    model = LlamaModel(load("qwen3_debug", layers=1), seq_len=8)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
    seen = []
    model.layers["0"].attention.inner.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[:2]))
    model(torch.arange(8)[None])
    for heads in seen:
        torch.testing.assert_close(heads.square().mean(-1), torch.ones(heads.shape[:-1]), rtol=1e-3, atol=0)
