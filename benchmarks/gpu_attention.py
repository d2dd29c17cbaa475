"""Forward and backward of every attention kernel of a GPU, by dtype, width of a head and length of a sequence.

Prints one JSON object: for each shape the least milliseconds of forward and backward by kernel; null: the kernel does
not take these inputs, or is not installed. `--write` keeps it in benchmarks/results/attention_kernels.json. `--adopt`
also puts the rows into titanlab/costs/attention_kernels.json, in place of those of the same device: from then on
`model.attention=auto` tries the fastest kernel first for the measured dtypes and widths of heads.

    python benchmarks/gpu_attention.py --write --adopt                      a few minutes on an H100
    python benchmarks/gpu_attention.py --tokens 256 --lengths 64 128 --heads 4 2 --widths 16 --times 1    on a CPU
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from titanlab.costs import FLASH3, FUSED
from titanlab.costs.attention_order import TABLE
from titanlab.techniques.model.attention import InnerAttention

KEPT = Path(__file__).parent / "results" / "attention_kernels.json"
# A CPU has only these.
ON_CPU = ("flash", "math")
DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 32768


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of one call, or one longer sequence")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of a head")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="of queries, and of keys and values")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {KEPT.name} of benchmarks/results/")
    parser.add_argument("--adopt", action="store_true", help="put the rows into the table of model.attention=auto")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.adopt and device.type == "cpu":
        parser.error("--adopt: the table is about GPUs, and there is none here")
    rows = [
        measured(device, dtype, tuple(args.heads), width, length, tokens=args.tokens, times=args.times)
        for dtype in DTYPES
        for width in args.widths
        for length in args.lengths
    ]
    figures = {
        "date": datetime.date.today().isoformat(),
        "device": name_of(device),
        "torch": torch.__version__,
        "measured": rows,
    }
    text = json.dumps(figures, indent=2) + "\n"
    print(text, end="")
    if args.write:
        KEPT.write_text(text)
    if args.adopt:
        TABLE.write_text(adopted(json.loads(TABLE.read_text()), rows))
    return figures


def measured(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    seq_len: int,
    *,
    tokens: int,
    times: int,
) -> dict[str, Any]:
    """One row of the table: an input, and the milliseconds of every kernel."""
    batch = max(1, tokens // seq_len)
    kernels = (FLASH3, *FUSED) if device.type == "cuda" else ON_CPU
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(batch, seq_len, count, head_dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    grad = torch.randn_like(q)

    def milliseconds(kernel: str) -> float | None:
        try:
            module = InnerAttention(kernel)
            module.prepare(device)
            torch.autograd.grad(module(q, k, v), (q, k, v), grad)
        except (ImportError, RuntimeError):
            return None
        spent = timer(device)
        return round(min(spent(lambda: torch.autograd.grad(module(q, k, v), (q, k, v), grad)) for _ in range(times)), 4)

    return {
        "capability": list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": head_dim,
        "seq_len": seq_len,
        "batch": batch,
        "heads": heads[0],
        "kv_heads": heads[1],
        "ms": {kernel: milliseconds(kernel) for kernel in kernels},
        "source": f"benchmarks/gpu_attention.py, {name_of(device)}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}",
    }


def timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """A function that runs another and returns its milliseconds on the device."""

    def on_cpu(function: Callable[[], object]) -> float:
        begun = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - begun)

    def on_gpu(function: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return on_gpu if device.type == "cuda" else on_cpu


def name_of(device: torch.device) -> str:
    """The device's name as its driver prints it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def adopted(table: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The table's text with rows in place of those of the same capability."""
    known = {tuple(row["capability"]) for row in rows}
    kept = [row for row in table["measured"] if tuple(row["capability"]) not in known]
    return json.dumps({**table, "measured": [*kept, *rows]}, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    main()
