"""Context parallelism: each rank of a group has two chunks of every sequence, and attention exchanges keys and values.

With n ranks a sequence is cut into 2n chunks, and rank r has chunks r (its head) and 2n−1−r (its tail), so that every
rank has the same work. For the keys of other ranks:

- an *earlier* rank s < r: its head comes before all local rows, its tail after all of them;
- a *later* rank s > r: both its chunks come before the local tail and after the local head.

So the causal mask is needed only within each chunk, and every other part is a full rectangle. Partial results are
merged by the logarithms of their denominators (arXiv 1805.02867): no matrix of scores and no mask is ever stored.

`Ring` and `GatherKv` are two ways to exchange keys and values. Both run in a custom operator with its own backward: in
compiled code the communication causes no graph break, and activation checkpointing sees one named operator.

Shapes: tensors are sent and stored as [batch, seq, heads, head_dim]; kernels get the transposed view.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup, Work, all_to_all_single, batch_isend_irecv, irecv, isend

from titanlab.costs import BLOCKS, ModelAccount
from titanlab.errors import ConfigError
from titanlab.parallelism.attention_kernels import choose
from titanlab.parallelism.collectives import all_gather_single, group_named
from titanlab.techniques.model.attention import HostStarts, InnerAttention, result_like
from titanlab.techniques.precision.product import departure, has_hooks

# `check_attention` tests another class on at most this many tokens: more than the usual sliding window of 4,096.
_TRIED = 4608


def positions(seq_len: int, *, ranks: int, rank: int) -> Tensor:
    """The positions in a sequence of a rank's tokens: [seq_len / ranks] int64, ascending.

    The sequence is divided into 2·ranks chunks. A rank has chunk `rank` counted from the front and chunk `rank` counted
    from the back: later rows of causal attention have more keys, and this choice gives every rank the same work.
    """
    if seq_len % (2 * ranks) or not seq_len:
        raise ValueError(f"a sequence of {seq_len} tokens has no {2 * ranks} equal chunks, two a rank")
    chunks = torch.arange(seq_len).view(2 * ranks, -1)
    return torch.cat([chunks[number] for number in owned(rank, ranks)])


class ContextAttention(nn.Module):
    """Causal softmax(q·kᵀ/√head_dim)·v over sequences of which this rank has `positions`; replaces a model's attention.

    q [batch, heads, seq / ranks, head_dim] and k, v with kv_heads → shaped as q. With `starts` [batch, seq / ranks] on
    the CPU, attention is within documents: `starts` has, for each token, the position in the whole sequence where its
    document begins. Every rank of the group has to run this module, forward and backward, in the same order.

    Args:
        kernel: the kernel that the model asks for, `auto` for the best. If that kernel returns no denominators or does
            not support the inputs, the next suitable kernel is used. On CPU there is only one kernel.
    """

    def __init__(self, method: str, group: ProcessGroup, kernel: str = "auto") -> None:
        super().__init__()
        self.method, self.kernel = method, kernel
        self.group_name: str = group.group_name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | HostStarts | None = None) -> Tensor:
        # A model may pass on the `HostStarts` that its own `forward` got.
        starts = starts.tensor if isinstance(starts, HostStarts) else starts
        out: Tensor = attention(q, k, v, starts, self.method, self.group_name, self.kernel)[0]
        return out

    def extra_repr(self) -> str:
        return f"{self.method}, kernel={self.kernel}"


def spread_attention(model: nn.Module, path: str, *, method: str, group: ProcessGroup) -> None:
    """Replace the module at `path` in every block of the model's `layers` by a `ContextAttention`.

    The new module uses the replaced module's `kernel`, or `auto` if the replaced module has no such attribute.
    """
    container, _, name = path.rpartition(".")
    for block in model.get_submodule(BLOCKS).children():
        replaced = block.get_submodule(path)
        attention = ContextAttention(method, group, getattr(replaced, "kernel", "auto"))
        setattr(block.get_submodule(container), name, attention)


def check_attention(model: nn.Module, account: ModelAccount, *, seq_len: int, context: int) -> None:
    """Check that a model's attention computes what `ContextAttention` does; another class is tested on an example.

    Raises:
        ConfigError: the model's attention computes something else, or the example does not run on a CPU.
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
    """The output of `ContextAttention`, and the logarithms of denominators [batch, heads, seq / ranks], float32.

    The local rows attend to all earlier keys, or to the earlier keys of their documents.
    """
    chosen = choose(kernel, q, k, v, shapes_vary=starts is not None)
    q, k, v = (_swapped(x).contiguous() for x in (q, k, v))
    exchange, chunks = EXCHANGES[method]((k, v), group_named(group)), Chunks(starts, group_named(group))
    local = [_swapped(halves(x)) for x in (q, k, v)]
    if chunks.inner is None:
        parts = chosen.forward(*local, causal=True)
    else:
        parts = chosen.documents_forward(*local, starts=chunks.inner)
    out, lse = (_joined_halves(_swapped(x), q.shape[0]) for x in parts)
    # Add partial outputs in float32: rounding every sum to 16 bits would accumulate errors.
    out = out.to(accumulator(q.dtype))

    def attend(block: KeysAndValues) -> None:
        for rows, keys in chunks.rectangles(block, q):
            part, part_lse = chosen.forward(*map(_swapped, (q[rows], block.k[keys], block.v[keys])), causal=False)
            merge(out[rows], lse[rows], _swapped(part), _swapped(part_lse))

    attend(_local_head(k, v, chunks))
    for block in exchange.blocks():
        attend(block)
        del block  # free its memory before the next block is allocated
    return _swapped(out.to(q.dtype)), _swapped(lse)


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
    """Gradients of q, k and v, shaped as q, k and v; keys and values are transferred once more."""
    chosen = choose(kernel, q, k, v, shapes_vary=starts is not None)
    grad, q, k, v, out, lse = (_swapped(x).contiguous() for x in (grad, q, k, v, out, lse))
    exchange, chunks = EXCHANGES[method]((k, v), group_named(group)), Chunks(starts, group_named(group))
    local = [_swapped(halves(x)) for x in (grad, q, k, v, out, lse)]
    if chunks.inner is None:
        parts = chosen.backward(*local, causal=True)
    else:
        parts = chosen.documents_backward(*local, starts=chunks.inner)
    dq, dk, dv = (_joined_halves(_swapped(x), q.shape[0]).to(accumulator(q.dtype)) for x in parts)

    def add_gradients(block: KeysAndValues, into: Pair) -> None:
        for rows, keys in chunks.rectangles(block, q):
            inputs = grad[rows], q[rows], block.k[keys], block.v[keys], out[rows], lse[rows]
            of_rows, *of_keys = map(_swapped, chosen.backward(*map(_swapped, inputs), causal=False))
            dq[rows].add_(of_rows)
            for part, total in zip(of_keys, into, strict=True):
                total[keys] += part

    for block in exchange.blocks():
        gradients = torch.zeros_like(block.k), torch.zeros_like(block.v)
        add_gradients(block, gradients)
        exchange.give(gradients, into=(dk, dv))
        del block, gradients  # free their memory before the next block is allocated
    # The last part needs only local keys: computing it hides the transfer of the last gradients.
    add_gradients(_local_head(k, v, chunks), first_halves((dk, dv)))
    exchange.collect(into=(dk, dv))
    return _swapped(dq.to(q.dtype)), _swapped(dk.to(k.dtype)), _swapped(dv.to(v.dtype))


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=accumulator(q.dtype))
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


