"""Our logits are those of transformers, in both directions, to 1e-5 in fp32; and so are greedily generated tokens.

The difference is relative to the largest logit (5 to 6). What differs is the order in which sums are rounded, and
the angles, which transformers takes in fp32 and we in fp64.
"""

import pytest
import torch

from tests.weights.huggingface import made
from titanlab.cli import main
from titanlab.techniques.model.mixture_of_experts import Router
from titanlab.train import generate as sampling
from titanlab.train.weights import open_folder

BAR = 1e-5
# Longer than the 64 tokens before which nothing is scaled.
SEQ_LEN = 160


@pytest.fixture(scope="module", autouse=True)
def _deterministic():
    torch.manual_seed(0)


def theirs(path):
    """Their model of a folder, in fp32; imported here, as importing it takes seconds."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    # Every tensor was found, and none was left over.
    assert not any(info.values()), info
    return model.eval()


def ours(path):
    return sampling._filled(open_folder(path, "x"), SEQ_LEN, torch.float32, torch.device("cpu"))


def tokens():
    return torch.randint(0, 256, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def hold(path, theirs_of):
    wanted, found = theirs(theirs_of)(tokens()).logits, ours(path)(tokens())
    assert wanted.std() > 0.5
    assert (found - wanted).abs().max() / wanted.abs().max() < BAR
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def exported(tmp_path, path, *more):
    assert main(["export", str(path), "--into", str(tmp_path / "export"), *more]) == 0
    return tmp_path / "export"


FAMILIES = [
    pytest.param(name, marks=[] if name in ("llama 3.1", "qwen 3 moe") else [pytest.mark.full])
    for name in made.FAMILIES
]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_equal_in_both_directions(tmp_path, family):
    there = made.folder(tmp_path / "hub", made.FAMILIES[family], files=2)
    assert main(["import", str(there), "--into", str(tmp_path / "one")]) == 0
    hold(tmp_path / "one", there)
    # What we write is opened by them; theirs is opened by us as it is.
    hold(there, exported(tmp_path, tmp_path / "one", "--shard-size", "60KB"))


@pytest.mark.full
@pytest.mark.parametrize("family", made.FAMILIES)
def test_a_model_that_transformers_made_and_saved(tmp_path, family):
    """Their own config classes and files, with nothing of this test's idea of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**made.FAMILIES[family], "eos_token_id": 2}, initializer_range=0.15)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hub", max_shard_size="100KB")
    assert main(["import", str(tmp_path / "hub"), "--into", str(tmp_path / "one")]) == 0
    hold(tmp_path / "one", tmp_path / "hub")
    back = exported(tmp_path, tmp_path / "one")
    hold(tmp_path / "hub", back)
    assert made.equal(made.read(back), made.read(tmp_path / "hub"))


@pytest.mark.full
@pytest.mark.parametrize("family", made.FAMILIES)
def test_greedy_tokens_are_equal(tmp_path, family):
    there = made.folder(tmp_path / "hub", {**made.FAMILIES[family], "eos_token_id": None})
    assert main(["import", str(there), "--into", str(tmp_path / "one")]) == 0
    prompt = tokens()[:1, :8]
    wanted = theirs(exported(tmp_path, tmp_path / "one")).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=100,
        do_sample=False,
        temperature=None,
        pad_token_id=0,
    )
    model, ids = ours(tmp_path / "one"), prompt[0].tolist()
    for _ in range(100):
        ids.append(sampling._next(model, ids, 0, 0, torch.Generator(), 256))
    assert ids == wanted[0].tolist()
    assert len(set(ids[8:])) > 5


SHAPES = {
    "qwen 3 moe": ("qwen 3 moe", {}),
    "mixtral": ("mixtral", {}),
    "many experts": ("qwen 3 moe", {"num_experts": 48, "num_experts_per_tok": 6, "moe_intermediate_size": 24}),
    "all experts": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "hidden_size": 48}),
}
FULL = ("mixtral", "many experts", "all experts")


def choices(model, routers, chosen):
    """The experts of each token, [tokens, active], by block."""
    found = []
    hooks = [router.register_forward_hook(lambda _, __, output: found.append(chosen(output))) for router in routers]
    logits = model(tokens())
    for hook in hooks:
        hook.remove()
    return getattr(logits, "logits", logits), found


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in SHAPES]
)
@torch.no_grad()
def test_the_same_experts_are_chosen(tmp_path, shape):
    family, change = SHAPES[shape]
    there = made.folder(tmp_path / "hub", {**made.WITH_EXPERTS[family], **change})
    reference, model = theirs(there), ours(there)
    gates = [module for name, module in reference.named_modules() if name.endswith(".gate")]
    wanted, theirs_chosen = choices(reference, gates, lambda output: output[-1])
    found, chosen = choices(model, [m for m in model.modules() if isinstance(m, Router)], lambda output: output.experts)
    assert len(chosen) == len(theirs_chosen) == 3
    for one, other in zip(chosen, theirs_chosen, strict=True):
        assert torch.equal(one.sort(-1)[0], other.sort(-1)[0])
    assert (found - wanted).abs().max() / wanted.abs().max() < BAR
