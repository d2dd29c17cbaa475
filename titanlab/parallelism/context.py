"""Context parallelism: each rank of a group has two chunks of every sequence, and attention exchanges keys and values.

There are two exchanges: `ring` and `all_gather` (see `exchanges.py`). Either one is inside a custom operator with its
own backward: in compiled code the communication causes no graph break, and activation checkpointing sees one named
operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from titanlab.costs import BLOCKS, ModelAccount
from titanlab.errors import ConfigError
from titanlab.parallelism import exchanges
from titanlab.parallelism.attention_kernels import choose
from titanlab.parallelism.collectives import group_named
from titanlab.parallelism.exchanges import DocumentChunks, GatherKv, Ring
from titanlab.techniques.model.attention import HostStarts, InnerAttention, result_like
from titanlab.techniques.precision.product import departure, has_hooks

EXCHANGES: dict[str, type[Ring] | type[GatherKv]] = {"ring": Ring, "all_gather": GatherKv}
# Largest number of tokens for trying attention of another class: longer than the usual windows of 4,096.
_TRIED = 4608


def positions(seq_len: int, *, ranks: int, rank: int) -> Tensor:
    """The positions in a sequence of a rank's tokens: [seq_len / ranks] int64, ascending.

    The sequence is divided into 2·ranks chunks. A rank has chunk `rank` counted from the front and chunk `rank` counted
    from the back: later rows of causal attention have more keys, and this choice gives every rank the same work.
    """
    if seq_len % (2 * ranks) or not seq_len:
        raise ValueError(f"a sequence of {seq_len} tokens has no {2 * ranks} equal chunks, two a rank")
    chunks = torch.arange(seq_len).view(2 * ranks, -1)
    return torch.cat([chunks[number] for number in exchanges.owned(rank, ranks)])


class ContextAttention(nn.Module):
    """Causal softmax(q·kᵀ/√head_dim)·v over sequences of which this rank has `positions`; replaces a model's attention.

    q [batch, heads, seq / ranks, head_dim] and k, v with kv_heads → shaped as q. With `starts` [batch, seq / ranks] on
    the CPU, attention is within documents; `starts` are places in the whole sequence. Every rank of the group has to
    call it, forward and backward, in the same order.

    Args:
        kernel: the kernel that the model asks for, `auto` for the best. If it returns no denominators or does not
            support the inputs, the next suitable kernel is used. On CPU there is only one.
    """

    def __init__(self, method: str, group: ProcessGroup, kernel: str = "auto") -> None:
        super().__init__()
        self.method, self.kernel = method, kernel
        self.group_name: str = group.group_name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | HostStarts | None = None) -> Tensor:
        # A model may pass its argument on unchanged.
        starts = starts.tensor if isinstance(starts, HostStarts) else starts
        out: Tensor = attention(q, k, v, starts, self.method, self.group_name, self.kernel)[0]
        return out

    def extra_repr(self) -> str:
        return f"{self.method}, kernel={self.kernel}"


def spread_attention(model: nn.Module, path: str, *, method: str, group: ProcessGroup) -> None:
    """Replace the module at `path` in every block of the model's `layers` by a `ContextAttention`.

    It uses the replaced module's `kernel`, or `auto` if the module has no such attribute.
    """
    container, _, name = path.rpartition(".")
    for block in model.get_submodule(BLOCKS).children():
        replaced = block.get_submodule(path)
        attention = ContextAttention(method, group, getattr(replaced, "kernel", "auto"))
        setattr(block.get_submodule(container), name, attention)


def check_attention(model: nn.Module, account: ModelAccount, *, seq_len: int, context: int) -> None:
    """Check that a model's attention computes the same as `ContextAttention`; runs attention of another class on an
    example.

    Raises:
        ConfigError: it computes something else, or cannot be tried on a CPU.
    """
    for number, block in model.get_submodule(BLOCKS).named_children():
        module = block.get_submodule(account.attention)
        hooked = has_hooks(module)
        how = "has hooks" if hooked else departure(module, InnerAttention)
        if (type(module) is InnerAttention and not how) or (not hooked and _is_causal(module, account, seq_len)):
            continue
        path = f"{BLOCKS}.{number}.{account.attention}"
        rule = f"computes {path} as causal softmax(q·kᵀ/√head_dim)·v, and {path} {how or 'gives another result'}"
        cure = f"try 1, or {InnerAttention.__module__}.{InnerAttention.__name__}"
        raise ConfigError("parallelism.context", context, rule, cure)


def _is_causal(module: nn.Module, account: ModelAccount, seq_len: int) -> bool:
    """Whether a module gives the result of causal attention for some q, k and v on the CPU."""
    if any(True for _ in module.parameters()):
        return False
    queries, length = account.heads // account.kv_heads, min(seq_len, _TRIED)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, heads, length, account.head_dim, generator=generator, dtype=torch.float32, device="cpu")
            for heads in (queries, 1, 1)
        )
        try:
            found = module(q, k, v)
        # Unknown code may raise any error.
        except Exception:
            return False
        expected = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return isinstance(found, Tensor) and found.shape == q.shape and torch.allclose(found, expected, atol=2e-5)


@torch.library.custom_op("titanlab::context_attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, method: str, group: str, kernel: str
) -> tuple[Tensor, Tensor]:
    """The output of `ContextAttention`, and the logarithms of denominators [batch, heads, seq / ranks], float32."""
    chosen = choose(kernel, q, k, v, shapes_vary=starts is not None)
    q, k, v = map(_sequence_first, (q, k, v))
    exchange = EXCHANGES[method]((k, v), group_named(group))
    out, lse = exchanges.forward(exchange, q, k, v, chosen, _documents(starts, group))
    return out.transpose(1, 2), lse.transpose(1, 2)


@torch.library.custom_op("titanlab::context_attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor | None,
    out: Tensor,
    lse: Tensor,
    method: str,
    group: str,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = choose(kernel, q, k, v, shapes_vary=starts is not None)
    grad, q, k, v, out, lse = map(_sequence_first, (grad, q, k, v, out, lse))
    exchange = EXCHANGES[method]((k, v), group_named(group))
    dq, dk, dv = exchanges.backward(exchange, grad, q, k, v, out, lse, chosen, _documents(starts, group))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=exchanges.accumulator(q.dtype))
    return result_like(q), lse.transpose(1, 2)


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return result_like(q), result_like(k), result_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, starts, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, starts, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    assert grad is not None, "every rank has to take part in the backward pass"
    return *attention_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


attention.register_autograd(_differentiate, setup_context=_keep)


def _documents(starts: Tensor | None, group: str) -> DocumentChunks | None:
    ranks = group_named(group)
    return None if starts is None else DocumentChunks(starts, rank=ranks.rank(), ranks=ranks.size())


def _sequence_first(x: Tensor) -> Tensor:
    """[batch, heads, seq, …] → [batch, seq, heads, …], contiguous; rarely a copy, as projections have this layout."""
    return x.transpose(1, 2).contiguous()
