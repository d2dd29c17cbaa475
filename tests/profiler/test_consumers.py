"""At out-of-memory: the first line of the error names what this rank's memory holds, and what was under way."""

import re

import pytest
import torch
from torch import nn

from tests import tiny
from titanlab.records import OutcomeKind, from_exception
from titanlab.techniques.profiler.memory import (
    consumers,
    described,
    living,
    named_before_steps,
    named_consumers,
)

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.2 GiB is free. "
    "Of the allocated memory 8.00 MiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
)


CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12 (Cannot allocate memory)"  # fmt: skip


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2**18))

    def forward(self, error):
        raise error


@pytest.mark.parametrize(
    ("error", "begin", "end"),
    [
        (
            torch.OutOfMemoryError(CUDA),
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; this rank holds: activations and the rest 4 MiB"
            + ", optimizer state 2 MiB, parameters 1 MiB, gradients 1 MiB",
            "; in the forward of 1",
        ),
        (RuntimeError(CPU), "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator", "; in the forward of 1"),
    ],
)  # fmt: skip
def test_the_cause_names_what_the_memory_holds(error, begin, end):
    model = nn.Sequential(nn.Identity(), Fails())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()
    original = str(error)
    with pytest.raises(type(error)) as caught, named_consumers(model, optimizer):
        model(error)
    outcome = from_exception(caught.value)
    assert outcome.kind is OutcomeKind.OOM
    assert outcome.cause.startswith(begin)
    assert outcome.cause.endswith(end)
    assert original in str(caught.value)


def test_consumers_and_modules_of_other_errors():
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters())
    assert consumers(model, optimizer) == {"parameters": 64, "gradients": 0, "optimizer state": 0}
    assert "in the forward of" not in described(ValueError(), model, optimizer)
    assert described(MemoryError(), model, optimizer).startswith("out of memory; this rank holds: activations")
    with pytest.raises(ValueError, match=r"^unchanged$"), named_consumers(model, optimizer):
        raise ValueError("unchanged")


def test_living_tensors_are_told_apart_and_counted_once():
    before = living()
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    others = [torch.zeros(1 << 10), model.weight.data.view(-1), torch.empty(1 << 30, device="meta")]
    found = {name: size - before[name] for name, size in living().items()}
    weight = 256 * 256 * 4
    # The optimizer's count of steps has four bytes.
    assert found == {
        "parameters": weight,
        "gradients": weight,
        "optimizer state": 2 * weight + 4,
        "other tensors": 4096,
    }
    del others


@pytest.mark.parametrize("when", ["build", "load"])
def test_before_the_first_step_the_cause_names_what_the_memory_holds(tmp_path, monkeypatch, when):
    made = tiny.recipe(tmp_path, steps=2)
    run = tiny.begin(made)

    def fails(*given, **named):
        raise torch.OutOfMemoryError(CUDA.replace("8.00 MiB", "8.00 GiB"))

    if when == "build":
        monkeypatch.setattr(type(made.optimizer.implementation()), "build", fails)
    else:
        monkeypatch.setattr("titanlab.train.train.load_start", fails)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        tiny.as_rank(made, run)
    cause = from_exception(caught.value).cause
    start = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB; before its first step this rank holds: "
    assert cause.startswith(start)
    # Other tests' tensors in this process count too.
    assert re.match(r"the rest (8|7\.9\d) GiB, ", cause.removeprefix(start))
    assert re.search(r"parameters [\d.]+ MiB", cause)


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError("x"), True),
        (RuntimeError("not enough memory: you tried"), True),
        (RuntimeError("the disk is full"), False),
    ],
)
def test_only_want_of_memory_is_described(error, is_told):
    with pytest.raises(type(error)) as caught, named_before_steps():
        raise error
    assert ("before its first step this rank holds: " in str(caught.value)) is is_told
    # What is described already is not described again.
    before = str(caught.value)
    with pytest.raises(type(error)) as again, named_before_steps():
        raise caught.value
    assert (str(again.value) == before) is True
