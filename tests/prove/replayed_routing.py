"""Routing of one process, recorded and replayed in a layout, so that two scores that are almost equal change nothing.

Rounding moves scores. In 16 bits that changes the last expert of some tokens, and a token with another expert has another
output: a comparison of losses would measure luck. A layout that replays the experts of the reference computes every
weight, product and gradient itself; only the choice is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch

from titanlab.costs import AXES
from titanlab.distributed import ALONE, joined
from titanlab.parallelism import positions
from titanlab.prove import parity
from titanlab.techniques.model.mixture_of_experts import Router
from titanlab.train.totals import Balance

Record = dict[int, torch.Tensor]
"""By block, the experts of all tokens: [sequences of all steps, seq, active]."""
# More than any score, bias or difference of them.
_LARGE = 100.0


def recorded(made, run):
    """The trace of one process, and its record."""
    calls: dict[int, list[torch.Tensor]] = {}
    with _numbered_routers(), patch.object(Router, "choose", _recording(Router.choose, calls)):
        trace = parity.trace(made, run, ALONE)
    return trace, {layer: torch.cat(found).unflatten(0, (-1, made.training.seq_len)) for layer, found in calls.items()}


def replayed(made, run, record: Record):
    """The trace of a layout whose routers choose the recorded experts."""
    tokens = _Tokens(made, (joined(os.environ) or ALONE).rank)
    if made.compile.blocks:
        # What is computed again is in the block's graph, and reads the same bias.
        with _numbered_routers(lambda layer, number: _bias(tokens.of(record[layer], number), made)):
            return parity.trace(made, run, joined(os.environ) or ALONE)
    with _numbered_routers(), patch.object(Router, "choose", _replaying(Router.choose, record, tokens, made)):
        return parity.trace(made, run, joined(os.environ) or ALONE)


class _Tokens:
    """Which tokens a rank routes, among those of all steps."""

    def __init__(self, made, rank: int) -> None:
        layout = made.layout
        degrees = layout.degrees()
        place = dict(zip(AXES, np.unravel_index(rank, [degrees[axis] for axis in AXES]), strict=True))
        self._data, self._ranks = int(place["replicate"] * layout.shard + place["shard"]), layout.data
        self._microbatch = made.microbatch
        seq_len = made.training.seq_len
        own = torch.arange(seq_len)
        if layout.context > 1:
            own = positions(seq_len, ranks=layout.context, rank=int(place["context"]))
        self._positions = own
        # With experts divided, a rank of the tensor axis routes the share of a microbatch that it holds.
        self._shares, self._share = (layout.tensor, int(place["tensor"])) if layout.expert > 1 else (1, 0)

    def of(self, experts: torch.Tensor, number: int) -> torch.Tensor:
        """The recorded experts of a router's microbatch, counted over all steps: [tokens, active]."""
        local = range(number * self._microbatch, (number + 1) * self._microbatch)
        # Sample g of the global order belongs to data-parallel rank g % ranks.
        rows = torch.tensor([row * self._ranks + self._data for row in local])
        return experts[rows][:, self._positions].flatten(0, 1).chunk(self._shares)[self._share]


@contextmanager
def _numbered_routers(biases: Callable[[int, int], torch.Tensor] | None = None) -> Iterator[None]:
    """Routers know the number of their block.

    Args:
        biases: by block and number of the microbatch, a bias that the router gets before the block is called.
    """
    unpatched = Balance.__init__

    def init(balance, models, *given, **named):
        stages = list(models)
        unpatched(balance, stages, *given, **named)
        for layer, router in balance._routers.items():
            router.layer, router.calls = layer, {False: 0, True: 0}
        blocks = {
            int(layer): block for stage in stages for layer, block in stage.get_submodule("layers").named_children()
        }
        for layer, block in blocks.items() if biases is not None else ():
            block.register_forward_pre_hook(_set_bias(balance._routers[layer], biases))

    with patch.object(Balance, "__init__", init):
        yield


def _recording(unpatched, calls):
    def choose(router, tokens, weight):
        choice = unpatched(router, tokens, weight)
        if not _computes_again():
            calls.setdefault(router.layer, []).append(choice.experts)
        return choice

    return choose


def _computes_again() -> bool:
    """Whether this call is in a backward pass: checkpointing computes a block again."""
    return torch._C._current_graph_task_id() != -1


def _set_bias(router, biases):
    def hook(block, inputs):
        router.bias = biases(router.layer, router.calls[False])
        router.calls[False] += 1

    return hook


def _bias(experts: torch.Tensor, made) -> torch.Tensor:
    """Is added to the scores for the choice only; the first expert gets most, so that the order is kept too."""
    chosen = _LARGE * torch.arange(experts.shape[1], 0, -1.0).expand(experts.shape)
    return torch.zeros(experts.shape[0], made.model.account().experts.count).scatter(1, experts, chosen)


def _replaying(unpatched, record, tokens, made):
    def choose(router, given, weight):
        # Both take the microbatches in order.
        again = _computes_again()
        experts = tokens.of(record[router.layer], router.calls[again])
        router.calls[again] += 1
        before = router.bias
        router.bias = _bias(experts, made)
        choice = unpatched(router, given, weight)
        router.bias = before
        return choice

    return choose
