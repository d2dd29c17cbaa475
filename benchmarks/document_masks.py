"""Attention within documents on a CPU: the operator by size of tiles, and steps of llama_5m with the mask and without.

The operator is timed forward and backward, least of several alternated calls, beside one call for each document and
beside torch's kernel with a mask of the square; `*` marks the tiles that titanlab uses. Steps are those of whole
processes with one thread, which alternate: the median of processor time after the first two steps, over all processes
of a variant, with the least and the largest median of one process. Prints one JSON object; `--write` keeps it under
benchmarks/results/.

    OMP_NUM_THREADS=1 python benchmarks/document_masks.py     about six minutes
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlab.techniques.model.attention import ROWS_OF_TILE, tiled_attention, tiles_are_faster, visible

KEPT = Path(__file__).parent / "results" / "document_masks.json"
TOKENS = 4096
LENGTHS = (512, 2048)
# Mean tokens of a document; the last one is longer than any sequence.
MEANS = (1, 16, 64, 256, 1024, 1_000_000)
ROWS = (32, 64, 128, 256)
UNMEASURED = 2


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    operator = [
        measured(seq_len, mean, dtype, args.times)
        for dtype in (torch.float32, torch.bfloat16)
        for seq_len in LENGTHS
        for mean in MEANS
    ]
    figures = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, with other work",
        "torch": torch.__version__,
        "operator_ms": operator,
        "step_seconds": {str(seq_len): steps(seq_len, args.rounds, args.steps) for seq_len in LENGTHS},
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        KEPT.write_text(text + "\n")


def measured(seq_len: int, mean: int, dtype: torch.dtype, times: int) -> dict[str, Any]:
    """Milliseconds of each way to compute the same, for 8 heads of width 32 that share 4."""
    generator = torch.Generator().manual_seed(0)
    batch = TOKENS // seq_len
    q, k, v = (
        torch.randn(batch, seq_len, heads, 32, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for heads in (8, 4, 4)
    )
    first = torch.rand(batch, seq_len, generator=generator) < 1 / mean
    first[:, 0] = True
    starts = torch.where(first, torch.arange(seq_len), 0).cummax(1).values
    mask = visible(starts)
    ways: dict[str, Callable[[], Tensor]] = {
        "without documents": lambda: _whole(q, k, v),
        "mask of the square": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
    }
    if mean >= ROWS[0] // 2:
        ways["one call a document"] = lambda: _one_by_one(q, k, v, starts)
    for rows in ROWS:
        chosen = "*" if rows == ROWS_OF_TILE else ""
        ways[f"tiles of {rows}{chosen}"] = lambda rows=rows: tiled_attention(q, k, v, starts, rows)[0]
    least = dict.fromkeys(ways, float("inf"))
    gradient = torch.randn(q.shape, generator=generator).to(dtype)
    for _ in range(times):
        for name, compute in ways.items():
            begin = time.process_time()
            compute().backward(gradient)
            least[name] = min(least[name], time.process_time() - begin)
            q.grad = k.grad = v.grad = None
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "seq_len": seq_len,
        "document_tokens": mean,
        **{name: round(seconds * 1000, 1) for name, seconds in least.items()},
    }


def _whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if not tiles_are_faster(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    output: Tensor = tiled_attention(q, k, v, None, ROWS_OF_TILE)[0]
    return output


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    outputs = []
    for row, begins in enumerate(starts):
        sizes = torch.unique_consecutive(begins, return_counts=True)[1].tolist()
        pieces = zip(*(x[row : row + 1].split(sizes, dim=2) for x in (q, k, v)), strict=True)
        parts = [F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True) for piece in pieces]
        outputs.append(torch.cat(parts, dim=2))
    return torch.cat(outputs)


def steps(seq_len: int, rounds: int, count: int) -> dict[str, dict[str, float]]:
    """Medians of processor seconds of a step by variant; processes of the variants alternate."""
    common = (
        "model=llama_5m",
        "data=synthetic",
        f"training.seq_len={seq_len}",
        f"training.global_batch={TOKENS // seq_len}",
        f"training.steps={count}",
        "checkpoint=off",
        "cluster.peak_tflops=1",
    )
    masked = "data.document_mask=true"
    variants = {"off": ["data.document_mask=false"]}
    for tokens in (64, 256, 1024, 1_000_000):
        variants[f"on, documents of {tokens}"] = [masked, f"data.document_tokens={tokens}"]
    found: dict[str, list[list[float]]] = {name: [] for name in variants}
    script = Path(__file__).with_name("fused_step.py")
    for number in range(rounds):
        for name in list(variants)[:: 1 if number % 2 == 0 else -1]:
            command = [sys.executable, str(script), "--train", *common, *variants[name]]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1])[UNMEASURED:])
    return {
        name: {
            "median": round(statistics.median([second for process in processes for second in process]), 3),
            "least": round(min(map(statistics.median, processes)), 3),
            "largest": round(max(map(statistics.median, processes)), 3),
        }
        for name, processes in found.items()
    }


if __name__ == "__main__":
    main()
