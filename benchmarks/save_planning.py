"""Time and memory of rank 0 when it plans a save of Llama 3.1 405B with AdamW, for some numbers of ranks.

The layout is that of the recipe llama3_1_405b_512gpus: tensor parallelism of 8 in a host, a pipeline of 8 stages, and
FSDP2 over what is left; `--pipeline 1` is FSDP2 and tensor parallelism alone, where every rank has a part of every
parameter. The plans of eight ranks, those of the first host, are made as a run makes them, on torch's fake process
group, for each stage. They give the others: the same entries at other offsets. Rank 0 then does what it does in a
save: it unpickles all plans, makes the global plan, keeps the places in every file, pickles the answers, and writes the
index. Each number of ranks has a process of its own. Prints one JSON object.

    python benchmarks/save_planning.py                     256 and 512 ranks
    python benchmarks/save_planning.py --ranks 64,128 --pipeline 1
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import pickle
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titanlab.checkpoint import SavedPosition
from titanlab.checkpoint.index import IndexedFile
from titanlab.checkpoint.saving import Part, StartedSave, entries_of, parts_of, publish, shard_of, shared_out
from titanlab.checkpoint.storage import blocks_of
from titanlab.costs import Layout
from titanlab.distributed import build_mesh
from titanlab.parallelism import TensorParallel, parallelise
from titanlab.recipe import stage_pieces
from titanlab.techniques.model.language_model import shapes_only
from titanlab.techniques.model.llama_schema import Llama

TENSOR = 8
SEQ_LEN = 8192
# conf/model/llama3_1_405b.yaml
LLAMA_405B = Llama(
    dim=16_384, layers=126, heads=128, kv_heads=8, ffn_dim=53_248, vocab_size=128_256, rope_theta=500_000.0
)
RESULT = Path(__file__).parent / "results" / "save_planning.json"


def main() -> None:
    """Measure each number of ranks in a process of its own, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="256,512", help="numbers of ranks, multiples of 8")
    parser.add_argument("--pipeline", type=int, default=8, help="stages, one a rank")
    parser.add_argument(
        "--write", action="store_true", help=f"also write {RESULT.name}, beside other numbers of stages"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one, given.pipeline)))
        return
    rows = {
        ranks: json.loads(
            subprocess.check_output([sys.executable, __file__, "--one", ranks, "--pipeline", str(given.pipeline)])
        )
        for ranks in given.ranks.split(",")
    }
    found = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "load": round(os.getloadavg()[0], 1),
        "torch": torch.__version__,
        "ranks": rows,
    }
    print(json.dumps(found, indent=2))
    if given.write:
        known = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        known[f"pipeline {given.pipeline}"] = found
        RESULT.write_text(json.dumps(known, indent=2) + "\n")


