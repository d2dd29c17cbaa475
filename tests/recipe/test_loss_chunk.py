"""Chunks of the loss in a recipe: the number that it has, and what is refused."""

import dataclasses

import pytest

from tests import tiny
from titanlab.errors import ConfigError
from titanlab.recipe import check
from titanlab.recipe.recipe import needs_whole_logits
from titanlab.records import identify
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.precision.float8_schema import Mxfp8


def large(folder, **given):
    """A recipe with 1.5 GiB of logits: 4,096 tokens and a vocabulary of 100,000."""
    model = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, vocab_size=100_000)
    data = tiny.Synthetic(vocab_size=100_000)
    return tiny.recipe(folder, model=model, data=data, global_batch=8, seq_len=512, **given)


def hash_of(made):
    return identify(made, data="tiny", hardware="cpu").sha256


def test_a_resolved_recipe_has_the_number(tmp_path):
    assert large(tmp_path).training.loss_chunk == 1024
    # Half of the tokens, or half of the columns, are less than 1 GiB.
    assert large(tmp_path, context=2).training.loss_chunk == 0
    assert large(tmp_path, tensor=2).training.loss_chunk == 0
    assert large(tmp_path, microbatch=4).training.loss_chunk == 0
    assert large(tmp_path, loss_chunk=0).training.loss_chunk == 0
    assert large(tmp_path, loss_chunk=100).training.loss_chunk == 100
    assert tiny.recipe(tmp_path).training.loss_chunk == 0


def test_only_runs_with_chunks_have_other_names(tmp_path):
    small = tiny.recipe(tmp_path)
    assert (
        hash_of(small)
        == hash_of(tiny.recipe(tmp_path, loss_chunk=0))
        == hash_of(tiny.recipe(tmp_path, loss_chunk=None))
    )
    assert "loss_chunk" not in str(identify(small, data="tiny", hardware="cpu").content)
    assert (
        hash_of(large(tmp_path)) == hash_of(large(tmp_path, loss_chunk=1024)) != hash_of(large(tmp_path, loss_chunk=0))
    )


class Headless(Llama):
    """A model from elsewhere whose account does not name the head."""

    def account(self):
        return dataclasses.replace(super().account(), head="")


def test_a_model_without_a_named_head_has_whole_logits(tmp_path):
    made = large(tmp_path, loss_chunk=100)
    model = Headless(**{field.name: getattr(made.model, field.name) for field in dataclasses.fields(Llama)})
    made = dataclasses.replace(made, model=model)
    assert dataclasses.replace(made, training=dataclasses.replace(made.training, loss_chunk=-1)).loss_chunk == 0
    with pytest.raises(ConfigError, match="loss_chunk=100: the model does not name its head"):
        check(made)


def test_whole_logits_that_something_else_needs(tmp_path):
    with pytest.raises(ConfigError, match="loss_chunk=64: loss_parallel=false gathers whole logits"):
        tiny.recipe(tmp_path, tensor=2, loss_parallel=False, loss_chunk=64)
    assert tiny.recipe(tmp_path, tensor=2, loss_parallel=False).loss_chunk == 0
    made = dataclasses.replace(tiny.recipe(tmp_path, loss_chunk=64), precision=Mxfp8(skip=["wk"]))
    assert "computes both of its gradients at once" in needs_whole_logits(made)[0]
    assert needs_whole_logits(dataclasses.replace(made, precision=Mxfp8())) is None
