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
from titanlab.techniques.profiler.profilers_schema import NoProfiling as NoProfiler
from titanlab.techniques.schedule.published_schema import OneFOneB
from titanlab.techniques.tracker.trackers_schema import Jsonl

SMALL = Llama(dim=256, layers=6, heads=8, kv_heads=4, ffn_dim=768, vocab_size=2048)


def planned(*, world: int = 8, batch: int = 16, seq_len: int = 2048, memory_gb: float = 80, **given: Any) -> Recipe:
    """A recipe for nodes of eight H100, as `for_planning` resolves it."""
    values: dict[str, Any] = {
        "training": Training(seq_len=seq_len, global_batch=batch, steps=10),
        "model": SMALL,
        "parallelism": Parallelism(shard=world),
        "schedule": OneFOneB(),
        "precision": Bf16(),
        "ac": NoCheckpointing(),
        "compile": Compile(),
        "optimizer": AdamW(),
        "data": Synthetic(),
        "checkpoint": Sync(),
        "tracker": Jsonl(),
        "profiler": NoProfiler(),
        "launch": Local(),
        "cluster": Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3", per_node=8, memory_gb=memory_gb,
                           link_gb_per_second=450, network_gb_per_second=50),
        **given,
    }  # fmt: skip
    recipe = Recipe(world=world, **values)
    schedule = dataclasses.replace(recipe.optimizer.schedule, warmup_steps=1)
    return dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, schedule=schedule))


def ranking_of(recipe: Recipe, *, limit: float | None = None, **less: Any) -> RecipeRanking:
    """The ranking of a recipe's world; `less`: choices in place of all."""
    machine = dataclasses.replace(machine_of(recipe), allocator_excess=1.0)
    choices: Choices = dataclasses.replace(choices_of(recipe), **less)
    space = LayoutSpace(recipe=recipe, world=recipe.layout.world, per_node=machine.per_node, choices=choices)
    return RecipeRanking(space=space, machine=machine, limit=limit or machine.memory_bytes)
