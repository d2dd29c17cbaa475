"""One recipe in this process: what its blocks keep for the backward pass, its peak, and the kernels of a step.

    python -m gpu_session.held RECIPE.json RESULT.json

The steps are those of `titanlab.train.assemble`, on random tokens; the file of the result is written at the end.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from gpu_session.prediction import Facts, composed
from titanlab.distributed import ALONE, World, build_mesh, open_world
from titanlab.parallelism import Gradients
from titanlab.recipe import Recipe
from titanlab.train import Reduction, StepBatch
from titanlab.train.assemble import Assembled, assemble

_KERNELS = 40
# The profiler's own time, by CUPTI's name for it.
_OVERHEAD = "Command Buffer Full"


class Held:
    """What the blocks of a model leave allocated between their begin and their end.

    The modules before and after the blocks are not compiled, so that hooks on them run as they are. The input of the
    first block exists before they begin and the output of the last one exists when they end: the difference counts one
    hidden state for each block, as the account does.
    """

    def __init__(self, model: Any) -> None:
        self.bytes: int | None = None
        self._on_gpu = next(model.parameters()).device.type == "cuda"
        self._begun, self._profile = 0, None
        self._hooks = [
            model.get_submodule("tok_embeddings").register_forward_hook(lambda *_: self._begin()),
            model.get_submodule("norm").register_forward_pre_hook(lambda *_: self._end()),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self) -> None:
        if self._on_gpu:
            self._begun = torch.cuda.memory_allocated()
            return
        # A CPU's allocator has no count; the profiler sees each of its events. torch 2.11 warns without acc_events.
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._profile.__enter__()

    def _end(self) -> None:
        if self._on_gpu:
            self.bytes = torch.cuda.memory_allocated() - self._begun
            return
        assert self._profile is not None
        self._profile.__exit__(None, None, None)
        self.bytes = sum(_allocations(self._profile))


def _allocations(profile: Any) -> list[int]:
    """Bytes that the allocator gave, and took back."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]


def main() -> None:
    """Measure one recipe."""
    given, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    recipe = composed(given["keys"], Facts(**given["facts"]))
    accelerator = recipe.cluster.accelerator
    with open_world(ALONE, accelerator=accelerator, seed=recipe.seed, deterministic=False) as world:
        result = _measured(recipe, world, kernels=given["kernels"])
    out.write_text(json.dumps(result))
    print(json.dumps(result)[:500])


def _measured(recipe: Recipe, world: World, *, kernels: bool) -> dict[str, Any]:
    steps = _Steps(recipe, world)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    # The second step is the first that has gradients and optimizer states from the beginning.
    first = steps.one()
    seconds = [steps.one() for _ in range(max(1, recipe.training.steps - recipe.training.unmeasured_steps))]
    result: dict[str, Any] = {
        "first_step_seconds": first,
        "step_seconds": statistics.median(seconds),
        "step_seconds_all": seconds,
        "tokens_per_second": recipe.tokens_per_step / statistics.median(seconds),
        "loss": steps.loss,
    }
    if on_gpu:
        result["allocated_bytes"] = torch.cuda.max_memory_allocated()
        result["reserved_bytes"] = torch.cuda.max_memory_reserved()
    else:
        result["resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if kernels:
        result["kernels"] = _kernels(steps, on_gpu=on_gpu)
        return result
    held = Held(steps.assembled.model)
    # What a collection frees meanwhile would be missing.
    gc.collect()
    gc.disable()
    steps.one()
    held.close()
    result["held_bytes"] = held.bytes
    return result


class _Steps:
    """The steps of training, on one batch of random tokens."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        self.recipe, self.world = recipe, world
        self.assembled: Assembled = assemble(recipe, world, build_mesh(recipe.layout, world.device.type))
        parameters = dict(self.assembled.model.named_parameters())
        self.optimizer = recipe.optimizer.implementation().build(parameters)
        self.gradients = Gradients(parameters.values(), world.world)
        self.assembled.model.train()
        self.assembled.after_update()
        sequences, seq = recipe.training.global_batch, recipe.training.seq_len
        ids = torch.randint(0, recipe.model.account().vocab_size, (sequences, seq + 1), device=world.device)
        self.batch = StepBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), sequences * seq)
        self.loss = 0.0

    def one(self) -> float:
        """Train one step; returns its seconds."""
        begin = time.perf_counter()
        sums = self.assembled.forward_backward(self.batch)
        reduction = Reduction(
            self.world,
            squared_norm=self.gradients.squared_norm(),
            loss_sum=sums.loss_sum,
            tokens=sums.tokens,
            stop=0,
            nominal_tokens=self.recipe.tokens_per_step,
            loss_scale=self.assembled.loss_scale,
        )
        factor = reduction.gradient_factor(self.recipe.training.max_grad_norm)
        if factor is not None:
            self.gradients.scale(factor)
        self.assembled.loss_scale.step(self.optimizer)
        self.assembled.after_update()
        self.optimizer.zero_grad()
        self.loss = reduction.read().loss
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def _kernels(steps: _Steps, *, on_gpu: bool) -> dict[str, Any]:
    """The kernels that take most of one step: name → seconds and calls; and the seconds of all."""
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        steps.one()
    averages = profile.key_averages()
    if on_gpu:
        # Operators and ranges have the time of their kernels once more.
        kernels = [each for each in averages if each.device_type == DeviceType.CUDA and not each.is_user_annotation]
        costs = {each.key: (each.self_device_time_total / 1e6, each.count) for each in kernels if each.key != _OVERHEAD}
    else:
        costs = {each.key: (each.self_cpu_time_total / 1e6, each.count) for each in averages}
    most = sorted(costs, key=lambda key: -costs[key][0])[:_KERNELS]
    return {
        "seconds": sum(seconds for seconds, _ in costs.values()),
        "most": {key: {"seconds": costs[key][0], "calls": costs[key][1]} for key in most},
    }


if __name__ == "__main__":
    main()
