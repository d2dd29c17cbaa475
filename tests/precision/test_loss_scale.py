"""The scale of the loss by itself: when it grows, when it shrinks, and how an optimizer's step is left out."""

import math

import pytest
import torch
from torch import nn

from titanlab.techniques.precision.cast_schema import LARGEST, Fp16

CPU = torch.device("cpu")


class Step:
    """An optimizer that counts."""

    def __init__(self):
        self.taken = 0

    def step(self):
        self.taken += 1


def scale_of(**given):
    return Fp16(**{"init_scale": 8.0, "growth_interval": 3, **given}).implementation().loss_scale(CPU)


def told(scale, *norms):
    """What steps with these gradient norms tell: scale, skipped, tolerated; and how many updates there were."""
    optimizer, steps = Step(), []
    for norm in norms:
        steps.append(tuple(scale.judge(torch.tensor(norm, dtype=torch.float64)).tolist()))
        scale.step(optimizer)
    return steps, optimizer.taken


INF = math.inf
# Fields, norms of gradients; by step the scale, the number of skipped steps, and whether the run may continue.
STEPS = [
    # It grows after three good steps in a row; a skipped step starts the count anew.
    ({}, [1.0] * 7, [(scale, 0, 1) for scale in (8, 8, 8, 16, 16, 16, 32)]),
    ({"growth_factor": 4.0}, [1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0], [(8, 0, 1), (8, 0, 1), (8, 1, 1), (4, 1, 1), (4, 1, 1), (4, 1, 1), (16, 1, 1)]),
    # It shrinks after an overflow.
    *(({"backoff_factor": 0.25}, [1.0, bad, 1.0, bad], [(8, 0, 1), (8, 1, 1), (2, 1, 1), (2, 2, 1)]) for bad in (INF, math.nan, -INF)),
    # At the smallest scale an overflow is the end, and so are too many skips in a row.
    ({"min_scale": 3.0}, [INF] * 4, [(8, 1, 1), (4, 2, 1), (3, 3, 0), (3, 4, 0)]),
    ({"max_skips": 2, "min_scale": 2**-6}, [INF, 1.0, INF, INF, 1.0, INF], [(8, 1, 1), (4, 1, 1), (4, 2, 1), (2, 3, 0), (1, 3, 1), (1, 4, 1)]),
    # A constant scale stays.
    ({"dynamic": False, "max_skips": 3, "min_scale": 8.0, "growth_interval": 1}, [1.0, INF, INF, INF], [(8, 0, 1), (8, 1, 1), (8, 2, 1), (8, 3, 0)]),
    # It does not grow out of float32.
    ({"init_scale": LARGEST, "growth_interval": 1}, [1.0] * 3, [(LARGEST, 0, 1)] * 3),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "norms", "steps"), STEPS)
def test_when_it_grows_and_shrinks_and_when_it_is_the_end(fields, norms, steps):
    found, taken = told(scale_of(**fields), *norms)
    assert found == steps
    # A step with an overflow updates nothing.
    assert taken == sum(map(math.isfinite, norms))


def test_a_state_goes_on_where_it_was():
    norms = [1.0, 1.0, math.inf, 1.0, 1.0, math.inf, math.inf, 1.0]
    whole, _ = told(scale_of(max_skips=3), *norms)
    for stop in range(len(norms) + 1):
        first, second = scale_of(max_skips=3), scale_of(max_skips=3)
        product = second.multiplier(2.0)
        before, _ = told(first, *norms[:stop])
        second.restore(first.state())
        assert product.item() == 2.0 * first.state()["scale"]
        after, _ = told(second, *norms[stop:])
        assert before + after == whole
    # A checkpoint of a precision without a scale.
    for state in ({}, {"bad_row": 0, "bad_skipped": 1}):
        fresh = scale_of()
        fresh.restore(state)
        assert fresh.state() == scale_of().state()


OPTIMIZERS = {
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.3, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_any_optimizer_can_be_kept_from_a_step(kind):
    def trained(bad):
        torch.manual_seed(0)
        layer = nn.Linear(5, 3)
        optimizer, scale = OPTIMIZERS[kind](layer.parameters()), scale_of()
        for step, inputs in enumerate(torch.randn(6, 4, 5)):
            if step in (0, 3) and not bad:
                continue
            layer(inputs).square().sum().backward()
            norm = torch.tensor(1.0)
            if step in (0, 3):
                # Nothing of it arrives anywhere.
                for parameter in layer.parameters():
                    parameter.grad.fill_(math.inf)
                norm = torch.tensor(math.inf)
            scale.judge(norm)
            before = [parameter.clone() for parameter in layer.parameters()]
            scale.step(optimizer)
            moved = [not torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True)]
            assert moved == [step not in (0, 3)] * 2
            optimizer.zero_grad()
        assert not hasattr(optimizer, "found_inf")
        return list(layer.parameters()) + [each for s in optimizer.state.values() for each in s.values()]

    # As if the bad steps had not been: the counts by which Adam corrects its averages, too.
    for with_skips, without in zip(trained(bad=True), trained(bad=False), strict=True):
        assert torch.equal(torch.as_tensor(with_skips), torch.as_tensor(without))


def test_nobody_waits_for_the_device(monkeypatch):
    """With a fused optimizer no number is read from a tensor between the norm and the end of the update."""
    layer = nn.Linear(5, 3)
    optimizer, scale = OPTIMIZERS["fused adamw"](layer.parameters()), scale_of()
    product = scale.multiplier(2.0)

    def asked(*_):
        raise AssertionError("a number was asked for")

    for norm in (torch.tensor(1.0), torch.tensor(math.inf)):
        (layer(torch.ones(2, 5)).sum() * product).backward()
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, asked)
            scale.judge(norm)
            scale.step(optimizer)
    assert scale.state() == {"scale": 4.0, "good": 0, "row": 1, "skipped": 1}