def measured(ranks: int, pipeline: int) -> dict[str, Any]:
    """Seconds of each step and the memory that they add, in MB."""
    # Hosts of one stage.
    hosts = ranks // TENSOR // pipeline
    # As during training.
    gc.disable()
    begin = time.perf_counter()
    # A process for each: torch keeps what it has computed for a mesh, and a mesh of another rank equals it.
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:
        first = processes.starmap(_plans_of, [(rank, ranks, pipeline) for rank in range(TENSOR)], chunksize=1)
    local_seconds = (time.perf_counter() - begin) / TENSOR / pipeline
    # Plans arrive as bytes from each rank; rank 0 holds them all, as gather_object does.
    arrived = [
        pickle.dumps([_moved(part, host, hosts) for part in first[rank][stage]])
        for stage in range(pipeline)
        for host in range(hosts)
        for rank in range(TENSOR)
    ]
    before, seconds = _peak_mb(), {}

    def timed(name: str, begin: float) -> float:
        seconds[name] = round(time.perf_counter() - begin, 2)
        return time.perf_counter()

    cpu_begin = time.process_time()
    at = begin = time.perf_counter()
    plans = [pickle.loads(text) for text in arrived]
    at = timed("unpickle", at)
    plans = shared_out(plans)
    at = timed("global plan", at)
    shards = [shard_of(plan, rank) for rank, plan in enumerate(plans)]
    at = timed("places of all files", at)
    tensors = entries_of(shards)
    at = timed("entries of the index", at)
    answers = [pickle.dumps(plan) for plan in plans]
    at = timed("pickle", at)
    sizes = [shard.size for shard in shards]
    at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        files = [
            IndexedFile(name=f"rank-{rank:05d}.safetensors", size=size, checksums=b"checksum" * blocks_of(size))
            for rank, size in enumerate(sizes)
        ]
        position = SavedPosition(step=0, parameters={})
        started = StartedSave(folder=Path(folder), state={}, shard=shards[0], tensors=tensors, saved=position)
        publish(started, files, {}, position)
        timed("index", at)
        cpu_seconds = time.process_time() - cpu_begin
        index_mb = (Path(folder) / "index.json").stat().st_size / 1e6
    return {
        "entries": sum(map(len, plans)),
        "checkpoint_gb": round(sum(sizes) / 1e9),
        "local_plan_seconds": round(local_seconds, 2),
        "seconds": {**seconds, "all": round(sum(seconds.values()), 2)},
        # Less than `all` where other processes had the core, and without the time for which the disk made it wait.
        "cpu_seconds": round(cpu_seconds, 2),
        "added_mb": round(_peak_mb() - before),
        "arrived_mb": round(sum(map(len, arrived)) / 1e6),
        "answers_mb": round(sum(map(len, answers)) / 1e6),
        "index_mb": round(index_mb),
    }


def _plans_of(rank: int, ranks: int, pipeline: int) -> list[list[Part]]:
    """The local plan of a rank of the first host of each stage, of tensors without data."""
    # The ranks of one stage: only they share parameters.
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks // pipeline)
    mesh = build_mesh(Layout(shard=ranks // TENSOR // pipeline, tensor=TENSOR), "cpu")
    config = LLAMA_405B
    with shapes_only():
        model = config.implementation().build(seq_len=SEQ_LEN)
    cut = TensorParallel(mesh=mesh.axis("tensor"), seq_len=SEQ_LEN, sequence_parallel=True, loss_parallel=True)
    parallelise(model, config.account().tensor_plan, cut)
    for layer in (*model.layers.values(), model):
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh.data_parallel)
    stages = stage_pieces(
        config.account(),
        split=None,
        placement=range(pipeline),
        block=config.block_operations(batch=1, seq_len=SEQ_LEN),
        edges=config.edge_operations(batch=1, seq_len=SEQ_LEN),
    )
    parameters = dict(model.named_parameters())
    plans = [
        _plan_of(
            {
                name: parameter
                for name, parameter in parameters.items()
                if any(name.startswith(f"{piece}.") for piece in pieces)
            },
        )
        for pieces in stages
    ]
    dist.destroy_process_group()
    return plans


def _plan_of(parameters: dict[str, nn.Parameter]) -> list[Part]:
    """The plan of a rank with these parameters and their two moments."""
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    moments = {
        f"optimizer.state.{name}.{kind}": torch.empty_like(parameter)
        for name, parameter in parameters.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    return parts_of({f"model.{name}": parameter for name, parameter in parameters.items()} | moments)


def _moved(part: Part, host: int, hosts: int) -> Part:
    """The part of the same rank of another host: FSDP2 cuts what is left of dim 0 into equal parts."""
    rows = part.sizes[0]
    # Rows of this rank's part of a tensor that tensor parallelism cuts along dim 0.
    whole = part.shape[0] // TENSOR if rows * hosts < part.shape[0] else part.shape[0]
    start = min(host * rows, whole)
    return part._replace(
        offsets=(part.offsets[0] + start, *part.offsets[1:]), sizes=(min(rows, whole - start), *part.sizes[1:])
    )


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
