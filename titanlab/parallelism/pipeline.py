"""Pipeline parallelism: torch's schedule runtime executes titanlab's lists of actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# Private, but torch's only executor of arbitrary lists of actions; its public schedules are built on it.
from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

from titanlab.parallelism.loss import IGNORE, Loss
from titanlab.parallelism.pipeline_stage import ScheduledStage
from titanlab.records import Messages
from titanlab.techniques.model.attention import Packed
from titanlab.techniques.profiler.contract import Phase, nothing
from titanlab.techniques.schedule.action import Action, Kind

# Names instead of enum members, because only torch 2.15 has WAIT_SEND_F, a separate action that waits for a send.
_ACTIONS_OF_FORWARDS = ("FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F")
_FSDP_ACTIONS = (_ComputationType.UNSHARD, _ComputationType.RESHARD)


class Pipeline:
    """The stages of one rank of a pipeline, and the order in which they compute.

    Gradients are those of scale · Σ loss over all microbatches of the step. FSDP's reduction divides by the size of its
    mesh; `scale` has to compensate for that.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        actions: Sequence[Sequence[Action]],
        placement: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
        loss: Loss,
        scale: float | Tensor,
        hidden_shape: Sequence[int],
        hidden_dtype: torch.dtype,
        microbatch: int | None = None,
        reduces_each: bool = False,
        phase: Phase = nothing,
    ) -> None:
        """Prepare to run a schedule; nothing is computed or sent.

        Args:
            stages: this rank's stages by number. The first takes tokens [microbatch, seq], the others hidden states;
                all take positions [seq] as well. The last returns what `loss` expects. Stages may be under FSDP.
            actions: for each rank of the group, its actions in order.
            placement: for each stage, the rank of the group that has it.
            loss: (function that runs the last stage, labels [microbatch, seq]) → float32 scalar, summed over these
                labels. It is called once per microbatch.
            hidden_shape: shape of hidden states between stages: [microbatch, seq, dim], or with sequence parallelism
                [1, this rank's tokens of a microbatch, dim].
            microbatch: sequences of a microbatch; None: the first number of hidden_shape.
            reduces_each: whether FSDP reduces gradients of blocks in each backward, not only at the end of the step.
        """
        rank = dist.get_rank(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._runs = False
        self._device = device
        self._microbatch = microbatch or hidden_shape[0]
        self._microbatches = 1 + max(action.microbatch for action in actions[rank])
        split = {action.stage for action in actions[rank] if action.kind is Kind.INPUT}
        self._stages = [
            ScheduledStage(
                stages[number],
                number,
                placement,
                group=group,
                device=device,
                hidden=(torch.Size(hidden_shape), hidden_dtype),
                loss=loss,
                scale=scale,
                split_backward=number in split,
                reduces_each=reduces_each,
                phase=phase,
            )
            for number in sorted(stages)
        ]
        self._train = self._runtime(actions)
        self._evaluate = self._runtime(actions)
        order = self._evaluate.pipeline_order_with_comms[rank]
        order[:] = [action for action in order if action.computation_type.name in _ACTIONS_OF_FORWARDS]

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, positions: Tensor, documents: Packed | None = None
    ) -> Tensor:
        """Run all microbatches of a step; add their gradients to those of the stages' parameters.

        Args:
            tokens, labels: [microbatches · microbatch, seq] int64, the same on all ranks of the pipeline.
            positions: [seq] int64.
            documents: the documents in these sequences; stages get them as arguments instead of `positions`.

        Returns:
            The sum of the losses, float32; zero on ranks that do not have the last stage.
        """
        if tokens.shape[0] != self._microbatch * self._microbatches:
            raise ValueError(
                f"{tokens.shape[0]} sequences for {self._microbatches} microbatches of {self._microbatch} each"
            )
        for stage in self._stages:
            stage.begin_step()
        return self._run(self._train, tokens, labels, positions, documents)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, labels: Tensor, positions: Tensor, documents: Packed | None = None) -> Tensor:
        """The sum of the losses of up to microbatches · microbatch sequences; zero on ranks without the last stage.

        A smaller batch is padded with labels that do not count, so that all ranks run the same collectives.
        """
        whole = self._microbatch * self._microbatches
        missing = whole - tokens.shape[0]
        if missing < 0:
            raise ValueError(f"{tokens.shape[0]} sequences are more than the {whole} of a step")
        tokens, labels = F.pad(tokens, (0, 0, 0, missing)), F.pad(labels, (0, 0, 0, missing), value=IGNORE)
        if documents is not None:
            documents = documents.padded(missing)
        total = self._run(self._evaluate, tokens, labels, positions, documents)
        for stage in self._stages:
            stage.free_parameters()
        return total

    def messages(self) -> Messages:
        """The state of sends and receives, for the diagnosis of a hang; another thread may call it at any time."""
        peers = list(enumerate(self._ranks))
        return Messages(
            runs=self._runs,
            stages=tuple(stage.stage_index for stage in self._stages),
            sent={rank: sum(stage.sent[peer] for stage in self._stages) for peer, rank in peers},
            received={rank: sum(stage.received[peer] for stage in self._stages) for peer, rank in peers},
            waiting=next((waiting for stage in self._stages if (waiting := stage.waiting) is not None), None),
        )

    def _runtime(self, actions: Sequence[Sequence[Action]]) -> _PipelineScheduleRuntime:
        # The runtime gets no loss function: the last stage computes the loss, and frees the logits earlier.
        runtime = _PipelineScheduleRuntime(
            self._stages, n_microbatches=self._microbatches, loss_fn=None, scale_grads=False
        )
        runtime._prepare_schedule_with_comms(
            {
                rank: [_Action(own.stage, _ComputationType(own.kind.value), own.microbatch) for own in rank_actions]
                for rank, rank_actions in enumerate(actions)
            }
        )
        # FSDP's own hooks gather parameters block by block while other blocks compute, once per step or per forward.
        # The runtime's actions would gather the whole stage first, and again after each RESHARD.
        order = runtime.pipeline_order_with_comms[runtime.rank]
        order[:] = [action for action in order if action.computation_type not in _FSDP_ACTIONS]
        # The stages know their shapes, so the runtime must not infer them.
        runtime._stages_forward_initialized = runtime._stages_backward_initialized = True
        # Without a loss function the runtime of torch 2.15 would reduce no gradients.
        runtime._has_backward = True
        return runtime

    def _run(
        self,
        runtime: _PipelineScheduleRuntime,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor,
        documents: Packed | None,
    ) -> Tensor:
        size = self._microbatch
        total = torch.zeros((), device=self._device)
        self._runs = True
        try:
            microbatches = []
            for begin in range(0, size * self._microbatches, size):
                row = slice(begin, begin + size)
                places = (positions,) if documents is None else documents.arguments(row)
                microbatches.append((tokens[row], labels[row], *places))
            # torch 2.15 removes each stage from this set when its gradients are reduced.
            runtime.unsharded_stages = {stage.stage_index for stage in self._stages}
            runtime._step_microbatches(microbatches, return_outputs=False)
            for stage in self._stages:
                if stage.loss_sum is not None:
                    total = stage.loss_sum
                stage.end_step()
        finally:
            for stage in self._stages:
                stage.clear_runtime_states()
        self._runs = False
        return total
