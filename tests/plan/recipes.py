"""Recipes and spaces that are planned: nothing of them runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from titanlab.checkpoint.schema import Sync
from titanlab.data import Synthetic
from titanlab.launch.launchers_schema import Local
from titanlab.parallelism import Parallelism
from titanlab.plan import machine_of
from titanlab.plan.ranking import RecipeRanking
from titanlab.plan.space import Choices, LayoutSpace, choices_of
from titanlab.recipe import Cluster, Recipe, Training
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.optimizer.optimizers_schema import AdamW
from titanlab.techniques.precision.cast_schema import Bf16
from titanlab.techniques.profiler.profilers_schema import NoProfiling
from titanlab.techniques.schedule.published_schema import OneFOneB
from titanlab.techniques.tracker.trackers_schema import Jsonl

LLAMA_8B = Llama(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256)
SMALL = Llama(dim=256, layers=6, heads=8, kv_heads=4, ffn_dim=768, vocab_size=2048)
H100 = "NVIDIA H100 80GB HBM3"


def made(
    *,
    model: Any = LLAMA_8B,
    batch: int = 16,
    seq_len: int = 8192,
    microbatch: int | None = None,
    compiled: bool = False,
    device: str = H100,
    cluster: dict[str, Any] | None = None,
    precision: Any = None,
    ac: Any = None,
    schedule: Any = None,
    **parallelism: Any,
) -> Recipe:
    """A recipe for nodes of eight GPUs; degrees that are not given are 1."""
    layout = Parallelism(**parallelism)
    world = layout.pipeline * layout.replicate * layout.shard * layout.context * layout.tensor
    values = {"accelerator": "cuda", "device": device, "per_node": 8, "network_gb_per_second": 50, **(cluster or {})}
    return Recipe(
        world=world,
        training=Training(seq_len=seq_len, global_batch=batch, microbatch=microbatch),
        model=model,
        parallelism=layout,
        schedule=schedule or OneFOneB(),
        precision=precision or Bf16(),
        ac=ac or NoCheckpointing(),
        compile=Compile(blocks=compiled, loss=compiled),
        optimizer=AdamW(lr=1e-3),
        cluster=Cluster(**values),
    )


def planned(*, world: int = 8, batch: int = 16, seq_len: int = 2048, memory_gb: float = 80, **given: Any) -> Recipe:
    """A whole recipe for nodes of eight H100, as `for_planning` resolves it."""
    recipe = made(model=SMALL, cluster={"memory_gb": memory_gb, "link_gb_per_second": 450}, compiled=False)
    optimizer = AdamW()
    values = {
        "training": Training(seq_len=seq_len, global_batch=batch, steps=10),
        "parallelism": Parallelism(shard=world),
        "optimizer": dataclasses.replace(optimizer, schedule=dataclasses.replace(optimizer.schedule, warmup_steps=1)),
        "data": Synthetic(),
        "checkpoint": Sync(),
        "tracker": Jsonl(),
        "profiler": NoProfiling(),
        "launch": Local(),
        **given,
    }
    return dataclasses.replace(recipe, world=world, **values)


def ranking_of(recipe: Recipe, *, limit: float | None = None, **less: Any) -> RecipeRanking:
    """The ranking of a recipe's world; `less`: choices in place of all."""
    machine = dataclasses.replace(machine_of(recipe), allocator_excess=1.0)
    choices: Choices = dataclasses.replace(choices_of(recipe), **less)
    space = LayoutSpace(recipe, per_node=machine.per_node, choices=choices)
    return RecipeRanking(space=space, machine=machine, limit=limit or machine.memory_bytes)
