"""Our routers choose the experts that those of transformers choose, for several random shapes; logits to 1e-5."""

import pytest
import torch

from tests.weights.huggingface import made
from tests.weights.huggingface.test_logits import BAR, ours, theirs, tokens
from titanlab.techniques.model.mixture_of_experts import Router

# Beside the shapes of `made`: many experts, all of them active, another width.
SHAPES = {
    "qwen 3 moe": ("qwen 3 moe", {}),
    "mixtral": ("mixtral", {}),
    "many experts": ("qwen 3 moe", {"num_experts": 48, "num_experts_per_tok": 6, "moe_intermediate_size": 24}),
    "all experts": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "hidden_size": 48}),
}
FULL = ("many experts", "all experts")


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
