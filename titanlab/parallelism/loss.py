"""Cross-entropy, of whole logits or of logits that stay split over the vocabulary."""

from __future__ import annotations

from typing import Any

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


class SplitLoss:
    """`loss_sum` of logits of which each rank of a group has some columns, the same scalar on every rank.

    Each rank takes the log-sum-exp of its own columns and the label's logit where it has it; these two numbers a
    token are all that is sent (Megatron-LM, arXiv 1909.08053, section 3, sends three).
    """

    def __init__(self, group: dist.ProcessGroup, *, vocab_size: int) -> None:
        """The vocabulary is split as DTensor splits: equal parts, rounded up, from the first rank on."""
        self.group = group
        part = -(-vocab_size // group.size())
        self.first = min(group.rank() * part, vocab_size)

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """logits: [batch, seq, this rank's part of vocab]; labels: [batch, seq]; returns a float32 scalar."""
        loss: torch.Tensor = _SplitCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.first, self.group)
        return loss


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        # Relative to this rank's own sum; the shift to the whole vocabulary's follows.
        own = torch.log_softmax(logits.float(), dim=-1)
        own_sum = logits[:, 0].float() - own[:, 0]
        mine = (labels >= first) & (labels < first + logits.shape[1])
        place = (labels - first).where(mine, 0).unsqueeze(1)
        # Two numbers a token: log-sum-exp, and the label's logit or what adds nothing.
        sent = torch.stack([own_sum, (own.gather(1, place).squeeze(1) + own_sum).where(mine, 0.0)])
        every = sent.new_empty((group.size() * 2, sent.shape[1]))
        all_gather_single(every, sent, group=group)
        every = every.unflatten(0, (-1, 2))
        whole_sum = every[:, 0].logsumexp(dim=0)
        valid = labels != IGNORE
        ctx.save_for_backward(own, own_sum - whole_sum, place, mine, valid)
        ctx.dtype = logits.dtype
        total: torch.Tensor = (whole_sum - every[:, 1].sum(dim=0)).where(valid, 0.0).sum()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own, shift, place, mine, valid = ctx.saved_tensors
        (gradient,) = gradients
        # softmax over the whole vocabulary, less one at the label.
        slope = own.add(shift.unsqueeze(1)).exp_()
        slope.scatter_add_(1, place, -mine.to(slope.dtype).unsqueeze(1))
        slope.mul_((gradient * valid).unsqueeze(1))
        return slope.to(ctx.dtype), None, None, None
