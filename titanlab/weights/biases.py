"""Biases of routers, which are no parameters: a checkpoint has them beside its tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from titanlab.costs.account import block_name
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig

Biases = Mapping[str, Sequence[float]]
"""By block (`layers.0`, …), the number that is added to each expert's probability for the choice."""


def biases_of(model: ModelConfig, routing: Biases, key: str, value: object) -> Biases:
    """The biases in the state of a balance; empty: the model's routers have none.

    Args:
        model: that the state was saved with. Of other balances than `bias` the state has no biases.
        key, value: where the state is from, for the error.

    Raises:
        ConfigError: it has other numbers of blocks or experts than the model.
    """
    account = model.account()
    if account.experts is None or account.experts.balance != "bias" or not routing:
        return {}
    names = [block_name(layer) for layer in range(account.layers)]
    if {*routing} != {*names} or any(len(routing[name]) != account.experts.count for name in names):
        rule = f"its biases are not those of {account.layers} blocks of {account.experts.count} experts"
        raise ConfigError(key, value, rule, "choose the model that it was trained as")
    return routing


def widest(biases: Biases) -> float:
    """The largest difference of two experts' biases in a block."""
    return max((max(block) - min(block) for block in biases.values()), default=0.0)


def left_out(biases: Biases) -> str:
    """One line for people whose copy of the weights has no place for the biases; empty: there are none."""
    if not widest(biases):
        return ""
    return (
        f"left out: the biases of {len(biases)} routers, for which the format has no place. Without them a token whose "
        f"experts' probabilities differ by less than {widest(biases):.2g} (the widest of a block) may get other experts"
    )
