"""One stage of a pipeline, with the methods that torch's schedule runtime calls: receive, compute, send."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from titanlab.costs import BLOCKS
from titanlab.parallelism.loss import Loss
from titanlab.parallelism.pipeline_weights import DeferredWeights
from titanlab.records import Waiting
from titanlab.techniques.profiler.contract import Phase, nothing

_WAITS = "exposed_pipeline"


class ScheduledStage(PipelineStage):
    """A stage that knows the shape of everything it sends and receives, and frees tensors as early as possible.

    torch's own stage gets shapes from its neighbours or from an extra forward, keeps buffers for all microbatches
    between steps, and keeps every microbatch's logits until the step ends. This class has the same methods for the
    runtime. It posts sends and receives itself, so that all of torch 2.11 to 2.15 behave alike.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        placement: Sequence[int],
        *,
        group: dist.ProcessGroup,
        device: torch.device,
        hidden: tuple[torch.Size, torch.dtype],
        loss: Loss,
        scale: float | Tensor,
        split_backward: bool,
        reduces_each: bool = False,
        phase: Phase = nothing,
    ) -> None:
        """Prepare stage `number` of a pipeline; nothing is computed or sent.

        Args:
            placement: for each stage, the rank of the group that has it.
            hidden: shape and dtype of the hidden states between stages.
            loss: computes a scalar with the last stage's module, in the last stage only.
            scale: gradients are those of scale · loss.
            split_backward: whether some backwards compute gradients of inputs first and those of weights later.
            reduces_each: whether FSDP reduces gradients of blocks (children of `module.layers`) in each backward. Other
                gradients are reduced at the end of the step: a forward may write the gradient of the head, but all
                reductions of one FSDP unit must cover the same parameters.
        """
        super().__init__(module, number, len(placement), device, group=group)
        if not isinstance(module, FSDPModule) and any(isinstance(part, FSDPModule) for part in module.modules()):
            raise ValueError(f"stage {number} has parts under FSDP but is not: its gradients would never be reduced")
        self.loss_sum: Tensor | None = None
        self._placement, self._global_ranks = placement, dist.get_process_group_ranks(group)
        self._shape, self._dtype = hidden
        self._loss, self._scale = loss, scale
        self._deferred = DeferredWeights(module) if split_backward else None
        parts = module.get_submodule(BLOCKS).modules() if reduces_each else ()
        self._reduced_each = [part for part in parts if isinstance(part, FSDPModule)]
        self._phase = phase
        # By (microbatch, neighbouring stage): tensors that arrived, until used, and tensors computed, until sent.
        self._arrived: dict[tuple[int, int], tuple[Tensor, dist.Work | None]] = {}
        self._computed: dict[tuple[int, int], Tensor] = {}
        self._pending: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._sends: list[tuple[dist.Work, Waiting]] = []
        # For the diagnosis of hangs: torch does not record gloo's sends and receives.
        self.waiting: Waiting | None = None
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def begin_step(self) -> None:
        """Let torch reduce gradients and free parameters at the end of the step (`perform_reduce_grad`), not earlier.

        With `reduces_each`, FSDP reduces the gradients of blocks in each backward all the same.
        """
        if isinstance(self.submod, FSDPModule):
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
            self._reduce_blocks(all_reduce=False)
            # In torch 2.15 this method takes the role of `set_is_last_backward`.
            finalize_by_hand = getattr(self.submod, "set_manual_backward_finalization", None)
            if callable(finalize_by_hand):
                finalize_by_hand(True)

    def _reduce_blocks(self, *, all_reduce: bool) -> None:
        """Let blocks reduce in the next backward; `all_reduce`: over replicas too, needed in the last backward only."""
        for unit in self._reduced_each:
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_requires_all_reduce(all_reduce, recurse=False)

    def free_parameters(self) -> None:
        """Free parameters that FSDP has gathered for forwards without a backward."""
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def end_step(self) -> None:
        for work, message in self._sends:
            self.waiting = message
            with self._phase(_WAITS):
                work.wait()
        self.waiting = None
        self.clear_runtime_states()

    def clear_runtime_states(self) -> None:
        """Free everything, even after an error in the middle of a step."""
        self.loss_sum = None
        for held in (self._sends, self._arrived, self._computed, self._pending, self._deferred):
            if held is not None:
                held.clear()

    # The runtime calls the following methods; names and arguments are torch's. Sends and receives are started at once,
    # so the runtime gets empty lists of operations. If a neighbouring stage is on this rank, the runtime calls the
    # methods with `local` in their names instead.

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,  # noqa: FBT001, FBT002 (torch's)
    ) -> Tensor:
        """Compute one microbatch; args: its tokens and labels [microbatch, seq], and the module's further arguments."""
        tokens, labels, *places = args
        hidden = None
        if not self.is_first:
            hidden = self._take(fwd_chunk_id, self.stage_index - 1)
            hidden.requires_grad_(torch.is_grad_enabled())
        stage_input = tokens if hidden is None else hidden
        output: Tensor
        if self.is_last:
            with self._phase("forward"):
                output = self._loss(lambda: self.submod(stage_input, *places), labels)
            # A chunked loss has written a gradient of the head's weight; FSDP itself accumulates only in a backward.
            if torch.is_grad_enabled():
                _sum_in_reduce_dtype(self.submod)
            loss = output.detach()
            self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
            output = output * self._scale
        else:
            with self._phase("forward"):
                output = self.submod(stage_input, *places)
            # If the next stage is on this rank, the runtime hands over the output itself.
            if self._placement[self.stage_index + 1] != self._placement[self.stage_index]:
                self._computed[fwd_chunk_id, self.stage_index + 1] = self._checked(output, "hidden state")
        if output.requires_grad:
            self._pending[fwd_chunk_id] = hidden, output
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,  # noqa: FBT001, FBT002 (torch's)
        last_backward: bool = False,  # noqa: FBT001, FBT002 (torch's)
    ) -> None:
        """The backward of one microbatch; with `full_backward` False, most gradients of weights are deferred."""
        hidden, output = self._pending.pop(bwd_chunk_id)
        gradient = None if self.is_last else self._take(bwd_chunk_id, self.stage_index + 1)
        if last_backward:
            self._reduce_blocks(all_reduce=True)
        with contextlib.ExitStack() as within:
            within.enter_context(self._phase("backward"))
            if not full_backward:
                assert self._deferred is not None
                within.enter_context(self._deferred.collect(bwd_chunk_id))
            torch.autograd.backward(output, gradient)
        if hidden is not None:
            assert hidden.grad is not None
            checked = self._checked(hidden.grad, "gradient of the hidden state")
            self._computed[bwd_chunk_id, self.stage_index - 1] = checked

    def backward_weight_one_chunk(
        self,
        bwd_chunk_id: int,
        last_backward: bool = False,  # noqa: FBT001, FBT002 (torch's)
    ) -> None:
        assert self._deferred is not None
        with self._phase("backward"):
            self._deferred.compute(bwd_chunk_id)
        _sum_in_reduce_dtype(self.submod)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(fwd_chunk_id, self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(bwd_chunk_id, self.stage_index - 1)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive(fwd_chunk_id, self.stage_index - 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._receive(bwd_chunk_id, self.stage_index + 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._arrived[mb_index, self.stage_index - 1] = self._checked(prev_stage_outputs, "hidden state"), None

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor]:
        return (self._computed.pop((mb_index, self.stage_index - 1)),)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        (gradient,) = next_stage_bwd_outputs
        assert gradient is not None
        self._arrived[mb_index, self.stage_index + 1] = gradient, None

    def _send(self, microbatch: int, stage: int) -> list[dist.P2POp]:
        # Completed sends need not be kept. NCCL reports completion by itself, gloo only after a wait.
        self._sends = [(work, message) for work, message in self._sends if not work.is_completed()]
        tensor = self._computed.pop((microbatch, stage))
        work = dist.isend(tensor, group=self.group, group_dst=self._placement[stage])
        assert work is not None
        self._sends.append((work, self._message("send", microbatch, stage)))
        self.sent[self._placement[stage]] += 1
        return []

    def _receive(self, microbatch: int, stage: int) -> list[dist.P2POp]:
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self.device)
        work = dist.irecv(buffer, group=self.group, group_src=self._placement[stage])
        self._arrived[microbatch, stage] = buffer, work
        self.received[self._placement[stage]] += 1
        return []

    def _take(self, microbatch: int, stage: int) -> Tensor:
        """Wait for the tensor of a microbatch from another stage, and return it."""
        tensor, work = self._arrived.pop((microbatch, stage))
        if work is not None:
            self.waiting = self._message("recv", microbatch, stage)
            with self._phase(_WAITS):
                work.wait()
            self.waiting = None
        return tensor

    def _message(self, operation: str, microbatch: int, stage: int) -> Waiting:
        # Hidden states go to later stages, gradients to earlier ones.
        is_forward = (operation == "send") == (stage > self.stage_index)
        return Waiting(
            operation=operation,
            what="hidden state" if is_forward else "gradient",
            microbatch=microbatch,
            stage=self.stage_index,
            peer_stage=stage,
            peer=self._global_ranks[self._placement[stage]],
        )

    def _checked(self, tensor: Tensor, what: str) -> Tensor:
        tensor = tensor.detach()
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.wait()
        if isinstance(tensor, DTensor) or (tensor.shape, tensor.dtype) != (self._shape, self._dtype):
            raise RuntimeError(
                f"stage {self.stage_index}: the {what} is a {type(tensor).__name__} {list(tensor.shape)} of "
                f"{tensor.dtype}, but stages exchange plain tensors {list(self._shape)} of {self._dtype}"
            )
        return tensor.contiguous()


def _sum_in_reduce_dtype(model: nn.Module) -> None:
    """Let FSDP accumulate gradients that were written outside a backward, as it does after each backward.

    FSDP sums microbatches in its reduce dtype; gradients that stay in `grad` would be summed in the parameters' dtype.
    torch 2.11 to 2.13 accumulates in a hook of the backward only, and has no public function for this. In torch 2.15,
    `grad` itself has the reduce dtype (`Tensor.grad_dtype`), and this does nothing.
    """
    for module in model.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            if hasattr(parameter, "to_accumulated_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
