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
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from titanlab.costs.loss_chunk import automatic, chunk_bytes
from titanlab.parallelism.chunked_loss import ChunkedLoss
from titanlab.parallelism.loss import loss_sum, of_logits

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

    def peak_bytes(self, chunk: int) -> int:
        """The peak of what forward and backward allocate, without the gradient of the weight."""
        run = self.passes(chunk)
        self.head.weight.grad = self.hidden.grad = None
        # One cycle has nothing to accumulate, but torch 2.11 warns without acc_events.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            run()
        return _peak(_events(profiled), without=self.head.weight.nbytes)


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
    """Whole logits, and each size of a chunk."""
    work = Work(args, dtype)
    width = torch.finfo(dtype).bits // 8
    whole = work.peak_bytes(0)
    found: dict[str, Any] = {"whole": {"peak_bytes": whole}, "chunks": {}}
    for chunk in args.chunks:
        peak = work.peak_bytes(chunk)
        shape = {"tokens": args.tokens, "chunk": chunk, "columns": args.vocab, "dim": args.dim}
        declared = chunk_bytes(**shape, width=width, accelerator="cpu", compiled=False)
        found["chunks"][str(chunk)] = {
            "peak_bytes": peak,
            "declared_bytes": declared,
            "peak_over_declared": peak / declared,
            "peak_over_whole": peak / whole,
        }
    for chunk in args.chunks if args.pairs else ():
        pairs = [_pair(work, chunk, swapped=bool(number % 2)) for number in range(args.pairs)]
        print(f"  chunks of {chunk}: {', '.join(f'{a:.1f} / {b:.1f} s' for a, b in pairs)}", file=sys.stderr)
        found["chunks"][str(chunk)] |= {
            "seconds": statistics.median(ours for ours, _ in pairs),
            "whole_seconds": statistics.median(theirs for _, theirs in pairs),
            "speed_over_whole": statistics.median(theirs / ours for ours, theirs in pairs),
        }
    return found


def _pair(work: Work, chunk: int, *, swapped: bool) -> tuple[float, float]:
    """Processor seconds of one pass in chunks, and of one with whole logits."""
    seconds = {}
    for each in (0, chunk) if swapped else (chunk, 0):
        run = work.passes(each)
        started = time.process_time()
        run()
        seconds[each] = time.process_time() - started
    return seconds[chunk], seconds[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--chunks", type=int, nargs="+", help="tokens of a chunk; by default what -1 chooses")
    parser.add_argument("--pairs", type=int, default=3, help="passes in turn; 0: measure memory only")
    parser.add_argument("--precision", choices=tuple(DTYPES), nargs="+", default=["fp32"])
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.chunks = args.chunks or [automatic(tokens=args.tokens, columns=args.vocab) or args.tokens // 4]
    figures: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"1 of {os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        "tokens": args.tokens,
        "vocab_size": args.vocab,
        "dim": args.dim,
    }
    for name in args.precision:
        print(name, file=sys.stderr)
        figures[name] = measure(args, DTYPES[name])
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        kept = HERE / "results" / "loss_chunk.json"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text + "\n")


if __name__ == "__main__":
    main()
