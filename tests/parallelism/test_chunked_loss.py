"""The head and the loss in chunks of tokens: values, gradients, and what exists at once."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlab.parallelism import IGNORE, ChunkedLoss, loss_sum
from titanlab.techniques.precision.product import PLAIN

SCALE = 0.37
# The sums of a chunk are rounded in another order.
BAR = {"rtol": 1e-5, "atol": 1e-6}


def given(*, bias=False, dtype=torch.float32, requires_grad=True):
    torch.manual_seed(0)
    head = nn.Linear(16, 101, bias=bias, dtype=dtype)
    hidden = torch.randn(3, 7, 16, dtype=dtype, requires_grad=requires_grad)
    labels = torch.randint(0, 101, (3, 7))
    labels[0, :3] = IGNORE
    return head, hidden, labels


def gradients(head, hidden):
    return [hidden.grad, *(parameter.grad for parameter in head.parameters())]


@pytest.mark.parametrize("tokens", [1, 4, 21, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("factor", [SCALE, 3])
def test_loss_and_gradients_are_those_of_whole_logits(tokens, bias, factor):
    """Also if the caller's backward pass has another factor than it has said."""
    head, hidden, labels = given(bias=bias)
    expected = loss_sum(head(hidden), labels)
    (expected * factor).backward()
    wanted = gradients(head, hidden)
    head, hidden, labels = given(bias=bias)
    loss = ChunkedLoss(head, tokens=tokens, scale=SCALE)
    found = loss(lambda: head(hidden), labels)
    (found * factor).backward()
    torch.testing.assert_close(found, expected, **BAR)
    torch.testing.assert_close(gradients(head, hidden), wanted, **BAR)


def test_a_gradient_of_the_weight_may_be_written_in_the_forward_pass():
    head, hidden, labels = given()
    for _ in range(2):
        (loss_sum(head(hidden), labels) * SCALE).backward()
    wanted = gradients(head, hidden)
    head, hidden, labels = given()
    loss = ChunkedLoss(head, tokens=4, scale=SCALE, writes_gradient=True)
    # As GPipe does: two forward passes, then two backward passes.
    losses = [loss(lambda: head(hidden), labels) for _ in range(2)]
    torch.testing.assert_close(head.weight.grad, wanted[1], **BAR)
    for each in losses:
        (each * SCALE).backward()
    torch.testing.assert_close(gradients(head, hidden), wanted, **BAR)


def test_a_cast_weight_does_not_wait_for_the_backward_pass():
    head, hidden, labels = given()
    casts = []

    def cast(weight):
        made = weight.clone()
        casts.append(weakref.ref(made))
        return made

    head.product = replace(PLAIN, for_forward=cast, for_inputs=cast)
    loss = ChunkedLoss(head, tokens=4, scale=SCALE)(lambda: head(hidden), labels)
    assert [made() for made in casts] == [None, None]
    (loss * SCALE).backward()


def test_without_a_loss_the_head_returns_logits():
    head, hidden, labels = given()
    wanted = head(hidden)
    loss = ChunkedLoss(head, tokens=4, scale=SCALE)
    assert torch.equal(head(hidden), wanted)
    with pytest.raises(ZeroDivisionError):
        loss(lambda: 1 / 0, labels)
    assert torch.equal(head(hidden), wanted)


def test_evaluation_computes_no_gradient():
    head, hidden, labels = given()
    expected = loss_sum(head(hidden), labels)
    with torch.no_grad():
        found = ChunkedLoss(head, tokens=4, scale=SCALE)(lambda: head(hidden), labels)
    torch.testing.assert_close(found, expected, **BAR)
    assert not found.requires_grad
    assert head.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_round_once_a_chunk(dtype):
    def found(tokens):
        head, hidden, labels = given(dtype=dtype)
        loss = ChunkedLoss(head, tokens=tokens, scale=SCALE)
        (loss(lambda: head(hidden), labels) * SCALE).backward()
        return [part.double() for part in gradients(head, hidden)]

    head, hidden, labels = given(dtype=dtype)
    (loss_sum(head(hidden), labels) * SCALE).backward()
    wanted = [part.double() for part in gradients(head, hidden)]
    step = torch.finfo(dtype).eps
    for tokens, roundings in ((21, 2), (4, 6)):
        for part, whole in zip(found(tokens), wanted, strict=True):
            assert torch.linalg.vector_norm(part - whole) <= roundings * step * torch.linalg.vector_norm(whole)


def test_all_labels_may_be_ignored():
    head, hidden, labels = given()
    loss = ChunkedLoss(head, tokens=4, scale=SCALE)(lambda: head(hidden), torch.full_like(labels, IGNORE))
    (loss * SCALE).backward()
    assert loss.item() == 0
    assert not any(part.any() for part in gradients(head, hidden))


class Largest(TorchDispatchMode):
    """The largest result of an operator, in elements."""

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.size = max(self.size, result.numel())
        return result


def test_logits_never_exist_whole():
    head, hidden, labels = given()
    loss = ChunkedLoss(head, tokens=4, scale=SCALE)
    with Largest() as largest:
        (loss(lambda: head(hidden), labels) * SCALE).backward()
    # The weight is larger than a chunk's logits here; whole logits would be 21 · 101.
    assert largest.size == max(101 * 16, 4 * 101)
