"""What a run in 16 bits is used for: validated, sampled from, continued under another layout."""

import os
import shutil

import pytest
import torch

from tests import tiny
from titanlab.checkpoint import latest
from titanlab.costs import meter
from titanlab.data import source
from titanlab.data.schema import Files
from titanlab.distributed import ALONE, joined, open_world
from titanlab.prove import parity
from titanlab.techniques.precision.cast_schema import Bf16, Bf16Full, Fp16, Fp32
from titanlab.train import generate as sampling
from titanlab.train.generate import generate


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small corpus, and the tokenizer that was trained on it; the cache is the corpus's folder."""
    folder = tiny.corpus(tmp_path_factory.mktemp("text"))
    data = Files(files=str(folder / "*.jsonl"), vocab_size=320, validation_fraction=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITANLAB_CACHE", str(folder / "cache"))
        source.prepare(data, report=lambda line: None)
        yield data, source.tokenizer(data).file, str(folder / "cache")


def trained(cache, made, run):
    os.environ["TITANLAB_CACHE"] = cache
    return parity.trace(made, run, joined(os.environ) or ALONE).parameters


@pytest.mark.parametrize(
    ("precision", "at_rest"),
    [
        pytest.param(Fp16(fp32_parts=["head"]), torch.float32, marks=pytest.mark.full),
        pytest.param(Bf16(), torch.float32, marks=pytest.mark.full),
        (Bf16Full(), torch.bfloat16),
    ],
    ids=["fp16", "bf16", "bf16_full"],
)
def test_a_run_is_validated_and_sampled_from(pool, tmp_path, text, precision, at_rest):
    data, tokenizer, cache = text
    losses = {}
    for each in (Fp32(), precision):
        given = {"validate_every": 2, "validation_sequences": 12, "steps": 4, "vocab_size": 320, "rounding": "nearest"}
        made = tiny.recipe(tmp_path, name=each.kind, data=data, precision=each, shard=2, **given)
        run = tiny.begin(made)
        parameters = pool.run(2, trained, cache, made, run)[0]
        losses[each.kind] = [row[meter.VALIDATION_LOSS] for row in run.metrics("validation")]
    assert len(losses[precision.kind]) == 2
    # The loss of twelve sequences after two steps, and after four.
    assert losses[precision.kind] == pytest.approx(losses["fp32"], rel=2e-3)
    run.tokenizer.mkdir()
    shutil.copy(tokenizer, run.tokenizer)
    assert len("".join(generate(run.path, "ab", tokens=10, seed=1))) > 3
    with open_world(ALONE, accelerator="cpu", seed=0, deterministic=False) as world:
        model = sampling._load(made, latest(run.checkpoints), world.device)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == at_rest
        assert torch.equal(parameter, parameters[name])
