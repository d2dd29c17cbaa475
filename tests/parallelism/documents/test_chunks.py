"""Attention within documents over several ranks is each document's own attention, and sends what it sends without them."""

import itertools

import pytest
import torch

from tests.model.documents.test_tiles import apart, starts_of
from tests.parallelism.test_context import FP32_ERROR, METHODS, SEQ, attend, inputs, opened, own
from titanlab.parallelism import attention_kernels, context, positions
from titanlab.parallelism import exchanges as ring
from titanlab.parallelism import head_tail as document_chunks
from titanlab.parallelism.context import ContextAttention
from titanlab.parallelism.head_tail import DocumentChunks, KeysAndValues, Rectangle

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_documents_alone(pool, ranks):
    for errors in pool.run(ranks, fp32_errors):
        assert max(errors.values()) <= FP32_ERROR, errors


class OneByOne(attention_kernels.Cpu):
    """What kernels of a GPU do, with that of a CPU."""

    documents_forward = attention_kernels.AttentionKernel.documents_forward
    documents_backward = attention_kernels.AttentionKernel.documents_backward


def one_by_one_errors():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(context, "choose", lambda *_, **__: OneByOne())
        return fp32_errors()


def test_kernels_without_documents_compute_them_one_by_one(pool):
    for errors in pool.run(2, one_by_one_errors):
        assert max(errors.values()) <= FP32_ERROR, errors


def planted(monkeypatch, name):
    if name == "keys of the document before":
        right = DocumentChunks.rectangles
        monkeypatch.setattr(
            DocumentChunks,
            "rectangles",
            lambda self, block: (
                each._replace(keys=tuple(slice(max(0, keys.start - 1), keys.stop) for keys in each.keys))
                for each in right(self, block)
            ),
        )
    elif name == "a row too many":
        right = DocumentChunks.rectangles
        monkeypatch.setattr(
            DocumentChunks,
            "rectangles",
            lambda self, block: (
                each._replace(rows=slice(each.rows.start, each.rows.stop + 1)) for each in right(self, block)
            ),
        )
    elif name == "the chunks of another owner":
        monkeypatch.setattr(ring, "owned", lambda rank, ranks: (ranks - 1 - rank, ranks + rank))
    elif name == "chunks begin like sequences":
        right = DocumentChunks.__init__

        def begin(self, starts, **place):
            right(self, starts, **place)
            self.inner = self.inner * 0

        monkeypatch.setattr(DocumentChunks, "__init__", begin)
    elif name == "gradients of a block's keys are dropped":
        monkeypatch.setattr(Rectangle, "add_to_keys", lambda self, part, into: None)
    elif name == "a part replaces what was there":
        monkeypatch.setattr(document_chunks, "merge", lambda out, lse, part, part_lse: out.copy_(part))


FAULTS = (
    "keys of the document before",
    "a row too many",
    "the chunks of another owner",
    "chunks begin like sequences",
    "gradients of a block's keys are dropped",
    "a part replaces what was there",
)


def faulty():
    """The error with each fault; of shapes that do not fit, infinity."""
    group, errors = opened(), {}
    for name in FAULTS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            planted(monkeypatch, name)
            errors[name] = largest_error(ContextAttention("ring", group))
    return errors


def test_a_planted_fault_is_found(pool):
    found = pool.run(2, faulty)
    for name in FAULTS:
        assert max(errors[name] for errors in found) > 1000 * FP32_ERROR, name


def sent(starts):
    """Elements that this rank sends in a forward and a backward pass."""
    group, elements = opened(), []

    class Told(ring.Transfer):
        def __init__(self, going, *rest):
            elements.append(sum(x.numel() for x in going))
            super().__init__(going, *rest)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ring, "Transfer", Told)
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


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rectangles_are_what_a_mask_would_leave(ranks):
    """Every pair of a row and a key of other chunks once, if and only if they are of one document, in causal order."""
    size = SEQ // (2 * ranks)
    starts = starts_of(LENGTHS)
    places = torch.arange(SEQ)
    visible = (places <= places[:, None]) & (places >= starts.unsqueeze(-1))
    visible &= (places // size) != (places // size)[:, None]
    counted = torch.zeros_like(visible, dtype=torch.int64)
    for rank in range(ranks):
        rows = positions(SEQ, ranks=ranks, rank=rank)
        chunks = DocumentChunks(starts[:, rows], rank=rank, ranks=ranks)
        for number in range(2 * ranks):
            keys = torch.arange(number * size, (number + 1) * size)
            block = KeysAndValues(keys[None], keys[None], later=False, chunks=(number,))
            for each in chunks.rectangles(block):
                for row, part in itertools.product(rows[each.rows].tolist(), each.keys):
                    counted[each.sequences, row, keys[part]] += 1
    assert torch.equal(counted, visible.long())
