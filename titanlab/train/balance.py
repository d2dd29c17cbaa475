"""Counts, balances and records the load of experts, over all ranks and microbatches of a step.

Routers count in the backward pass (`titanlab.techniques.model.mixture_of_experts`). The step's only reduction also sums
the counts, so every rank knows the counts of all blocks and computes the same biases (arXiv 2408.15664).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlab.costs import BLOCKS, ModelAccount, RoutedExperts, block_name
from titanlab.errors import DamagedPosition
from titanlab.techniques.model.mixture_of_experts import Auxiliary, Router

# Rows in a run, besides the rows of its first and last step.
_MOST_ROWS = 20


class Load(NamedTuple):
    """The routing of a step, over all ranks.

    counts: by block and expert, the tokens that the expert has computed
    entropies: by block, the sum over tokens of the entropy of the router's probabilities, in nats
    active: experts of a token
    """

    counts: Sequence[Sequence[float]]
    entropies: Sequence[float]
    active: int

    @property
    def most(self) -> float:
        """The largest load of an expert relative to the mean of its block, over all blocks."""
        return max(max(block) * len(block) / max(sum(block), 1.0) for block in self.counts)

    @property
    def entropy(self) -> float:
        """Mean entropy of a token in a block."""
        tokens = sum(map(sum, self.counts)) / self.active
        return sum(self.entropies) / max(tokens, 1.0)


def routers_of(model: nn.Module) -> dict[int, Router]:
    """The routers of a model or a stage, by the number of their block."""
    return {
        int(layer): module
        for layer, block in model.get_submodule(BLOCKS).named_children()
        for module in block.modules()
        if isinstance(module, Router)
    }


def set_biases(model: nn.Module, biases: Mapping[str, Sequence[float]]) -> None:
    """Give routers the biases of a checkpoint, so that they choose as in training and evaluation.

    Args:
        biases: by block, as in `Balance.state`; empty: the routers have none.
    """
    for layer, router in routers_of(model).items() if biases else ():
        router.bias = torch.tensor(biases[block_name(layer)], dtype=torch.float32, device=router.weight.device)


class NoBalance:
    """A model without experts."""

    def begin(self) -> None:
        """Called before a step's first microbatch."""

    def sums(self) -> Tensor | None:
        """This rank's summands of a step's counts, [n] float64; None: there are none."""
        return None

    def learn(self, sums: Tensor) -> None:
        """Take the sums over all ranks."""

    def load(self, sums: Sequence[float]) -> Load | None:
        """The sums over all ranks as numbers."""
        return None

    def state(self) -> dict[str, list[float]]:
        """The state for a checkpoint, by block."""
        return {}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from a checkpoint's state; an empty state starts from the beginning."""


class Balance(NoBalance):
    """Counts and balances the experts of a model.

    Args:
        counts: whether this rank counts; only one of the ranks that route the same tokens counts.
        parts: ranks that route the same tokens.
        scale: factor of the loss before its backward.
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        account: ModelAccount,
        device: torch.device,
        *,
        counts: bool,
        parts: int,
        scale: float | Tensor,
        seq_len: int,
    ) -> None:
        assert account.experts is not None
        self._experts: RoutedExperts = account.experts
        self._counts, number = counts, self._experts.count
        # Biases, or the shares of the last step's tokens.
        self._values = torch.full((account.layers, number), self._initial, dtype=torch.float32, device=device)
        self._routers = {layer: router for model in models for layer, router in routers_of(model).items()}
        for layer, router in self._routers.items():
            router.tally = torch.zeros(number + 1, dtype=torch.float32, device=device, requires_grad=True)
            if self._experts.balance == "bias":
                router.bias = self._values[layer]
            if self._experts.balance.startswith("auxiliary"):
                router.auxiliary = Auxiliary(
                    shares=self._values[layer] if self._experts.balance == "auxiliary_batch" else None,
                    weight=self._experts.auxiliary_weight / parts,
                    scale=scale,
                    seq_len=seq_len,
                )

    @property
    def _initial(self) -> float:
        return 1 / self._experts.count if self._experts.balance == "auxiliary_batch" else 0.0

    def begin(self) -> None:
        for router in self._routers.values():
            assert router.tally is not None
            router.tally.grad = None

    def sums(self) -> Tensor:
        rows = torch.zeros(
            (self._values.shape[0], self._values.shape[1] + 1), dtype=torch.float64, device=self._values.device
        )
        for layer, router in self._routers.items():
            assert router.tally is not None
            if self._counts and router.tally.grad is not None:
                rows[layer] = router.tally.grad
        return rows.flatten()

    @torch.no_grad()
    def learn(self, sums: Tensor) -> None:
        counts = sums.view(self._values.shape[0], -1)[:, :-1]
        if self._experts.balance == "bias":
            missing = counts.mean(1, keepdim=True) - counts
            self._values.add_(missing.sign().float(), alpha=self._experts.bias_rate)
        elif self._experts.balance == "auxiliary_batch":
            self._values.copy_(counts / counts.sum(1, keepdim=True).clamp(min=1.0))

    def load(self, sums: Sequence[float]) -> Load:
        width = self._values.shape[1] + 1
        rows = [sums[start : start + width] for start in range(0, len(sums), width)]
        return Load([row[:-1] for row in rows], [row[-1] for row in rows], self._experts.active)

    def state(self) -> dict[str, list[float]]:
        if self._experts.balance not in ("bias", "auxiliary_batch"):
            return {}
        return {block_name(layer): values for layer, values in enumerate(self._values.tolist())}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        if not state or not self.state():
            self._values.fill_(self._initial)
            return
        for layer, values in enumerate(self._values):
            known = state.get(block_name(layer), ())
            if len(known) != len(values):
                rule = f"has {len(known)} numbers, and block {layer} has {len(values)} experts"
                cure = "choose the model that it was trained as"
                raise DamagedPosition(f"routing.{block_name(layer)}", list(known), rule, cure)
            values.copy_(torch.tensor(known, dtype=torch.float32))


class ExpertRows:
    """Sums the counts of tokens over steps, and writes them from time to time: a row of a large model has 80 KB.

    A row has `counts`, tokens by block and expert over all ranks and microbatches, and `steps`, the number of steps in
    these sums. The steps of rows depend only on the length of the run, so that runs with different layouts can be
    compared.
    """

    def __init__(self, steps: int, write: Callable[[int, Mapping[str, Any]], None]) -> None:
        self._last, self._every = steps, -(-steps // _MOST_ROWS)
        self._write = write
        self._steps = 0
        self._counts = torch.zeros(0, 0, dtype=torch.float64)

    def after_step(self, step: int, load: Load) -> None:
        """Add the counts of a step."""
        counts = torch.tensor(load.counts, dtype=torch.float64)
        self._counts = counts if not self._steps else self._counts + counts
        self._steps += 1
        if step % self._every == 0 or step in (1, self._last):
            self.at_end(step)

    def go_back(self) -> None:
        """Forget the counts of steps that are done again."""
        self._steps = 0

    def at_end(self, step: int) -> None:
        """Write what was counted since the last row."""
        if self._steps:
            self._write(step, {"steps": self._steps, "counts": self._counts.round().long().tolist()})
        self._steps = 0
