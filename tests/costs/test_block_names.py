"""Names of blocks, as the modules of a model have them."""

import torch

from tests import tiny
from titanlab.costs import BLOCKS, block_name, is_in_block


def test_the_modules_of_a_model_have_these_names(tmp_path):
    recipe = tiny.recipe(tmp_path, layers=11)
    with torch.device("meta"):
        model = recipe.model.implementation().build(seq_len=8)
    blocks = [block_name(number) for number in range(11)]
    assert [f"{BLOCKS}.{name}" for name, _ in model.get_submodule(BLOCKS).named_children()] == blocks
    inside = {name for name, _ in model.named_parameters() if is_in_block(name)}
    outside = {name for name, _ in model.named_parameters()} - inside
    assert {name.rpartition(".")[0] for name in outside} == {"tok_embeddings", "norm", "output"}
    assert {".".join(name.split(".")[:2]) for name in inside} == {*blocks}
    assert all(map(is_in_block, blocks))
    assert not is_in_block("layers_of_another.0")
