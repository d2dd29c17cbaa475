"""A mixture of experts is a loop over tokens and their experts; no token is dropped."""

import pytest
import torch
import torch.nn.functional as F

from titanlab.costs import RoutedExperts
from titanlab.techniques.model.mixture_of_experts import MixtureOfExperts, sort_by_expert


def model(count=5, active=2, dim=12, ffn_dim=20, seed=0):
    made = MixtureOfExperts(dim, ffn_dim, RoutedExperts(count=count, active=active))
    torch.manual_seed(seed)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return made


def oracle(made, hidden):
    """Token by token, as the papers write it."""
    outputs = []
    for token in hidden.flatten(0, 1):
        probabilities = F.softmax(made.router.weight @ token, dim=-1)
        best, experts = probabilities.topk(made.router.active)
        total = torch.zeros_like(token)
        for weight, expert in zip(best / best.sum(), experts.tolist(), strict=True):
            w1, w2, w3 = (getattr(made.experts, name).weight[expert] for name in ("w1", "w2", "w3"))
            total = total + weight * (w2 @ (F.silu(w1 @ token) * (w3 @ token)))
        outputs.append(total)
    return torch.stack(outputs).view(hidden.shape)


@pytest.mark.parametrize(("count", "active"), [(5, 2), (8, 2), (3, 3), (40, 4)])
def test_it_is_a_loop_over_tokens(count, active):
    made = model(count, active)
    hidden = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1), requires_grad=True)
    found = []
    for forward in (made, lambda x: oracle(made, x)):
        made.zero_grad()
        hidden.grad = None
        output = forward(hidden)
        output.square().sum().backward()
        found.append([output.detach(), hidden.grad, *(p.grad for p in made.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()


def test_an_expert_without_tokens_has_no_gradient():
    made = model(count=4, active=1)
    with torch.no_grad():
        made.router.weight.zero_()
        made.router.weight[2, 0] = 1.0
    hidden = torch.rand(1, 6, 12) + 0.1
    made(hidden).sum().backward()
    of_w1 = made.experts.w1.weight.grad.flatten(1).abs().sum(1)
    assert of_w1[2] > 0
    assert of_w1[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]


def test_rows_are_sorted_by_expert_and_find_back():
    experts = torch.tensor([[2, 0], [1, 2], [2, 1]])
    order, inverse, ends = sort_by_expert(experts, 4)
    assert experts.flatten()[order].tolist() == [0, 1, 1, 2, 2, 2]
    assert order[inverse].tolist() == list(range(6))
    assert ends.tolist() == [1, 3, 6, 6]
    assert ends.dtype == torch.int32


def test_the_router_computes_in_float32():
    """Two experts whose scores differ by less than bfloat16 can say."""
    made = model(count=2, active=1)
    with torch.no_grad():
        made.router.weight.fill_(1.0)
        made.router.weight[1, 0] += 1 / 64
    tokens = torch.full((1, 12), 100.0)
    for dtype in (torch.float32, torch.bfloat16):
        choice = made.to(dtype).router(tokens.to(dtype))
        assert choice.experts.tolist() == [[1]]
        assert choice.weights.dtype == torch.float32


def test_compiled_code_gives_the_same():
    made = model()
    hidden = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=False)
    for one, other in zip(*(_gradients(made, forward, hidden) for forward in (made, compiled)), strict=True):
        torch.testing.assert_close(one, other)


def _gradients(made, forward, hidden):
    made.zero_grad()
    forward(hidden).square().sum().backward()
    return [p.grad.clone() for p in made.parameters()]
