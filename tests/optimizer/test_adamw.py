"""AdamW as the group builds it."""

import torch
from torch import nn

from titanlab.techniques.optimizer.optimizers_schema import AdamW


def test_matrices_decay_and_vectors_do_not():
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    optimizer = AdamW(lr=0.1, weight_decay=0.5).implementation().build(dict(model.named_parameters()))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        # Without a gradient, only decay moves a parameter: p ← p·(1 − lr·decay).
        expected = before[name] * (1 - 0.1 * 0.5) if p.ndim == 2 else before[name]
        torch.testing.assert_close(p.detach(), expected)


def test_a_model_without_vectors_has_one_group():
    optimizer = AdamW().implementation().build({"weight": nn.Parameter(torch.ones(2, 2))})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
