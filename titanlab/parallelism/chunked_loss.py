"""The head and the loss in chunks of tokens: the logits of a microbatch never exist whole.

The forward pass computes the gradients too, chunk by chunk, so that a chunk's logits are computed once and freed. The
backward pass only hands the gradients on. See docs/decisions/0039-loss-in-chunks.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titanlab.parallelism.collectives import all_gather_single
from titanlab.parallelism.local import local_part
from titanlab.parallelism.loss import IGNORE
from titanlab.precision.product import PLAIN, Product, product_of


class Columns(NamedTuple):
    """The columns of the vocabulary that a rank has.

    Attributes:
        first: its first column.
        group: the ranks that have the other columns; None: it has all.
    """

    first: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocab_size: int) -> Columns:
        """This rank's columns, split as DTensor splits them: parts of ceil(vocab_size / ranks), the last ones smaller."""
        return cls(min(group.rank() * -(-vocab_size // group.size()), vocab_size), group)


class ChunkedLoss:
    """The cross-entropy of a model, summed over valid labels, computed by its head in chunks of tokens.

    It replaces the `forward` of the head. While the loss is being computed, the head returns the loss; at other times
    it returns logits as before.
    """

    def __init__(
        self,
        head: nn.Module,
        *,
        tokens: int,
        scale: float | Tensor,
        columns: Columns = Columns(),  # noqa: B008 (immutable)
        gathered: Callable[[Tensor], Tensor] | None = None,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
        writes_gradient: bool = False,
    ) -> None:
        """Replace the head's `forward`.

        Args:
            head: a linear layer [dim → vocabulary], or a module without a parameter that gets the table as a second
                argument.
            tokens: of a chunk.
            scale: the caller runs the backward pass of scale · loss; a tensor may change between steps.
            columns: of the head's weight on this rank, which may be a DTensor.
            gathered: the head's input → all tokens of the microbatch, [tokens, dim]; None: it has all, [batch, seq, dim].
            compiled: compiles a function of tensors that does not communicate; None: nothing is compiled.
            writes_gradient: the forward pass adds the gradient of the weight to `weight.grad` itself, instead of the
                backward pass. A pipeline needs it: a schedule may run many forward passes before the first backward
                pass, and each would keep a tensor of the weight's size.
        """
        self._head, self._gathered, self._logits = head, gathered or _rows, head.forward
        self._labels: Tensor | None = None
        self._work = _Work(
            tokens=tokens,
            scale=scale,
            product=product_of(head),
            columns=columns,
            statistics=_statistics if compiled is None else compiled(_statistics),
            slope=_slope if compiled is None else compiled(_slope),
            # Compiled code exists for chunks of one size.
            pads=compiled is not None,
            writes_gradient=writes_gradient,
        )
        head.forward = self._forward

    def __call__(self, compute: Callable[[], Tensor], labels: Tensor) -> Tensor:
        """The loss, a float32 scalar; `compute` runs the model on a microbatch with these labels [batch, seq]."""
        self._labels = labels
        try:
            return compute()
        finally:
            self._labels = None

    def _forward(self, hidden: Tensor, *table: Any) -> Tensor:
        if self._labels is None:
            logits: Tensor = self._logits(hidden, *table)
            return logits
        (weight,) = table or (self._head.weight,)
        bias = local_part(getattr(self._head, "bias", None))
        inputs = self._gathered(hidden), weight, bias
        labels = self._labels.flatten()
        if torch.is_grad_enabled():
            loss: Tensor = _HeadAndLoss.apply(*inputs, labels, self._work)  # type: ignore[no-untyped-call]
            return loss
        return self._work.run(*inputs, labels, None)


def _rows(hidden: Tensor) -> Tensor:
    return hidden.flatten(0, 1)


class _Gradients:
    """The gradients of the head's inputs and parameters, filled chunk by chunk.

    Attributes:
        tokens: [tokens, dim].
        weight: this rank's part [columns, dim]; None before the first chunk, or if it needs none.
        bias: [columns], likewise.
    """

    def __init__(self, tokens: Tensor, *, weight: Tensor | None, needs_weight: bool, needs_bias: bool) -> None:
        """`weight`: a tensor to which the gradient of the weight is added; None: a new one."""
        self.tokens, self.weight = torch.empty_like(tokens), weight
        self.bias: Tensor | None = None
        self._needs_weight, self._needs_bias = needs_weight, needs_bias

    def add(self, product: Product, start: int, rows: Tensor, weight: Tensor, slope: Tensor) -> None:
        """The gradients that a chunk gives; rows: its tokens, slope: the gradient of its logits."""
        part = self.tokens[start : start + rows.shape[0]]
        if product is PLAIN and part.shape[0] == rows.shape[0]:
            torch.mm(slope, weight, out=part)
        else:
            part.copy_(product.of_inputs(slope, weight)[: part.shape[0]])
        if self._needs_weight:
            if self.weight is None:
                self.weight = product.of_weight(slope, rows)
            elif product is PLAIN:
                # One operation: no second matrix of the weight's size.
                self.weight.addmm_(slope.t(), rows)
            else:
                self.weight.add_(product.of_weight(slope, rows))
        if self._needs_bias:
            of_bias = slope.sum(0)
            self.bias = of_bias if self.bias is None else self.bias + of_bias


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What does not depend on the microbatch; see `ChunkedLoss`."""

    tokens: int
    scale: float | Tensor
    product: Product
    columns: Columns
    statistics: Callable[..., Tensor]
    slope: Callable[..., Tensor]
    pads: bool
    writes_gradient: bool

    def run(
        self, tokens: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, gradients: _Gradients | None
    ) -> Tensor:
        """The loss of all chunks; with `gradients`, those too."""
        weight, total = local_part(weight), torch.zeros((), dtype=torch.float32, device=tokens.device)
        for start in range(0, tokens.shape[0], self.tokens):
            rows, wanted = tokens[start : start + self.tokens], labels[start : start + self.tokens]
            missing = self.tokens - rows.shape[0]
            if self.pads and missing:
                rows, wanted = F.pad(rows, (0, 0, 0, missing)), F.pad(wanted, (0, missing), value=IGNORE)
            logits = self.product.forward(rows, weight, bias)
            if logits.device.type == "cpu" and not self.pads:
                logits = logits.float()
            loss, slope = self._cross_entropy(logits, wanted, tokens.dtype, differentiates=gradients is not None)
            del logits
            total += loss
            if gradients is not None:
                assert slope is not None
                gradients.add(self.product, start, rows, weight, slope)
        return total

    def _cross_entropy(
        self, logits: Tensor, labels: Tensor, dtype: torch.dtype, *, differentiates: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The loss of a chunk, and the gradient of its logits."""
        first, group = self.columns
        statistics = self.statistics(logits, labels, first)
        if group is not None:
            gathered = statistics.new_empty((group.size() * 2, statistics.shape[1]))
            all_gather_single(gathered, statistics, group=group)
            gathered = gathered.unflatten(0, (-1, 2))
            statistics = torch.stack([gathered[:, 0].logsumexp(dim=0), gathered[:, 1].sum(dim=0)])
        valid = labels != IGNORE
        loss = (statistics[0] - statistics[1]).where(valid, 0.0).sum()
        if not differentiates:
            return loss, None
        return loss, self.slope(logits, statistics[0], labels, first, valid * self.scale, dtype)


def _statistics(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """By token, the log-sum-exp of this rank's columns, and the label's logit if it has that column, else 0: [2, n]."""
    values = logits.float()
    mine, column = _columns(labels, first, logits.shape[1])
    return torch.stack([values.logsumexp(dim=-1), values.gather(1, column).squeeze(1).where(mine, 0.0)])


def _slope(logits: Tensor, log_sum: Tensor, labels: Tensor, first: int, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of this rank's columns: softmax over the whole vocabulary, minus one at the label, times a factor.

    log_sum: of the whole vocabulary, [n]; factor: [n], 0 where the label does not count.
    """
    mine, column = _columns(labels, first, logits.shape[1])
    slope = (logits - log_sum.unsqueeze(1)).exp_()
    slope.scatter_add_(1, column, -mine.to(slope.dtype).unsqueeze(1))
    return slope.mul_(factor.unsqueeze(1)).to(dtype)


def _columns(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Whether a rank has the label's column, and its index as [n, 1], 0 if it has not."""
    mine = (labels >= first) & (labels < first + columns)
    return mine, (labels - first).where(mine, 0).unsqueeze(1)


class _HeadAndLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Any, bias: Tensor | None, labels: Tensor, work: _Work) -> Tensor:
        adds = work.writes_gradient and weight.requires_grad
        found = _Gradients(
            tokens,
            weight=local_part(weight.grad) if adds and weight.grad is not None else None,
            needs_weight=weight.requires_grad,
            needs_bias=bias is not None and ctx.needs_input_grad[2],
        )
        total = work.run(tokens, weight, bias, labels, found)
        if adds:
            if weight.grad is None:
                weight.grad = _like(weight, found.weight)
            found.weight = None
        ctx.found, ctx.work, ctx.weight = found, work, None if adds else weight
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found: _Gradients = ctx.found
        # Freed here, because the graph may live until the end of the step.
        del ctx.found
        # 1, because the caller runs the backward of scale · loss.
        factor = gradients[0] / ctx.work.scale
        of_weight = None if found.weight is None else _like(ctx.weight, found.weight.mul_(factor))
        of_bias = None if found.bias is None else found.bias.mul_(factor)
        return found.tokens.mul_(factor), of_weight, of_bias, None, None


def _like(weight: Any, local: Tensor | None) -> Any:
    """This rank's part of a gradient as a DTensor if the weight is one."""
    if local is None or not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
