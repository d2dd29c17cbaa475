"""What the activations of a whole step take: by the allocator on real tensors, and by storages for one rank of many."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from titanlab.distributed import ALONE, build_mesh, open_world
from titanlab.parallelism.pipeline_stage import ScheduledStage
from titanlab.prove.rank_trace import _Made, fake_world
from titanlab.train import StepBatch
from titanlab.train.assemble import assemble

LOG_PROBABILITY_BYTES = 4


def allocated_before_backward(made) -> int:
    """Bytes that the allocator has given since a step began when the first backward of its microbatches begins."""

    @contextlib.contextmanager
    def phase(name):
        with record_function(f"phase {name}"):
            yield

    with open_world(ALONE, accelerator="cpu", seed=0, deterministic=False) as world:
        assembled = assemble(made, world, build_mesh(made.layout, "cpu"), phase=phase)
        tokens = torch.arange(made.local_batch * made.training.seq_len).view(made.local_batch, -1) % 256
        batch = StepBatch(tokens, tokens, tokens.numel())
        assembled.forward_backward(batch)  # what torch makes once
        for parameter in assembled.model.parameters():
            parameter.grad = None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            assembled.forward_backward(batch)
    with tempfile.TemporaryDirectory() as folder:
        profiled.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    begins = min(event["ts"] for event in events if event["name"] == "phase backward")
    return sum(event["args"]["Bytes"] for event in events if event["name"] == "[memory]" and event["ts"] < begins)


def most_between_actions(made, rank: int) -> int:
    """The largest sum of the storages that a pipeline's step has made, after any action of a rank."""
    sums = []
    methods = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    with fake_world(rank, made.world, nccl=False) as (world, mode), contextlib.ExitStack() as stack:
        assembled = assemble(made, world, build_mesh(made.layout, "cpu"))
        parameters = list(assembled.model.parameters())
        tokens = torch.zeros(made.local_batch, made.training.seq_len, dtype=torch.int64)
        stack.enter_context(mode)
        storages = stack.enter_context(_Made()).storages

        def look():
            gradients = {each.grad.untyped_storage()._cdata for each in parameters if each.grad is not None}
            alive = {key: ref() for key, ref in storages.items() if key not in gradients}
            sums.append(sum(storage.nbytes() for storage in alive.values() if storage is not None))

        def looking(method):
            def call(*inputs, **named):
                result = method(*inputs, **named)
                look()
                return result

            return call

        for name in methods:
            stack.enter_context(patch.object(ScheduledStage, name, looking(getattr(ScheduledStage, name))))
        assembled.forward_backward(StepBatch(tokens, tokens, 1))
    return max(sums)


def allocated_at(made, phase_name: str, rank: int = 0) -> list[int]:
    """Bytes of the storages that a rank's step has made and that exist whenever a phase of its step begins."""
    sums = []
    with fake_world(rank, made.world, nccl=True) as (world, mode):

        @contextlib.contextmanager
        def phase(name):
            if name == phase_name:
                alive = [ref() for ref in storages.values()]
                sums.append(sum(storage.nbytes() for storage in alive if storage is not None))
            yield

        assembled = assemble(made, world, build_mesh(made.layout, "cpu"), phase=phase)
        tokens = torch.zeros(made.local_batch, made.training.seq_len // made.layout.context, dtype=torch.int64)
        with mode, _Made() as seen:
            storages = seen.storages
            assembled.forward_backward(StepBatch(tokens, tokens, 1))
    return sums
