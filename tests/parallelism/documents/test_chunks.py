"""Attention within documents over several ranks is each document's own attention, and sends what it sends without them."""

import pytest

from tests.model.test_documents import apart, starts_of
from tests.parallelism.test_context import FP32_ERROR, METHODS, attend, inputs, opened, own
from titanlab.parallelism import attention_kernels, context
from titanlab.parallelism.context import ContextAttention

# Chunks have 12 tokens with two ranks, 8 with three, 6 with four. Edges at chunks' edges and beside them; one token;
# a document as long as the sequence; documents over several chunks.
LENGTHS = [
    [48],
    [1] * 48,
    [12, 12, 12, 12],
    [6] * 8,
    [8, 16, 24],
    [11, 1, 13, 22, 1],
    [13, 11, 5, 19],
    [1, 46, 1],
    [47, 1],
]


def largest_error(module):
    """Of output, dq, dk, dv: the largest difference from each document by itself, as in test_context."""
    given = inputs(len(LENGTHS), 2, 16)
    expected = attend(lambda *qkv: apart(*qkv, LENGTHS), *given)
    starts = own(starts_of(LENGTHS))
    found = attend(lambda *qkv: module(*qkv, starts), *map(own, given))
    assert all(x.isfinite().all() for x in found)
    pairs = [(a, own(b)) for a, b in zip(found, expected, strict=True)]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


def fp32_errors():
    group = opened()
    return {method: largest_error(ContextAttention(method, group)) for method in METHODS}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_outputs_and_gradients_are_those_of_documents_alone(pool, ranks):
    for errors in pool.run(ranks, fp32_errors):
        assert max(errors.values()) <= FP32_ERROR, errors


def one_by_one_errors():
    """What kernels of a GPU do, with that of a CPU."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(context, "choose", lambda *_, **__: attention_kernels.CPU._replace(is_tiled=False))
        return fp32_errors()


def test_kernels_without_documents_compute_them_one_by_one(pool):
    for errors in pool.run(2, one_by_one_errors):
        assert max(errors.values()) <= FP32_ERROR, errors


def sent(starts):
    """Elements that this rank sends in a forward and a backward pass."""
    group, elements = opened(), []

    usual = context.transfer

    def told(going, *rest):
        elements.append(sum(x.numel() for x in going))
        return usual(going, *rest)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(context, "transfer", told)
        module = ContextAttention("ring", group)
        given = map(own, inputs(len(LENGTHS), 2, 16))
        attend((lambda *qkv: module(*qkv, own(starts))) if starts is not None else module, *given)
    return elements


def test_what_is_sent_does_not_depend_on_the_documents(pool):
    """Also where no document reaches from one chunk into another, so that no rank waits in vain."""
    plain, whole, apart = (
        pool.run(4, sent, starts) for starts in (None, starts_of(LENGTHS), starts_of([[6] * 8] * len(LENGTHS)))
    )
    assert plain == whole == apart
