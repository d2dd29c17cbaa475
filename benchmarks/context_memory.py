"""Memory and time of one training step of a small Llama whose sequence is spread over several processes.

Prints one JSON object: for each degree of context parallelism the largest peak of any rank, in bytes that a forward and
backward pass allocates on top of the model and its gradients (running sum of the allocator's events), and `share`: that
peak times the degree over the peak of one process, 1 where memory falls as it should. `--write` also keeps it under
benchmarks/results/.

    python benchmarks/context_memory.py                                          degrees 1, 2 and 4, 4,096 tokens
    python benchmarks/context_memory.py --context 8 --seq 65536 --dim 64         a long sequence; minutes on two cores
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import multiprocessing
from torch.profiler import ProfilerActivity, profile

from titanlab.parallelism import positions, spread_attention
from titanlab.techniques.model import llama
from titanlab.techniques.model.llama_schema import Llama

HERE = Path(__file__).parent


def model_config(*, dim: int, layers: int) -> Llama:
    """A Llama of few parameters: activations are what counts."""
    return Llama(
        dim=dim, layers=layers, heads=dim // 16, kv_heads=dim // 32, ffn_dim=2 * dim, vocab_size=256, attention="auto"
    )


def measure(config: Llama, *, seq: int, batch: int, method: str) -> dict[str, float]:
    """Peak of one step on this rank, whose process group is all that share the sequence.

    Returns:
        `peak_bytes`, and the loss summed over this rank's tokens, over all tokens of the batch.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = llama.LlamaModel(config, seq_len=seq)
    tokens = torch.randint(config.vocab_size, (batch, seq + 1))
    if ranks > 1:
        group = dist.group.WORLD
        assert group is not None
        spread_attention(model, "attention.inner", method=method, group=group)
    # A short step first: gradients exist then, and whatever torch makes once.
    _step(model, tokens[:, : 2 * ranks * 8 + 1], rank, ranks)
    # One cycle has nothing to accumulate, but torch 2.11 warns without acc_events.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        loss = _step(model, tokens, rank, ranks)
    return {"peak_bytes": peak_bytes(profiled), "loss": loss}


def _step(model: torch.nn.Module, tokens: torch.Tensor, rank: int, ranks: int) -> float:
    seq = tokens.shape[1] - 1
    places = positions(seq, ranks=ranks, rank=rank)
    inputs, labels = tokens[:, :-1][:, places], tokens[:, 1:][:, places]
    logits = model(inputs, places)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (tokens.shape[0] * seq)
    loss.backward()
    return loss.item()


def peak_bytes(profiled: Any) -> int:
    """The largest running sum of what the allocator gave and took back while the profiler ran."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def _rank(rank: int, ranks: int, port: int, folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    started = time.perf_counter()
    figures = measure(
        model_config(dim=args.dim, layers=args.layers), seq=args.seq, batch=args.batch, method=args.method
    )
    figures["seconds"] = time.perf_counter() - started
    figures["resident_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (Path(folder) / f"{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, args: argparse.Namespace) -> dict[str, float]:
    """One degree, in processes of its own."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (ranks, port, folder, args), nprocs=ranks)
        figures = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    most = {key: max(each[key] for each in figures) for key in ("peak_bytes", "seconds", "resident_bytes")}
    return {**most, "loss": sum(each["loss"] for each in figures)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--method", choices=("ring", "all_gather"), default="ring")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the figures under benchmarks/results/")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    degrees = {}
    for ranks in args.context:
        degrees[ranks] = run(ranks, args)
        print(f"  context {ranks}: {degrees[ranks]}", file=sys.stderr)
    if 1 in degrees:
        for ranks, figures in degrees.items():
            figures["share"] = figures["peak_bytes"] * ranks / degrees[1]["peak_bytes"]
    told = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "torch": torch.__version__,
        **{key: getattr(args, key) for key in ("method", "seq", "batch", "dim", "layers")},
        "context": degrees,
    }
    print(json.dumps(told, indent=2))
    if args.write:
        (HERE / "results" / "context_memory.json").write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
