"""Cross-entropy, of whole logits or of logits that stay split over the vocabulary."""

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


class Parts(NamedTuple):
    """What a rank computes for a split loss by itself: what others have to say lies between.

    Each may be exchanged for a compiled version of itself.
    """

    own: Callable[..., Any]
    whole: Callable[..., Any]
    slope: Callable[..., Any]


class SplitLoss:
    """`loss_sum` of logits of which each rank of a group has some columns, the same scalar on every rank.

    Each rank takes the log-sum-exp of its own columns and the label's logit where it has it; these two numbers a
    token are all that is sent (Megatron-LM, arXiv 1909.08053, section 3, sends three).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        vocab_size: int,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        """The vocabulary is split as DTensor splits: equal parts, rounded up, from the first rank on.

        Args:
            compiled: what to make of a function of tensors that computes without other ranks.
        """
        self.group = group
        part = -(-vocab_size // group.size())
        self.first = min(group.rank() * part, vocab_size)
        self.parts = Parts(compiled(_own), compiled(_whole), compiled(_slope))

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """logits: [batch, seq, this rank's part of vocab]; labels: [batch, seq]; returns a float32 scalar."""
        loss: torch.Tensor = _SplitCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits.flatten(0, 1), labels.flatten(), self.first, self.group, self.parts
        )
        return loss


def _own(logits: torch.Tensor, labels: torch.Tensor, first: int) -> tuple[torch.Tensor, ...]:
    """Logarithms of probabilities within this rank's columns, and what to send: [2, tokens], two numbers a token."""
    # Relative to this rank's own sum; the shift to the whole vocabulary's follows.
    own = torch.log_softmax(logits.float(), dim=-1)
    own_sum = logits[:, 0].float() - own[:, 0]
    mine = (labels >= first) & (labels < first + logits.shape[1])
    place = (labels - first).where(mine, 0).unsqueeze(1)
    # Log-sum-exp, and the label's logit or what adds nothing.
    return own, mine, place, torch.stack([own_sum, (own.gather(1, place).squeeze(1) + own_sum).where(mine, 0.0)])


def _whole(every: torch.Tensor, own_sum: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The loss, given what all ranks sent: [2 · ranks, tokens]; how much lower logarithms are in the whole vocabulary;
    which labels count.
    """
    every = every.unflatten(0, (-1, 2))
    whole_sum = every[:, 0].logsumexp(dim=0)
    valid = labels != IGNORE
    total = (whole_sum - every[:, 1].sum(dim=0)).where(valid, 0.0).sum()
    return total, own_sum - whole_sum, valid


def _slope(
    gradient: torch.Tensor,
    own: torch.Tensor,
    shift: torch.Tensor,
    place: torch.Tensor,
    mine: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """The gradient of this rank's columns: softmax over the whole vocabulary, less one at the label."""
    slope = own.add(shift.unsqueeze(1)).exp_()
    slope.scatter_add_(1, place, -mine.to(slope.dtype).unsqueeze(1))
    return slope.mul_((gradient * valid).unsqueeze(1))


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: dist.ProcessGroup, parts: Parts
    ) -> torch.Tensor:
        # Detached, as it counts with gradients and without: one compilation for both.
        own, mine, place, sent = parts.own(logits.detach(), labels, first)
        every = sent.new_empty((group.size() * 2, sent.shape[1]))
        all_gather_single(every, sent, group=group)
        total: torch.Tensor
        total, shift, valid = parts.whole(every, sent[0], labels)
        ctx.save_for_backward(own, shift, place, mine, valid)
        ctx.dtype, ctx.slope = logits.dtype, parts.slope
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slope: torch.Tensor = ctx.slope(gradients[0], *ctx.saved_tensors)
        return slope.to(ctx.dtype), None, None, None, None
