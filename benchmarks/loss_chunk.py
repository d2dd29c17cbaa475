"""Memory and time of the head and the loss, with whole logits and in chunks of tokens.

A linear head and the cross-entropy alone, forward and backward: the peak of the allocator's bytes beside the
parameters, their gradients and the head's input, what the costs declare, and the processor seconds of passes in turn.
Prints one JSON object; `--write` also keeps it under benchmarks/results/.

    python benchmarks/loss_chunk.py --write                     about ten minutes on one core
    python benchmarks/loss_chunk.py --tokens 512 --vocab 8192 --pairs 5
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from titanlab.costs import automatic_chunk, chunk_bytes
from titanlab.parallelism import ChunkedLoss, loss_sum, of_logits

HERE = Path(__file__).parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Work:
    """One head with its input and labels."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.head = nn.Linear(args.dim, args.vocab, bias=False, dtype=dtype)
        self.logits = self.head.forward
        self.hidden = torch.randn(1, args.tokens, args.dim, dtype=dtype, requires_grad=True)
        self.labels = torch.randint(0, args.vocab, (1, args.tokens))

    def passes(self, chunk: int) -> Callable[[], Tensor]:
        """Forward and backward with chunks of so many tokens; 0: with whole logits."""
        self.head.forward = self.logits  # type: ignore[method-assign]
        scale = 1 / self.labels.numel()
        loss = ChunkedLoss(self.head, tokens=chunk, scale=scale) if chunk else of_logits(loss_sum)

        def run() -> Tensor:
            self.head.weight.grad = self.hidden.grad = None
            total = loss(lambda: self.head(self.hidden), self.labels)
            (total * scale).backward()
            return total.detach()

        return run

    def measured(self, chunk: int) -> tuple[int, float]:
        """The peak of what forward and backward allocate, without the gradient of the weight; processor seconds."""
        run = self.passes(chunk)
        self.head.weight.grad = self.hidden.grad = None
        # One cycle has nothing to accumulate, but torch 2.11 warns without acc_events.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            started = time.process_time()
            run()
            seconds = time.process_time() - started
        return _peak(_events(profiled), without=self.head.weight.nbytes), seconds


def _events(profiled: Any) -> list[tuple[str, int]]:
    """Address and bytes of what the allocator gave (positive) and took back (negative), in order."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    return [(event["args"]["Addr"], event["args"]["Bytes"]) for event in sorted(events, key=lambda each: each["ts"])]


def _peak(events: list[tuple[str, int]], *, without: int) -> int:
    """The largest running sum, without a tensor of `without` bytes that exists at the end: the weight's gradient."""
    alive: dict[str, int] = {}
    for number, (address, size) in enumerate(events):
        if size > 0:
            alive[address] = number
        else:
            alive.pop(address, None)
    left_out = {number for number in alive.values() if events[number][1] == without}
    total = most = 0
    for number, (_, size) in enumerate(events):
        total += 0 if number in left_out else size
        most = max(most, total)
    return most


def measure(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Any]:
    """Each size of a chunk, in turn with whole logits."""
    work = Work(args, dtype)
    width = torch.finfo(dtype).bits // 8
    found = {}
    for chunk in args.chunks:
        pairs = [_pair(work, chunk, swapped=bool(number % 2)) for number in range(args.pairs)]
        shape = {"tokens": args.tokens, "chunk": chunk, "columns": args.vocab, "dim": args.dim}
        declared = chunk_bytes(**shape, width=width, accelerator="cpu", compiled=False)
        peak, whole = (max(pair[each][0] for pair in pairs) for each in (chunk, 0))
        seconds, whole_seconds = ([pair[each][1] for pair in pairs] for each in (chunk, 0))
        found[str(chunk)] = {
            "peak_bytes": peak,
            "declared_bytes": declared,
            "whole_peak_bytes": whole,
            "peak_over_declared": peak / declared,
            "peak_over_whole": peak / whole,
            "seconds": statistics.median(seconds),
            "whole_seconds": statistics.median(whole_seconds),
            "speed_over_whole": statistics.median(b / a for a, b in zip(seconds, whole_seconds, strict=True)),
        }
    return found


def _pair(work: Work, chunk: int, *, swapped: bool) -> dict[int, tuple[int, float]]:
    """Peak bytes and processor seconds of one pass in chunks, and of one with whole logits (0)."""
    return {each: work.measured(each) for each in ((0, chunk) if swapped else (chunk, 0))}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", help="tokens of a chunk; by default what -1 chooses")
    parser.add_argument("--pairs", type=int, default=3, help="passes in turn")
    parser.add_argument("--precision", choices=tuple(DTYPES), nargs="+", default=["fp32"])
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.chunks = args.chunks or [automatic_chunk(tokens=args.tokens, columns=args.vocab) or args.tokens // 4]
    figures: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"1 of {os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        "tokens": args.tokens,
        "vocab_size": args.vocab,
        "dim": args.dim,
    }
    for name in args.precision:
        figures[name] = measure(args, DTYPES[name])
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        kept = HERE / "results" / "loss_chunk.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
