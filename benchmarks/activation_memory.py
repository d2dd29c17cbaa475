"""What blocks keep between their forward and their backward under each policy of activation checkpointing.

Prints a table and one JSON object: for each policy and precision the bytes that a stack of blocks keeps (sum of the
allocator's events over its forward pass), the bytes that the policy's account says, and with `--times` the seconds of a
forward and backward pass. Hooks on saved tensors would not do: they do not see what selective policies keep. `--write`
keeps the figures under benchmarks/results/.

    python benchmarks/activation_memory.py                       eager; a minute on two cores
    python benchmarks/activation_memory.py --compile --write     and compiled by inductor, with memory budgets
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from titanlab.costs import Share
from titanlab.techniques.ac.recomputation_schema import (
    FullCheckpointing,
    MemoryBudget,
    NoCheckpointing,
    SelectiveLayer,
    SelectiveOp,
)
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model import llama
from titanlab.techniques.model.llama_schema import Llama

HERE = Path(__file__).parent
POLICIES: Mapping[str, Any] = {
    "none": NoCheckpointing(),
    "selective_layer, every=2": SelectiveLayer(every=2),
    "selective_op, all matmuls": SelectiveOp(every_other_matmul=False),
    "selective_op": SelectiveOp(),
    "full": FullCheckpointing(),
}
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stack(nn.Module):
    """The blocks of a Llama alone: hidden [batch, seq, dim], rope → hidden."""

    def __init__(self, config: Llama, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = llama.LlamaModel(config, seq_len=1).layers.to(dtype)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, hidden: Tensor, rope: Tensor) -> Tensor:
        for block in self.layers.values():
            hidden = block(hidden, rope)
        return hidden


def build(config: Llama, policy: Any, dtype: torch.dtype, *, backend: str = "") -> Stack:
    """Blocks under a policy, compiled if there is a backend."""
    stack = Stack(config, dtype)
    policy.implementation().apply({int(number): block for number, block in stack.layers.items()})
    if backend:
        compiled = Compile(blocks=True, backend=backend)
        compiled.implementation().compile_blocks(stack.layers.values(), memory_budget=policy.compiler_budget())
    return stack


def inputs(config: Llama, *, batch: int, seq: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states and the table of angles."""
    torch.manual_seed(1)
    hidden = torch.randn(batch, seq, config.dim, dtype=dtype, requires_grad=True)
    return hidden, llama.rope_table(config, seq_len=seq).unsqueeze(-3)


def held_bytes(module: nn.Module, hidden: Tensor, *others: Tensor, times: int = 1) -> int:
    """What a forward pass leaves in memory for its backward: its input if that is kept, but not its output.

    The least of some passes: what a thread of gloo frees, the profiler may not see.
    """
    # Once before: gradients exist then, and whatever torch makes once.
    module(hidden, *others).sum().backward()
    # Python's collector must not free what an earlier pass has left while another one is measured.
    gc.collect()
    gc.disable()
    try:
        return min(_held_bytes(module, hidden, *others) for _ in range(times))
    finally:
        gc.enable()


def _held_bytes(module: nn.Module, hidden: Tensor, *others: Tensor) -> int:
    # One cycle has nothing to accumulate, but torch 2.11 warns without acc_events.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        # An input of its own, of which only the module can be the keeper.
        output: Tensor = module(hidden * 1, *others)
    return sum(_allocations(profiled)) - output.nbytes


def _allocations(profiled: Any) -> Iterator[int]:
    """Bytes that the allocator gave, and took back."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return (event["args"]["Bytes"] for event in events if event["name"] == "[memory]")


def declared_bytes(config: Llama, policy: Any, share: Share, *, batch: int, seq: int) -> int:
    """What the policy declares for all blocks together."""
    block = config.block_operations(batch=batch, seq_len=seq)
    return sum(policy.saved_bytes(block, share, number=number) for number in range(config.layers))


def step_seconds(module: nn.Module, given: Sequence[Tensor], times: int) -> float:
    """The fastest of some forward and backward passes."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        module(*given).sum().backward()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def rows(config: Llama, args: argparse.Namespace, *, backend: str) -> Iterator[dict[str, Any]]:
    """Every policy in every precision; compiled, what a compiler keeps by itself, and budgets, in fp32."""
    policies, dtypes = POLICIES, DTYPES
    if backend:
        budgets = {f"memory_budget, budget={budget:g}": MemoryBudget(budget=budget) for budget in BUDGETS}
        policies, dtypes = {"none": NoCheckpointing(), **budgets}, {"fp32": torch.float32}
    for precision, dtype in dtypes.items():
        share = Share(element_bytes=dtype.itemsize, accelerator="cpu")
        for name, policy in policies.items():
            torch._dynamo.reset()
            stack = build(config, policy, dtype, backend=backend)
            given = inputs(config, batch=args.batch, seq=args.seq, dtype=dtype)
            row = {
                "policy": name,
                "precision": precision,
                "compiled": backend,
                "held_bytes": held_bytes(stack, *given),
                "declared_bytes": declared_bytes(config, policy, share, batch=args.batch, seq=args.seq),
            }
            if args.times:
                row["step_seconds"] = step_seconds(stack, given, args.times)
            print(_line(row), file=sys.stderr)
            yield row


def _line(row: Mapping[str, Any]) -> str:
    held, declared = row["held_bytes"], row["declared_bytes"]
    seconds = f", {row['step_seconds']:.3f} s" if "step_seconds" in row else ""
    return (
        f"{row['compiled'] or 'eager':9} {row['precision']} {row['policy']:26} {held / 2**20:8.1f} MiB, "
        f"account {declared / 2**20:8.1f} MiB ({held / declared - 1:+.2%}){seconds}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--times", type=int, default=0, help="passes of which the fastest is timed")
    parser.add_argument("--compile", action="store_true", help="also compiled by inductor")
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The proportions of Llama 3 8B.
    config = Llama(
        dim=args.dim,
        layers=args.layers,
        heads=args.dim // 64,
        kv_heads=args.dim // 256,
        ffn_dim=args.dim * 7 // 2,
        vocab_size=256,
    )
    found = list(rows(config, args, backend=""))
    if args.compile:
        found += rows(config, args, backend="inductor")
    told = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        "batch": args.batch,
        "seq": args.seq,
        "model": asdict(config),
        "rows": found,
    }
    print(json.dumps(told, indent=2))
    if args.write:
        (HERE / "results" / "activation_memory.json").write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
