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

from titanlab.costs import part_rows
from titanlab.dtensor import distributed_like, in_gradient_dtype, local_part
from titanlab.parallelism.collectives import all_gather_single
from titanlab.parallelism.loss import IGNORE
from titanlab.techniques.precision.product import PLAIN, Product, product_of


class Columns(NamedTuple):
    """The columns of the vocabulary that a rank has.

    Attributes:
        group: the ranks that have the other columns; None: it has all.
    """

    first: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocab_size: int) -> Columns:
        """This rank's columns, cut as DTensor cuts them: parts of ceil(vocab_size / ranks), the last ones smaller."""
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
            gathered: the head's input → all tokens of the microbatch, [tokens, dim]; None: the input [batch, seq, dim]
                has all.
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
            statistics=_statistics_in_parts if compiled is None else compiled(_statistics),
            slope=_slope_in_parts if compiled is None else compiled(_slope),
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
            elif product is PLAIN and self.weight.dtype == rows.dtype:
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
        # Cast once, not for each chunk.
        factors = self.product.for_forward(weight), None if gradients is None else self.product.for_inputs(weight)
        for start in range(0, tokens.shape[0], self.tokens):
            rows, chunk_labels = tokens[start : start + self.tokens], labels[start : start + self.tokens]
            missing = self.tokens - rows.shape[0]
            if self.pads and missing:
                rows, chunk_labels = F.pad(rows, (0, 0, 0, missing)), F.pad(chunk_labels, (0, missing), value=IGNORE)
            # No variable keeps the logits of a chunk until the next one.
            total += self._chunk(rows, *factors, bias, chunk_labels, start, gradients)
        return total

    def _chunk(
        self,
        rows: Tensor,
        forward_weight: Tensor,
        inputs_weight: Tensor | None,
        bias: Tensor | None,
        labels: Tensor,
        start: int,
        gradients: _Gradients | None,
    ) -> Tensor:
        """The loss of a chunk that begins at token `start`; its gradients are added."""
        logits = self.product.forward(rows, forward_weight, bias)
        first, group = self.columns
        statistics = self.statistics(logits, labels, first)
        if group is not None:
            gathered = statistics.new_empty((group.size() * 2, statistics.shape[1]))
            all_gather_single(gathered, statistics, group=group)
            gathered = gathered.unflatten(0, (-1, 2))
            statistics = torch.stack([gathered[:, 0].logsumexp(dim=0), gathered[:, 1].sum(dim=0)])
        valid = labels != IGNORE
        if gradients is not None and inputs_weight is not None:
            slope = self.slope(logits, statistics[0], labels, first, valid * self.scale)
            del logits
            gradients.add(self.product, start, rows, inputs_weight, slope)
        return (statistics[0] - statistics[1]).where(valid, 0.0).sum()


def _statistics(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """By token, the log-sum-exp of this rank's columns, and the label's logit if it has that column, else 0: [2, n]."""
    values = logits.float()
    mine, column = _columns(labels, first, logits.shape[1])
    # One kernel, and log-sum-exp has four.
    own_sum = values[:, 0] - torch.log_softmax(values, dim=-1)[:, 0]
    return torch.stack([own_sum, values.gather(1, column).squeeze(1).where(mine, 0.0)])


def _slope(logits: Tensor, log_sum: Tensor, labels: Tensor, first: int, factor: Tensor) -> Tensor:
    """The gradient of this rank's columns: softmax over the whole vocabulary, minus one at the label, times a factor.

    log_sum: of the whole vocabulary, [n]; factor: [n], 0 where the label does not count.
    """
    mine, column = _columns(labels, first, logits.shape[1])
    slope = (logits.float() - log_sum.unsqueeze(1)).exp()
    slope = slope.scatter_add(1, column, -mine.to(slope.dtype).unsqueeze(1))
    return (slope * factor.unsqueeze(1)).to(logits.dtype)


def _statistics_in_parts(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """`_statistics` in eager mode: some rows at a time, so that copies are small and stay in a CPU's cache."""
    size = part_rows(logits.shape[1], logits.device.type)
    parts = zip(logits.split(size), labels.split(size), strict=True)
    return torch.cat([_statistics(part, part_labels, first) for part, part_labels in parts], dim=1)


def _slope_in_parts(logits: Tensor, log_sum: Tensor, labels: Tensor, first: int, factor: Tensor) -> Tensor:
    """`_slope` in eager mode: some rows at a time, in the place of the logits."""
    size = part_rows(logits.shape[1], logits.device.type)
    for part, *numbers in zip(*(tensor.split(size) for tensor in (logits, log_sum, labels, factor)), strict=True):
        part_sum, part_labels, part_factor = numbers
        mine, column = _columns(part_labels, first, part.shape[1])
        # In float32 this is the part itself.
        values = part.float()
        values.sub_(part_sum.unsqueeze(1)).exp_()
        values.scatter_add_(1, column, -mine.to(values.dtype).unsqueeze(1))
        values.mul_(part_factor.unsqueeze(1))
        if values is not part:
            part.copy_(values)
    return logits


def _columns(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Whether a rank has the label's column, and its index as [n, 1], 0 if it has not."""
    mine = (labels >= first) & (labels < first + columns)
    return mine, (labels - first).where(mine, 0).unsqueeze(1)


class _HeadAndLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Any, bias: Tensor | None, labels: Tensor, work: _Work) -> Tensor:
        adds = work.writes_gradient and weight.requires_grad
        gradients = _Gradients(
            tokens,
            weight=local_part(weight.grad) if adds and weight.grad is not None else None,
            needs_weight=weight.requires_grad,
            needs_bias=bias is not None and ctx.needs_input_grad[2],
        )
        total = work.run(tokens, weight, bias, labels, gradients)
        if adds:
            if weight.grad is None:
                weight.grad = distributed_like(weight, in_gradient_dtype(weight, gradients.weight))
            gradients.weight = None
        ctx.gradients, ctx.work, ctx.weight = gradients, work, None if adds else weight
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients: _Gradients = ctx.gradients
        # Freed here, because the graph may live until the end of the step.
        del ctx.gradients
        # 1, because the caller runs the backward of scale · loss.
        factor = grad_outputs[0] / ctx.work.scale
        of_weight = None if gradients.weight is None else distributed_like(ctx.weight, gradients.weight.mul_(factor))
        of_bias = None if gradients.bias is None else gradients.bias.mul_(factor)
        return gradients.tokens.mul_(factor), of_weight, of_bias, None, None
