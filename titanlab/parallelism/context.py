"""Context parallelism: ranks share every sequence, each holds two chunks of it, and attention brings them together.

Two ways for keys and values to meet queries: `ring` and `all_gather` (see `ring.py` and `gather_kv.py`). Both are one
custom operator with a backward of its own, in eager mode and in compiled code alike: what is sent inside it is no graph
break, and activation checkpointing sees one operator with a name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# Private, but what functional collectives name groups by, in torch 2.11 as in 2.13: operators take no groups.
from torch.distributed.distributed_c10d import _resolve_process_group

from titanlab.parallelism import head_tail
from titanlab.parallelism.attention_kernels import choose
from titanlab.parallelism.gather_kv import GatherKv
from titanlab.parallelism.ring import Ring

EXCHANGES: dict[str, type[Ring] | type[GatherKv]] = {"ring": Ring, "all_gather": GatherKv}


def positions(seq_len: int, *, ranks: int, rank: int) -> Tensor:
    """The places in a sequence of the tokens that a rank holds: [seq_len / ranks] int64, ascending.

    Of 2·ranks chunks these are number `rank` from the front and number `rank` from the back: later rows of causal
    attention have more keys, and this way every rank has as many.

    Raises:
        ValueError: the sequence does not divide into 2·ranks chunks.
    """
    chunk, rest = divmod(seq_len, 2 * ranks)
    if rest or not chunk:
        raise ValueError(
            f"a sequence of {seq_len} tokens has no {2 * ranks} equal chunks, two for each of {ranks} ranks"
        )
    places = torch.arange(seq_len).view(2 * ranks, chunk)
    return torch.cat((places[rank], places[-1 - rank]))


class ContextAttention(nn.Module):
    """softmax(q·kᵀ/√head_dim)·v, causal over sequences of which this rank holds `positions`; stands for a model's
    inner attention.

    q [batch, heads, seq / ranks, head_dim] and k, v with kv_heads → shaped as q. Every rank of the group has to call
    it, forward and backward, in the same order.

    Args:
        method: `ring` or `all_gather`.
        group: the ranks of the context axis.
        kernel: the kernel that the model asks for, `auto` for the best. One that gives no denominators, or does not
            take the inputs, is replaced by the next that does; CPUs have but one.
    """

    def __init__(self, method: str, group: ProcessGroup, kernel: str = "auto") -> None:
        super().__init__()
        if method not in EXCHANGES:
            raise ValueError(f"context_method {method!r}: choose one of {', '.join(EXCHANGES)}")
        self.method = method
        self.group_name: str = group.group_name
        self.kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, self.method, self.group_name, self.kernel)[0]
        return out

    def extra_repr(self) -> str:
        return f"{self.method}, kernel={self.kernel}"


def spread_attention(model: nn.Module, path: str, *, method: str, group: ProcessGroup) -> None:
    """Put a `ContextAttention` in place of the module at `path` in every block of a model, which is one of `layers`.

    The kernel is the one that the replaced module has as its `kernel`, if it has any.
    """
    container, _, name = path.rpartition(".")
    for block in model.get_submodule("layers").children():
        replaced = block.get_submodule(path)
        attention = ContextAttention(method, group, getattr(replaced, "kernel", "auto"))
        setattr(block.get_submodule(container), name, attention)


@torch.library.custom_op("titanlab::context_attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, method: str, group: str, kernel: str) -> tuple[Tensor, Tensor]:
    """Output as `ContextAttention` has it, and the denominators [batch, heads, seq / ranks], float32."""
    chosen = choose(kernel, q, k, v)
    q, k, v = map(_by_place, (q, k, v))
    exchange = EXCHANGES[method]((k, v), _group(group))
    out, lse = head_tail.forward(exchange, q, k, v, chosen)
    return out.transpose(1, 2), lse.transpose(1, 2)


@torch.library.custom_op("titanlab::context_attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, method: str, group: str, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    chosen = choose(kernel, q, k, v)
    grad, q, k, v, out, lse = map(_by_place, (grad, q, k, v, out, lse))
    exchange = EXCHANGES[method]((k, v), _group(group))
    dq, dk, dv = head_tail.backward(exchange, grad, q, k, v, out, lse, chosen)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, method: str, group: str, kernel: str) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=head_tail.accumulator(q.dtype))
    return _like(q), lse.transpose(1, 2)


@attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, method: str, group: str, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    assert grad is not None, "every rank has to take part in the backward pass"
    return *attention_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None


attention.register_autograd(_differentiate, setup_context=_keep)


def _group(name: Any) -> ProcessGroup:
    # torch 2.13 has a type of its own for names, torch 2.11 has not.
    return _resolve_process_group(name)


def _by_place(x: Tensor) -> Tensor:
    """[batch, heads, seq, …] → [batch, seq, heads, …], contiguous: how projections leave it, so hardly ever a copy."""
    return x.transpose(1, 2).contiguous()


def _like(x: Tensor) -> Tensor:
    """An empty tensor shaped as x that lies as the operators' results do."""
    return torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
