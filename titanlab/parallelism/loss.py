"""Cross-entropy of whole logits, or of logits that are split over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlab.parallelism.collectives import all_gather_single

IGNORE = -100


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in float32, summed over labels that are not IGNORE.

    logits: [batch, seq, vocab]; labels: [batch, seq]; returns a scalar.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


# (runs the model and returns its output, labels [batch, seq]) → the loss, a float32 scalar
Loss = Callable[[Callable[[], torch.Tensor], torch.Tensor], torch.Tensor]


def of_logits(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    """The loss of a model that returns logits, by a function of (logits, labels)."""
    # No variable refers to the logits, so that they are freed as soon as the loss is known.
    return lambda compute, labels: function(compute(), labels)


class LossFunctions(NamedTuple):
    """The functions of a split loss that compute without communication; each may be compiled."""

    own: Callable[..., Any]  # before the all-gather
    whole: Callable[..., Any]  # after it
    slope: Callable[..., Any]  # backward


class SplitLoss:
    """`loss_sum` of logits of which each rank of a group has some columns; the same scalar on every rank.

    Each rank sends two numbers per token: the log-sum-exp of its columns, and the label's logit if it has that column
    (Megatron-LM, arXiv 1909.08053, section 3, sends three).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        vocab_size: int,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        """The vocabulary is split as DTensor splits it: parts of ceil(vocab_size / ranks), the last ones smaller.

        Args:
            compiled: compiles a function of tensors that does not communicate.
        """
        self.group = group
        part = -(-vocab_size // group.size())
        self.first = min(group.rank() * part, vocab_size)
        self.parts = LossFunctions(compiled(_own), compiled(_whole), compiled(_slope))

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """logits: [batch, seq, this rank's part of vocab]; labels: [batch, seq]; returns a float32 scalar."""
        loss: torch.Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.flatten(0, 1), labels.flatten(), self.first, self.group, self.parts
        )
        return loss


def _own(logits: torch.Tensor, labels: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
    """Log-probabilities within this rank's columns, the label's mask and column, and [2, tokens] to send."""
    # Normalised over this rank's columns only; `_whole` computes the shift to the whole vocabulary.
    own = torch.log_softmax(logits.float(), dim=-1)
    own_sum = logits[:, 0].float() - own[:, 0]
    mine = (labels >= first) & (labels < first + logits.shape[1])
    column = (labels - first).where(mine, 0).unsqueeze(1)
    # To send: log-sum-exp, and the label's logit or 0.
    return own, mine, column, torch.stack([own_sum, (own.gather(1, column).squeeze(1) + own_sum).where(mine, 0.0)])


def _whole(gathered: torch.Tensor, own_sum: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The loss, the shift of log-probabilities from this rank's columns to the whole vocabulary, and the valid labels.

    gathered: [2 · ranks, tokens], from all ranks.
    """
    gathered = gathered.unflatten(0, (-1, 2))
    whole_sum = gathered[:, 0].logsumexp(dim=0)
    valid = labels != IGNORE
    total = (whole_sum - gathered[:, 1].sum(dim=0)).where(valid, 0.0).sum()
    return total, own_sum - whole_sum, valid


def _slope(
    gradient: torch.Tensor,
    own: torch.Tensor,
    shift: torch.Tensor,
    column: torch.Tensor,
    mine: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """The gradient of this rank's columns: softmax over the whole vocabulary, minus one at the label."""
    slope = own.add(shift.unsqueeze(1)).exp_()
    slope.scatter_add_(1, column, -mine.to(slope.dtype).unsqueeze(1))
    return slope.mul_((gradient * valid).unsqueeze(1))


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: dist.ProcessGroup, parts: LossFunctions
    ) -> torch.Tensor:
        # Detached, so that one compilation serves training and evaluation.
        own, mine, column, sent = parts.own(logits.detach(), labels, first)
        gathered = sent.new_empty((group.size() * 2, sent.shape[1]))
        all_gather_single(gathered, sent, group=group)
        total: torch.Tensor
        total, shift, valid = parts.whole(gathered, sent[0], labels)
        ctx.save_for_backward(own, shift, column, mine, valid)
        ctx.dtype, ctx.slope = logits.dtype, parts.slope
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slope: torch.Tensor = ctx.slope(gradients[0], *ctx.saved_tensors)
        return slope.to(ctx.dtype), None, None, None, None
