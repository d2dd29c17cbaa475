"""Where documents begin reaches a model's attention on the device on which it is read."""

import torch
from torch.distributed.utils import _to_kwargs

from titanlab.techniques.model.documents import Packed, prepared


def arguments_in_fsdp(packed):
    """What FSDP2 hands on to its root module on a GPU; here the device is `meta`."""
    (moved,), _ = _to_kwargs(packed.arguments(slice(1, 3)), {}, torch.device("meta"), False)
    return moved


def test_starts_that_stay_on_the_host_are_not_moved():
    starts = torch.tensor([[0, 0, 2], [0, 1, 1], [0, 0, 0]])
    positions = torch.arange(3) - starts
    moved = arguments_in_fsdp(Packed(positions, starts, stays_on_host=True))
    assert moved[0].is_meta
    for kernel in ("auto", "flash"):
        assert torch.equal(prepared(moved[1], kernel), starts[1:])
    # Without context parallelism the device reads them.
    assert all(part.is_meta for part in arguments_in_fsdp(Packed(positions, starts)))


def test_padding_is_of_one_document_and_stays_where_it_is():
    starts = torch.tensor([[0, 0, 2]])
    padded = Packed(torch.arange(3) - starts, starts, stays_on_host=True).padded(2)
    assert padded.stays_on_host
    assert padded.starts.tolist() == [[0, 0, 2], [0, 0, 0], [0, 0, 0]]
    assert padded.positions.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