def owned(rank: int, ranks: int) -> tuple[int, int]:
    """The numbers of a rank's chunks: its head and its tail."""
    return rank, 2 * ranks - 1 - rank


Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients


class KeysAndValues(NamedTuple):
    """Keys and values, [batch, seq, kv_heads, head_dim] each, of some chunks, and the numbers of these chunks."""

    k: Tensor
    v: Tensor
    chunks: tuple[int, ...]


# An index of some sequences of the batch, and of tokens in them.
Part = tuple[slice, slice | Tensor]


class Chunks:
    """A rank's two chunks, and the documents in them.

    At most one document reaches from an earlier chunk into a later one: the document of the later chunk's first row.
    The document's rows at the start of the later chunk attend to all its keys at the end of the earlier chunk. So the
    work between two chunks is a full rectangle without a mask, or nothing. Within a chunk, each document is causal
    attention by itself.

    Documents do not change what ranks send: otherwise a rank could wait for a message that another does not send.

    Attributes:
        numbers: the chunks' numbers in the sequence.
        inner: [2·batch, seq / 2]: for each token, where in the chunk its document begins; 0 if it began before the
            chunk. None: each sequence is one document.
    """

    def __init__(self, starts: Tensor | None, group: ProcessGroup) -> None:
        """`starts`: [batch, seq] int64, on the CPU: for each local token, where its document begins, as a position in
        the whole sequence; None: each sequence is one document.
        """
        self.numbers = owned(group.rank(), group.size())
        self._starts: list[list[int]] | None = None
        self.inner: Tensor | None = None
        if starts is not None:
            self._starts = starts.tolist()
            begins = torch.tensor(self.numbers * starts.shape[0]).unsqueeze(1) * (starts.shape[1] // 2)
            self.inner = (halves(starts) - begins).clamp(min=0)

    def rectangles(self, block: KeysAndValues, q: Tensor) -> Iterable[tuple[Part, Part]]:
        """Pairs of indices: some local rows, and the keys of `block` to which every one of these rows attends."""
        size, every = q.shape[1] // 2, slice(None)
        if self._starts is None:
            # Only the local tail attends to chunks that come after the local head.
            first = size if block.chunks[-1] >= self.numbers[0] else 0
            yield (every, slice(first, None)), (every, every)
            return
        for sequence, starts in enumerate(self._starts):
            for begin, number in zip((0, size), self.numbers, strict=True):
                first = starts[begin]
                spans = [
                    (place * size + max(first - other * size, 0), (place + 1) * size)
                    for place, other in enumerate(block.chunks)
                    if other < number and (other + 1) * size > first
                ]
                keys: slice | Tensor
                if spans:
                    end = bisect_right(starts, first, lo=begin, hi=begin + size)
                    own, keys = slice(sequence, sequence + 1), slice(*spans[0])
                    if len(spans) > 1:
                        keys = torch.cat([torch.arange(*span, device=q.device) for span in spans])
                    yield (own, slice(begin, end)), (own, keys)


def _local_head(k: Tensor, v: Tensor, chunks: Chunks) -> KeysAndValues:
    return KeysAndValues(*first_halves((k, v)), chunks.numbers[:1])


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed."""
    return torch.promote_types(dtype, torch.float32)


def halves(x: Tensor) -> Tensor:
    """The halves of each sequence as separate sequences: [batch, seq, …] → [2·batch, seq/2, …], without a copy."""
    return x.reshape(2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])


def _joined_halves(x: Tensor, batch: int) -> Tensor:
    return x.reshape(batch, 2 * x.shape[1], *x.shape[2:]).contiguous()


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to more keys into `out` [batch, rows, heads, head_dim] and `lse` [batch, rows, heads], in place.

    The new part's share of the denominator, exp(part_lse) / (exp(lse) + exp(part_lse)), is a sigmoid: no overflow.
    """
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _swapped(x: Tensor) -> Tensor:
    """[batch, seq, heads, …] ↔ [batch, heads, seq, …]."""
    return x.transpose(1, 2)


# `Ring` and `GatherKv` take this rank's contiguous keys and values, and the group of the context axis. The
# constructor starts the first transfer, so that local work hides it. `blocks` yields the keys and values of other ranks
# that local rows need, once each, while the next block is in transfer. `give` sends the gradients of the latest block
# to the rank that owns it; gradients that have arrived for this rank's keys may be added to `into`. `collect` waits for
# the remaining gradients.


class Ring:
    """Ring attention (arXiv 2310.01889): ranks pass on blocks of keys and values while they use the current block.

    Blocks move *down*, from rank r to r−1: a rank's keys first reach the ranks before their owner, which need all of
    them. Rank 0 sends to the last rank, so they then reach the ranks after their owner, which need only the head.
    So rank 0 drops the tail, and only keys that are used are sent: three quarters of the n·(n−1) blocks of a full ring.
    (Upwards, tails would pass through ranks that do not need them.)

    Gradients are sent directly to the owner of the keys, in the kernel's dtype, and added there in float32.
    Passing them on in a ring would take as many messages, but of running sums in float32, and each rank would wait for
    its neighbour's sum.
    """

    def __init__(self, local: Pair, group: ProcessGroup) -> None:
        self._local, self._group = local, group
        self._rank, self._ranks = group.rank(), group.size()
        self._step = 0
        self._gradients: Callable[[], Pair] | None = None
        self._block = self._pass_on(local, step=1)

    def blocks(self) -> Iterator[KeysAndValues]:
        while self._block is not None:
            block = self._block()
            self._step += 1
            self._block = self._pass_on(block, step=self._step + 1)
            owner = (self._rank + self._step) % self._ranks
            yield KeysAndValues(*block, owned(owner, self._ranks)[: 1 + self._is_later(self._step)])

    def give(self, gradients: Pair, into: Pair) -> None:
        self.collect(into)
        # The block's owner is `step` ranks above; the gradients of this rank's keys come from the rank `step` below. If
        # that rank comes before this one, it has used all of these keys, else only those of the head.
        owner, sender = ((self._rank + step) % self._ranks for step in (self._step, -self._step))
        expected = self._empty(whole=sender < self._rank)
        self._gradients = transfer(gradients, owner, expected, sender, self._group)

    def collect(self, into: Pair) -> None:
        if self._gradients is not None:
            for gradient, part in zip(into, self._gradients(), strict=True):
                gradient[:, : part.shape[1]] += part
            self._gradients = None

    def _pass_on(self, block: Pair, *, step: int) -> Callable[[], Pair] | None:
        """Send a block down; return a function that waits for the block of the rank `step` above; None at the end."""
        if step >= self._ranks:
            return None
        if self._rank == 0:
            block = first_halves(block)
        below, above = ((self._rank + offset) % self._ranks for offset in (-1, 1))
        return transfer(block, below, self._empty(whole=self._is_later(step)), above, self._group)

    def _is_later(self, step: int) -> bool:
        return self._rank + step < self._ranks

    def _empty(self, *, whole: bool) -> Pair:
        k, v = self._local if whole else first_halves(self._local)
        return k.new_empty(k.shape), v.new_empty(v.shape)


def transfer(sent: Pair, to: int, expected: Pair, source: int, group: ProcessGroup) -> Callable[[], Pair]:
    """Start to send one pair to a rank of the group, and to receive one pair from a rank, in one NCCL launch.

    A pair is two messages: copying keys and values into one buffer costs more than a second message.

    Returns:
        a function that waits for both transfers, and returns the received pair.
    """
    going = tuple(x.contiguous() for x in sent)
    works = batch_isend_irecv(
        [P2POp(isend, x, group=group, group_peer=to) for x in going]
        + [P2POp(irecv, x, group=group, group_peer=source) for x in expected]
    )

    # The default argument keeps the tensors until they are sent, even if the caller drops them.
    def received(_kept: tuple[Tensor, ...] = going) -> Pair:
        for work in works:
            work.wait()
        return expected

    return received


def first_halves(pair: Pair) -> Pair:
    """The first half of each sequence: [batch, seq, …] → [batch, seq / 2, …]."""
    k, v = (x[:, : x.shape[1] // 2] for x in pair)
    return k, v


class GatherKv:
    """All-gather KV: ranks gather all keys and values while they compute with the local ones, then use the others.

    This has fewer and larger products than a ring, but needs memory for all keys and values while one attention runs;
    the backward pass gathers them again. This is the method of Llama 3 (arXiv 2407.21783, section 3.3.2). Every
    rank receives every tail, also tails that come after all of its queries. Gradients return to their owners by an
    all-to-all in the kernel's dtype, without parts that are zero, and are added in float32.
    """

    def __init__(self, local: Pair, group: ProcessGroup) -> None:
        self._group = group
        self._rank, self._ranks = group.rank(), group.size()
        sent = torch.stack(local)
        self._block_size, self._half = sent.numel(), sent.shape[2] // 2
        # [ranks, k and v, batch, seq, kv_heads, head_dim]
        self._gathered: Tensor | None = sent.new_empty(self._ranks, *sent.shape)
        self._work: Work | None = all_gather_single(self._gathered.flatten(0, 1), sent, group=group, async_op=True)
        self._sent: Tensor | None = sent
        self._returned: Tensor | None = None
        self._gradients: list[Tensor] = []

    def blocks(self) -> Iterator[KeysAndValues]:
        gathered, self._gathered = self._gathered, None
        assert gathered is not None
        assert self._work is not None
        self._work.wait()
        self._sent = self._work = None
        if self._rank > 0:
            heads = tuple(range(self._rank))
            yield KeysAndValues(*_joined(gathered[: self._rank, :, :, : self._half]), heads)
        if self._rank + 1 < self._ranks:
            chunks = (owned(owner, self._ranks) for owner in range(self._rank + 1, self._ranks))
            yield KeysAndValues(*_joined(gathered[self._rank + 1 :]), tuple(chain(*chunks)))

    def give(self, gradients: Pair, into: Pair) -> None:
        is_later = self._rank == 0 or len(self._gradients) == 1
        self._gradients.append(_by_owner(gradients, self._ranks - 1 - self._rank if is_later else self._rank))
        if is_later or self._rank + 1 == self._ranks:
            # A rank has used both halves of later ranks' keys, and only the heads of earlier ranks' keys.
            sizes = [self._sizes(whole=range(self._rank + 1, self._ranks)), self._sizes(whole=range(self._rank))]
            self._sent = torch.cat([part.flatten() for part in self._gradients])
            self._returned = self._sent.new_empty(sum(sizes[1]))
            self._work = all_to_all_single(
                self._returned, self._sent, sizes[1], sizes[0], group=self._group, async_op=True
            )

    def collect(self, into: Pair) -> None:
        if self._work is None or self._returned is None:
            return
        self._work.wait()
        batch, _, *shape = into[0].shape
        for piece in self._returned.split([size for size in self._sizes(whole=range(self._rank)) if size]):
            for gradient, part in zip(into, piece.view(2, batch, -1, *shape), strict=True):
                gradient[:, : part.shape[1]] += part

    def _sizes(self, *, whole: range) -> list[int]:
        """For each rank, the gradient elements exchanged with it: those of all keys if in `whole`, else of half."""
        sizes = [self._block_size if rank in whole else self._block_size // 2 for rank in range(self._ranks)]
        sizes[self._rank] = 0
        return sizes


def _joined(gathered: Tensor) -> Pair:
    """Keys and values of several ranks as one sequence: [ranks, 2, batch, seq, …] → two [batch, ranks · seq, …]."""
    k, v = gathered.permute(1, 2, 0, *range(3, gathered.dim())).flatten(2, 3)
    return k, v


def _by_owner(gradients: Pair, owners: int) -> Tensor:
    """The inverse of `_joined`: two [batch, owners · seq, …] → [owners, 2, batch, seq, …]."""
    parts: Tensor = torch.stack(gradients).unflatten(2, (owners, -1))
    return parts.permute(2, 0, 1, *range(3, parts.dim()))


EXCHANGES: dict[str, type[Ring] | type[GatherKv]] = {"ring": Ring, "all_gather": GatherKv}
