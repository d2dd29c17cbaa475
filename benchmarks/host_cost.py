"""What a block costs the host in a step, on tensors so small that the device's work is nothing.

    python benchmarks/host_cost.py           prints the microseconds of a block, forward and backward, by layout
    python benchmarks/host_cost.py --write   keeps them in benchmarks/results/host_cost.json

One process stands for a rank of a world whose other ranks do not exist: collectives return at once. A block's time is
the difference between models of six and of two blocks, divided by four: the smallest CPU time of several rounds,
because other work on the machine only adds to it. A GPU's launches come on top of a CPU's calls of operators.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from titanlab.distributed import build_mesh
from titanlab.parallelism import Parallelism
from titanlab.prove.rank_trace import fake_world
from titanlab.recipe import Cluster, Recipe, Training, resolve
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.optimizer.optimizers_schema import AdamW
from titanlab.techniques.precision.cast_schema import Fp32
from titanlab.techniques.schedule.published_schema import OneFOneB
from titanlab.train import StepBatch
from titanlab.train.assemble import assemble

RESULT = Path(__file__).parent / "results" / "host_cost.json"
SEQ = 16
FEW, MANY = 2, 6
ROUNDS, STEPS = 5, 10
LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {},
    "fsdp2": {"shard": 2},
    "tensor": {"tensor": 2},
    "fsdp2 and tensor": {"shard": 2, "tensor": 2},
}


def recipe_of(layers: int, degrees: dict[str, int]) -> Recipe:
    """A tiny recipe."""
    world = 1
    for degree in degrees.values():
        world *= degree
    recipe = Recipe(
        world=world,
        training=Training(seq_len=SEQ, global_batch=degrees.get("shard", 1), microbatch=1, loss_chunk=0),
        model=Llama(dim=32, layers=layers, heads=4, kv_heads=4, ffn_dim=64, vocab_size=64),
        parallelism=Parallelism(**degrees),
        schedule=OneFOneB(),
        ac=NoCheckpointing(),
        precision=Fp32(),
        compile=Compile(),
        optimizer=AdamW(lr=1e-3),
        cluster=Cluster(accelerator="cpu", device="cpu"),
    )
    return resolve(recipe, world=None, accelerator="cpu", device="cpu")


def step_seconds(layers: int, degrees: dict[str, int]) -> float:
    """The shortest mean time of forward and backward passes."""
    recipe = recipe_of(layers, degrees)
    with fake_world(0, recipe.layout.world, nccl=False) as (world, _):
        assembled = assemble(recipe, dataclasses.replace(world, without_data=None), build_mesh(recipe.layout, "cpu"))
        tokens = torch.zeros(1, SEQ, dtype=torch.int64)
        batch = StepBatch(tokens, tokens, tokens.numel())
        parameters = list(assembled.model.parameters())

        def run(steps: int) -> float:
            start = time.process_time()
            for _ in range(steps):
                assembled.forward_backward(batch)
                for parameter in parameters:
                    parameter.grad = None
            return (time.process_time() - start) / steps

        run(3)
        return min(run(STEPS) for _ in range(ROUNDS))


def study() -> dict[str, Any]:
    """Seconds of a block by layout."""
    blocks = {}
    for name, degrees in LAYOUTS.items():
        many, few = (step_seconds(layers, degrees) for layers in (MANY, FEW))
        blocks[name] = (many - few) / (MANY - FEW)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "block_seconds": blocks,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the result")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    found = study()
    for name, seconds in found["block_seconds"].items():
        print(f"{name:20} {seconds * 1e6:8.0f} µs")
    if write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
