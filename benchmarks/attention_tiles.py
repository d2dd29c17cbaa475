"""Causal attention on a CPU in tiles of queries beside torch's kernel, forward and backward, by size and dtype.

Prints one JSON object: processor time of torch's kernel in ms, and how many times as fast each tiling is, from the
least of several alternated calls. `*` marks the tiles that `titanlab.techniques.model.attention` chooses, if any.
`--write` also keeps it under benchmarks/results/.

    OMP_NUM_THREADS=1 python benchmarks/attention_tiles.py     about four minutes
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlab.techniques.model.attention import ROWS_OF_TILE, tiled_attention, tiles_are_faster

KEPT = Path(__file__).parent / "results" / "attention_tiles.json"
# (heads, key/value heads, head_dim)
HEADS = ((8, 4, 32), (8, 8, 32), (8, 2, 64), (8, 8, 64), (8, 2, 128))
LENGTHS = (128, 192, 256, 384, 512, 768, 1024, 2048)
TOKENS = 2048
# Rows of a tile.
TILES = (64, 128, 256)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measured(heads, seq_len, dtype, args.times)
        for dtype in (torch.float32, torch.bfloat16)
        for heads in HEADS
        for seq_len in LENGTHS
    ]
    figures = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        "rows": rows,
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if args.write:
        KEPT.write_text(text + "\n")


def measured(heads: tuple[int, int, int], seq_len: int, dtype: torch.dtype, times: int) -> dict[str, Any]:
    """One row: sizes, the time of torch's kernel, and the gain of each tiling with more than one tile."""
    queries, shared, head_dim = heads
    batch = max(1, TOKENS // seq_len)
    q, k, v = (
        torch.randn(batch, seq_len, count, head_dim, dtype=dtype).transpose(1, 2).requires_grad_()
        for count in (queries, shared, shared)
    )
    grad, chosen = torch.randn_like(q), ROWS_OF_TILE if tiles_are_faster(q, k, v) else 0
    # A sequence that is one tile is the same kernel, in float32.
    tilings = [each for each in TILES if each < seq_len or dtype != torch.float32]

    def run(attend: Callable[[], Tensor]) -> float:
        begun = time.process_time()
        torch.autograd.grad(attend(), (q, k, v), grad)
        return time.process_time() - begun

    def whole() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries != shared)

    taken: dict[int | None, list[float]] = {each: [] for each in (None, *tilings)}
    for number in range(times + 1):
        for each, seconds in taken.items():
            spent = run(whole if each is None else lambda each=each: tiled_attention(q, k, v, None, each)[0])
            if number:
                seconds.append(spent)
    least = {each: min(seconds) for each, seconds in taken.items()}
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "heads": queries,
        "kv_heads": shared,
        "head_dim": head_dim,
        "batch": batch,
        "seq_len": seq_len,
        "torch_ms": round(1e3 * least[None], 1),
        "times_as_fast": {
            f"{each} rows{' *' if each == chosen else ''}": round(least[None] / least[each], 2) for each in tilings
        },
    }


if __name__ == "__main__":
    main()
