"""The exchange of tokens gives what one process computes, also where a rank or an expert gets no token."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from titanlab.costs import RoutedExperts
from titanlab.parallelism import spread_experts
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.mixture_of_experts import MixtureOfExperts

EXPERTS = RoutedExperts(count=4, active=2)
# By expert, what its score is raised by: even; all tokens to rank 0; none to expert 1 and few to 3.
SKEWS = {"even": [0.0] * 4, "one rank": [9.0, 9.0, 0.0, 0.0], "an empty expert": [2.0, -50.0, 1.0, -1.0]}


def layer(skew):
    made = MixtureOfExperts(8, 12, EXPERTS)
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    with torch.no_grad():
        made.router.weight[:, 0] = torch.tensor(skew)
    return made


def inputs(tokens):
    hidden = torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(1))
    hidden[..., 0] = 1.0
    return hidden


def alone(skew, tokens):
    made, hidden = layer(skew), inputs(tokens).requires_grad_()
    output = made(hidden)
    output.square().sum().backward()
    return output.detach(), hidden.grad, {name: p.grad for name, p in made.named_parameters()}


def as_rank(skew, tokens):
    """Each rank has one of the two sequences, and half of the experts."""
    dist.init_process_group("gloo")
    made = layer(skew)
    spread_experts(made, init_device_mesh("cpu", (2,)))
    return computed(made, tokens)


def computed(made, tokens):
    hidden = inputs(tokens)[dist.get_rank()].unsqueeze(0).requires_grad_()
    output = made(hidden)
    output.square().sum().backward()
    gradients = {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for name, p in made.named_parameters()
    }
    return output.detach(), hidden.grad, gradients


def as_compiled_rank(skews, tokens, policy):
    """One layer, compiled, with the router of each skew in turn; and how often it has been compiled after each."""
    dist.init_process_group("gloo")
    counters.clear()
    made = layer(skews[0])
    spread_experts(made, init_device_mesh("cpu", (2,)))
    policy.implementation().apply({0: made})
    Compile(blocks=True, backend="aot_eager").implementation().compile_blocks([made])
    found, compilations = [], []
    for skew in skews:
        made.load_state_dict({"router.weight": layer(skew).router.weight.detach()}, strict=False)
        made.zero_grad()
        found.append(computed(made, tokens))
        compilations.append(counters["stats"]["unique_graphs"])
    return found, compilations


@pytest.mark.parametrize("skew", SKEWS)
def test_two_ranks_compute_as_one(pool, skew):
    tokens = 7
    gradients = check_equal(pool.run(2, as_rank, SKEWS[skew], tokens), SKEWS[skew], tokens)
    if skew != "even":
        assert gradients["experts.w1.weight"][1 if "empty" in skew else 2].abs().sum() == 0


@pytest.mark.parametrize(
    "policy",
    [NoCheckpointing(), pytest.param(FullCheckpointing(), marks=pytest.mark.full)],
    ids=lambda policy: policy.kind,
)
def test_counts_of_any_size_share_one_compilation(pool, policy):
    tokens = 7
    every = pool.run(2, as_compiled_rank, list(SKEWS.values()), tokens, policy)
    for step, skew in enumerate(SKEWS.values()):
        check_equal([found[step] for found, _ in every], skew, tokens)
    assert [compilations for _, compilations in every] == [[1] * len(SKEWS)] * 2


def check_equal(found, skew, tokens):
    """Compare two ranks with one process; returns the gradients of its parameters."""
    output, of_hidden, gradients = alone(skew, tokens)
    torch.testing.assert_close(torch.cat([each[0] for each in found]), output)
    torch.testing.assert_close(torch.cat([each[1] for each in found]), of_hidden)
    for name, gradient in gradients.items():
        own = [each[2][name] for each in found]
        # Experts get the gradients of all ranks' tokens; the router's are summed by data parallelism.
        torch.testing.assert_close(own[0] + own[1] if "router" in name else own[0], gradient)
    return gradients
