"""Cross-entropy of whole logits, of logits split over the vocabulary, or computed with the head in chunks of tokens."""

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
from titanlab.parallelism.collectives import gather_first
from titanlab.parallelism.pipeline_weights import add_product
from titanlab.techniques.precision.product import PLAIN, product_of, rows

IGNORE = -100


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in float32, summed over labels that are not IGNORE.

    logits: [batch, seq, vocab]; labels: [batch, seq]; returns a scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


# (function that runs the model and returns its output, labels [batch, seq]) → the loss, a float32 scalar
Loss = Callable[[Callable[[], Tensor], Tensor], Tensor]


def of_logits(function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    """The `Loss` of a model that returns logits; `function`: (logits, labels) → the loss."""
    # No variable refers to the logits: they are freed as soon as the loss is known.
    return lambda compute, labels: function(compute(), labels)


class Columns(NamedTuple):
    """The columns of the vocabulary that a rank has.

    Attributes:
        group: the ranks that have the other columns; None: this rank has all columns.
    """

    first: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocab_size: int) -> Columns:
        """This rank's columns, cut as DTensor cuts them: parts of ceil(vocab_size / ranks), the last ones smaller."""
        return cls(min(group.rank() * -(-vocab_size // group.size()), vocab_size), group)


class SplitLoss:
    """`loss_sum` of logits whose columns are split over the ranks of a group; the same scalar on every rank.

    Each rank sends two numbers per token: the log-sum-exp of its columns, and the label's logit, or 0 if another rank
    has the label's column (Megatron-LM, arXiv 1909.08053, section 3, sends three numbers).

    Args:
        compiled: compiles a function without communication; None: nothing is compiled.
    """

    def __init__(
        self, columns: Columns, *, compiled: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    ) -> None:
        self.columns = columns
        self.statistics = _statistics_in_parts if compiled is None else compiled(_statistics)
        self.slope = _slope_in_parts if compiled is None else compiled(_slope)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits: [batch, seq, this rank's part of vocab]; labels: [batch, seq]; returns a float32 scalar."""
        loss: Tensor = _SplitCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self)  # type: ignore[no-untyped-call]
        return loss


def _of_all_ranks(statistics: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """For each token, the log-sum-exp of the whole vocabulary and the label's logit, from all ranks' `_statistics`."""
    gathered = gather_first(statistics, group).unflatten(0, (-1, 2))
    return gathered[:, 0].logsumexp(dim=0), gathered[:, 1].sum(dim=0)


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, split: SplitLoss) -> Tensor:
        first, group = split.columns
        assert group is not None
        # Detached, so that one compilation serves training and evaluation.
        log_sum, logit = _of_all_ranks(split.statistics(logits.detach(), labels, first), group)
        valid = labels != IGNORE
        ctx.save_for_backward(logits, log_sum, labels, valid)
        ctx.split = split
        return (log_sum - logit).where(valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum, labels, valid = ctx.saved_tensors
        # In eager mode the gradient overwrites the logits.
        logits = logits.clone() if ctx.split.slope is _slope_in_parts else logits
        return ctx.split.slope(logits, log_sum, labels, ctx.split.columns.first, valid * gradients[0]), None, None


class ChunkedLoss:
    """The cross-entropy of a model, summed over valid labels, computed by its head in chunks of tokens.

    Only one chunk's logits exist at a time. The forward pass computes the gradients too, chunk by chunk, so that a
    chunk's logits are computed once and freed; the backward pass only hands the gradients on (docs/decisions/0039).

    This replaces the `forward` of the head. While the loss is being computed, the head returns the loss; at other times
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
            head: a linear layer [dim → vocabulary], or a module without a parameter that gets the embedding's table as
                a second argument.
            tokens: number of tokens in a chunk.
            scale: the caller runs the backward pass of scale · loss; if a tensor, its value may change between steps.
            columns: the columns of this rank's part of the head's weight, which may be a DTensor.
            gathered: the head's input → all tokens of the microbatch, [tokens, dim]; None: the input [batch, seq, dim]
                already has all tokens.
            compiled: compiles a function without communication; None: nothing is compiled.
            writes_gradient: the forward pass adds the gradient of the weight to `weight.grad` itself, instead of the
                backward pass. A pipeline needs this: a schedule may run many forward passes before the first backward
                pass, and each would keep a tensor of the weight's size.
        """
        self.scale, self.writes_gradient = scale, writes_gradient
        self._head, self._gathered, self._logits = head, gathered or rows, head.forward
        self._labels: Tensor | None = None
        self._tokens, self._columns, self.product = tokens, columns, product_of(head)
        self._statistics = _statistics_in_parts if compiled is None else compiled(_statistics)
        self._slope = _slope_in_parts if compiled is None else compiled(_slope)
        # Compiled code accepts chunks of one size only.
        self._pads = compiled is not None
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
            loss: Tensor = _HeadAndLoss.apply(*inputs, labels, self)  # type: ignore[no-untyped-call]
            return loss
        return self.in_chunks(*inputs, labels, None)

    def in_chunks(
        self, tokens: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, gradients: _Gradients | None
    ) -> Tensor:
        """The loss of all tokens [tokens, dim]; adds its gradients to `gradients`."""
        product, head, (first, group) = self.product, local_part(weight), self._columns
        total = torch.zeros((), dtype=torch.float32, device=tokens.device)
        # Cast the weight once, not for each chunk.
        head, factor = product.for_forward(head), None if gradients is None else product.for_inputs(head)
        for start in range(0, tokens.shape[0], self._tokens):
            chunk, chunk_labels = tokens[start : start + self._tokens], labels[start : start + self._tokens]
            missing = self._tokens - chunk.shape[0]
            if self._pads and missing:
                chunk, chunk_labels = F.pad(chunk, (0, 0, 0, missing)), F.pad(chunk_labels, (0, missing), value=IGNORE)
            logits = product.forward(chunk, head, bias)
            statistics = self._statistics(logits, chunk_labels, first)
            log_sum, logit = statistics if group is None else _of_all_ranks(statistics, group)
            valid = chunk_labels != IGNORE
            total += (log_sum - logit).where(valid, 0.0).sum()
            # Free every tensor of the size of the logits before the next chunk.
            if gradients is None or factor is None:
                del logits
                continue
            slope = self._slope(logits, log_sum, chunk_labels, first, valid * self.scale)
            del logits
            part = gradients.tokens[start : start + chunk.shape[0]]
            if product is PLAIN and part.shape[0] == chunk.shape[0]:
                torch.mm(slope, factor, out=part)
            else:
                part.copy_(product.of_inputs(slope, factor)[: part.shape[0]])
            if weight.requires_grad:
                gradients.weight = add_product(product, gradients.weight, slope, chunk)
            if bias is not None and bias.requires_grad:
                of_bias = slope.sum(0)
                gradients.bias = of_bias if gradients.bias is None else gradients.bias + of_bias
            del slope
        return total


@dataclass
class _Gradients:
    """The gradients of the head's inputs and parameters, filled chunk by chunk.

    Attributes:
        tokens: [tokens, dim].
        weight: gradient of this rank's part, [columns, dim]; None: no chunk has added to it yet, or none is needed.
        bias: [columns]; None: as for `weight`.
    """

    tokens: Tensor
    weight: Tensor | None
    bias: Tensor | None = None


def _statistics(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """For each token, log-sum-exp of this rank's columns; label's logit, or 0 if its column is elsewhere: [2, n]."""
    values = logits.float()
    mine, column = _column_of_label(labels, first, logits.shape[1])
    # This takes one kernel; torch.logsumexp would take four.
    own_sum = values[:, 0] - torch.log_softmax(values, dim=-1)[:, 0]
    return torch.stack([own_sum, values.gather(1, column).squeeze(1).where(mine, 0.0)])


def _slope(logits: Tensor, log_sum: Tensor, labels: Tensor, first: int, factor: Tensor) -> Tensor:
    """The gradient of this rank's columns: softmax over the whole vocabulary, minus one at the label, times a factor.

    log_sum: log-sum-exp of the whole vocabulary, [n]; factor: [n], 0 where the label does not count.
    """
    mine, column = _column_of_label(labels, first, logits.shape[1])
    slope = (logits.float() - log_sum.unsqueeze(1)).exp()
    slope = slope.scatter_add(1, column, -mine.to(slope.dtype).unsqueeze(1))
    return (slope * factor.unsqueeze(1)).to(logits.dtype)


def _statistics_in_parts(logits: Tensor, labels: Tensor, first: int) -> Tensor:
    """`_statistics` in eager mode: some rows at a time, so that copies are small and stay in a CPU's cache."""
    size = part_rows(logits.shape[1], logits.device.type)
    parts = zip(logits.split(size), labels.split(size), strict=True)
    return torch.cat([_statistics(part, part_labels, first) for part, part_labels in parts], dim=1)


def _slope_in_parts(logits: Tensor, log_sum: Tensor, labels: Tensor, first: int, factor: Tensor) -> Tensor:
    """`_slope` in eager mode: some rows at a time, written over the logits."""
    size = part_rows(logits.shape[1], logits.device.type)
    for part, *numbers in zip(*(tensor.split(size) for tensor in (logits, log_sum, labels, factor)), strict=True):
        part_sum, part_labels, part_factor = numbers
        mine, column = _column_of_label(part_labels, first, part.shape[1])
        # If the logits are float32, `values` is `part` itself.
        values = part.float()
        values.sub_(part_sum.unsqueeze(1)).exp_()
        values.scatter_add_(1, column, -mine.to(values.dtype).unsqueeze(1))
        values.mul_(part_factor.unsqueeze(1))
        if values is not part:
            part.copy_(values)
    return logits


def _column_of_label(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Whether this rank has the label's column; and the column's index [n, 1], 0 if the rank lacks it."""
    mine = (labels >= first) & (labels < first + columns)
    return mine, (labels - first).where(mine, 0).unsqueeze(1)


class _HeadAndLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Any, bias: Tensor | None, labels: Tensor, chunked: ChunkedLoss
    ) -> Tensor:
        adds = chunked.writes_gradient and weight.requires_grad
        written = local_part(weight.grad) if adds and weight.grad is not None else None
        gradients = _Gradients(torch.empty_like(tokens), written)
        total = chunked.in_chunks(tokens, weight, bias, labels, gradients)
        if adds and weight.grad is None:
            weight.grad = distributed_like(weight, in_gradient_dtype(weight, gradients.weight))
        # Keep only the results, so that the cast weight is freed here.
        ctx.gradients = gradients.tokens, None if adds else gradients.weight, gradients.bias
        ctx.scale, ctx.weight = chunked.scale, None if adds else weight
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        of_tokens, of_weight, of_bias = ctx.gradients
        # Free the gradients here, because the graph may live until the end of the step.
        del ctx.gradients
        # The factor is 1, because the caller runs the backward of scale · loss.
        factor = grad_outputs[0] / ctx.scale
        of_weight = None if of_weight is None else distributed_like(ctx.weight, of_weight.mul_(factor))
        of_bias = None if of_bias is None else of_bias.mul_(factor)
        return of_tokens.mul_(factor), of_weight, of_bias, None, None
