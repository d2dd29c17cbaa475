"""Facts of a model that all its recipes share, computed once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from titanlab.costs.account import ModelAccount, Operation
from titanlab.costs.block_names import block_name, is_in_block
from titanlab.costs.config_key import Key
from titanlab.costs.flops import per_token

T = TypeVar("T")


class Unkeyed(Generic[T]):
    """A value that a cache does not look at: the rest of its key decides the result."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unkeyed)

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelFacts:
    """What estimates need of a model.

    Attributes:
        account: of the whole model.
        sample: account of the edges and of one block, which stands for all: the middle one.
        block: name of that block.
        before, after: pieces before and after the blocks.
    """

    account: ModelAccount
    sample: ModelAccount
    block: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def model_facts(model: Key) -> ModelFacts:
    """The facts of the model with this config."""
    account: ModelAccount = model.value.account()
    block = block_name(account.layers // 2)
    pieces = account.pieces or ("",)
    blocks = [place for place, piece in enumerate(pieces) if is_in_block(piece)]
    before, after = pieces[: min(blocks, default=0)], pieces[max(blocks, default=-1) + 1 :]
    parameters = {
        name: shape
        for name, shape in account.parameters.items()
        if not is_in_block(name) or name.startswith(f"{block}.")
    }
    sample = replace(account, parameters=parameters, layers=1, pieces=(*before, block, *after))
    return ModelFacts(account=account, sample=sample, block=block, before=before, after=after)


@functools.lru_cache(maxsize=1024)
def flops_per_token(model: Key, seq_len: int) -> int:
    """See `titanlab.costs.flops.per_token`."""
    return per_token(model_facts(model).account, seq_len=seq_len)


@functools.lru_cache(maxsize=1024)
def block_operations(model: Key, microbatch: int, seq_len: int) -> tuple[Operation, ...]:
    """The operations of a block for a microbatch."""
    return tuple(model.value.block_operations(batch=microbatch, seq_len=seq_len))


@functools.lru_cache(maxsize=1024)
def edge_operations(model: Key, microbatch: int, seq_len: int) -> tuple[Operation, ...]:
    """The operations outside blocks for a microbatch."""
    return tuple(model.value.edge_operations(batch=microbatch, seq_len=seq_len))


@functools.lru_cache(maxsize=256)
def treatments(ac: Key, layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first block of each treatment, and the number of the treatment of each block."""
    all_treatments = [ac.value.treatment(number) for number in range(layers)]
    different = list(dict.fromkeys(all_treatments))
    return tuple(map(all_treatments.index, different)), tuple(map(different.index, all_treatments))
