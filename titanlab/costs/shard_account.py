"""The part of a parameter that one rank stores, and the part that it gathers. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from titanlab.costs.account import ModelAccount, cut_dim, parameter_style
from titanlab.costs.layout import Layout


class Cuts(NamedTuple):
    """The degrees that cut a parameter: of tensor or expert parallelism, and of FSDP2."""

    tensor: int
    fsdp: int


STACK = "expert_stack"


def account_for(account: ModelAccount, layout: Layout) -> ModelAccount:
    """The account with the tensor plan of a layout: expert parallelism does not cut the width of experts.

    Then each rank of the tensor axis routes its own tokens, and no rank gathers or sums them.
    """
    if layout.expert == 1:
        return account
    styles = {"expert_colwise": STACK, "expert_rowwise": STACK}
    plan = {path: styles.get(style, style) for path, style in account.tensor_plan.items() if style != "experts"}
    return replace(account, tensor_plan=plan)


def cuts_of(account: ModelAccount, name: str, layout: Layout, *, sharded: bool = True) -> Cuts:
    """The degrees that cut a parameter of an account for a layout.

    Args:
        sharded: whether FSDP2 shards.
    """
    if parameter_style(account, name) == STACK:
        return Cuts(layout.expert, layout.expert_shard if sharded else 1)
    return Cuts(layout.tensor, layout.fsdp if sharded else 1)


def tensor_part(account: ModelAccount, name: str, *, tensor: int, number: int = 0) -> tuple[int, ...]:
    """Shape of a parameter on one rank of tensor parallelism, or of expert parallelism for a stack of experts.

    Args:
        tensor: degree.
        number: of the rank; the first ranks have the largest parts.
    """
    shape = list(account.parameters[name])
    dim = _cut(account, name, tensor=tensor)
    if dim is not None:
        part = -(-shape[dim] // tensor)
        shape[dim] = max(0, min(part, shape[dim] - number * part))
    return tuple(shape)


def sharded_dim(account: ModelAccount, name: str, *, tensor: int, fsdp: int) -> int:
    """The dim along which FSDP2 shards a parameter; see `fsdp_dim`."""
    return fsdp_dim(account.parameters[name], _cut(account, name, tensor=tensor), tensor=tensor, fsdp=fsdp)


def fsdp_dim(shape: Sequence[int], cut: int | None, *, tensor: int, fsdp: int) -> int:
    """The dim along which FSDP2 shards a parameter.

    Rows, or columns if tensor parallelism has left uneven rows. Stacked matrices: experts; if their number is not
    divisible, another dim that tensor parallelism does not cut, because FSDP2 would pad them to one expert for each
    rank.

    Args:
        shape: of the whole parameter.
        cut: the dim that tensor parallelism cuts, or None.
    """
    if len(shape) == 3 and cut != 0:
        other = 2 if cut == 1 else 1
        return other if shape[0] % fsdp and shape[other] % fsdp == 0 else 0
    return 1 if cut == 0 and shape[0] % (tensor * fsdp) else 0


def gathered_part(account: ModelAccount, name: str, *, tensor: int, fsdp: int, number: int = 0) -> tuple[int, ...]:
    """Shape of what FSDP2 gathers of a parameter: this rank's part of it, padded so that all shards are equal."""
    shape = tensor_part(account, name, tensor=tensor, number=number)
    if sharded_dim(account, name, tensor=tensor, fsdp=fsdp) > 0:
        return shape  # such a dim is divisible; for columns the rules of layouts ask for it
    return _padded(shape, fsdp)


def stored_part(account: ModelAccount, name: str, *, tensor: int, fsdp: int, number: int = 0) -> tuple[int, ...]:
    """Shape of what a rank stores of a parameter: its shard, of which FSDP2 pads the last ones to an equal size."""
    shape = list(gathered_part(account, name, tensor=tensor, fsdp=fsdp, number=number))
    shape[sharded_dim(account, name, tensor=tensor, fsdp=fsdp)] //= fsdp
    return tuple(shape)


def _padded(shape: Sequence[int], fsdp: int) -> tuple[int, ...]:
    return (-(-shape[0] // fsdp) * fsdp, *shape[1:])


def _cut(account: ModelAccount, name: str, *, tensor: int) -> int | None:
    """The dim that tensor parallelism cuts; None for whole parameters: norms, and biases that follow a sum."""
    if tensor == 1:
        return None
    return cut_dim(parameter_style(account, name), len(account.parameters[name]))
