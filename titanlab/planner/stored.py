"""What one rank stores and gathers of the pieces of a model."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from titanlab.costs.account import ModelAccount
from titanlab.costs.block_names import is_in_block
from titanlab.costs.config_key import Key
from titanlab.costs.layout import Layout
from titanlab.costs.shard_account import account_for, cuts_of, gathered_part, stored_part
from titanlab.optimizer.contract import Stored
from titanlab.planner.model_facts import model_facts
from titanlab.precision.account import matched


class PieceBytes(NamedTuple):
    """Bytes of one rank for a piece of the model, or for several.

    Attributes:
        parameters: stored; a shard is padded as FSDP2 pads it.
        optimizer: state of the optimizer.
        gathered: all parameters of the piece, in the precision in which they compute.
        gradients: of all parameters of the piece, in that precision.
        unreduced: the same in the precision in which they are summed.
    """

    parameters: int
    optimizer: int
    gathered: int
    gradients: int
    unreduced: int


NOTHING = PieceBytes(0, 0, 0, 0, 0)


def added(parts: Iterable[PieceBytes]) -> PieceBytes:
    """The sum of several pieces."""
    return PieceBytes(*(sum(column) for column in zip(*parts, strict=True))) if (parts := list(parts)) else NOTHING


class Sharding(NamedTuple):
    """How the parameters of a recipe are stored; the key of a cache."""

    model: Key
    precision: Key
    optimizer: Key
    tensor: int
    fsdp: int
    expert: int = 1


@functools.lru_cache(maxsize=4096)
def stored_pieces(sharding: Sharding) -> Mapping[str, PieceBytes]:
    """Bytes by piece, for the rank with the largest part of each parameter."""
    account = model_facts(sharding.model).account
    like, computes = representatives(sharding.model), _formats(sharding.model, sharding.precision)
    names = _names(sharding.model)
    kinds = {piece: _piece(sharding, account, names[piece], computes) for piece in set(like.values())}
    return {piece: kinds[other] for piece, other in like.items()}


@functools.lru_cache(maxsize=256)
def representatives(model: Key) -> Mapping[str, str]:
    """By piece, the first piece with parameters of the same names and shapes."""
    account = model_facts(model).account
    first: dict[tuple[tuple[str, tuple[int, ...]], ...], str] = {}
    representative_of = {}
    for piece, names in _names(model).items():
        kind = tuple((name.removeprefix(f"{piece}."), account.parameters[name]) for name in names)
        # Pieces outside blocks may differ in more than their parameters.
        representative_of[piece] = first.setdefault(kind, piece) if is_in_block(piece) else piece
    return representative_of


class _Formats(NamedTuple):
    """Bytes of an element, and the pieces and parameters with others."""

    master: int
    compute: int
    reduce: int
    wide: frozenset[str]
    float8: frozenset[str]


@functools.lru_cache(maxsize=256)
def _formats(model: Key, precision: Key) -> _Formats:
    account, formats = model_facts(model).account, precision.value.formats()
    return _Formats(
        master=formats.master_bytes,
        compute=formats.compute_bytes,
        reduce=formats.reduce_bytes,
        wide=frozenset(matched(account, formats.fp32_parts)),
        float8=precision.value.float8_gathered(account),
    )


@functools.lru_cache(maxsize=256)
def _names(model: Key) -> Mapping[str, Sequence[str]]:
    """Names of parameters by piece; a model that cannot be cut is one piece without a name."""
    account = model_facts(model).account
    names: dict[str, list[str]] = {piece: [] for piece in account.pieces or ("",)}
    depth = {piece: piece.count(".") + 1 for piece in names}
    for name in account.parameters:
        steps = name.split(".")
        piece = next((".".join(steps[:n]) for n in sorted(set(depth.values())) if ".".join(steps[:n]) in names), "")
        names.setdefault(piece, []).append(name)
    return names


def _piece(sharding: Sharding, account: ModelAccount, names: Sequence[str], formats: _Formats) -> PieceBytes:
    optimizer, parts = sharding.optimizer.value, []
    layout = Layout(shard=sharding.fsdp, tensor=sharding.tensor, expert=sharding.expert)
    account = account_for(account, layout)
    for name in names:
        degrees = cuts_of(account, name, layout)._asdict()
        part = stored_part(account, name, **degrees)
        elements = math.prod(gathered_part(account, name, **degrees))
        is_wide = any(name.startswith(f"{piece}.") for piece in formats.wide)
        compute, reduce = (4, 4) if is_wide else (formats.compute, formats.reduce)
        stored = Stored(name=name, shape=account.parameters[name], part=part, element_bytes=formats.master)
        gathered = elements * (1 if name in formats.float8 else compute)
        parts.append(
            PieceBytes(
                stored.part_bytes, optimizer.state_bytes(stored), gathered, elements * compute, elements * reduce
            )
        )
    return added(parts)
