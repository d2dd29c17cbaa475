"""A recipe: the whole configuration of one run. What it has to obey is in `recipe_rules`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.checkpoint.schema import Checkpoint
from titanlab.cluster.schema import Cluster
from titanlab.compile.schema import Compile
from titanlab.costs.layout import Layout, resolve_layout
from titanlab.errors import ConfigError
from titanlab.optimizer.schedule_schema import WARMUP_STEPS
from titanlab.options import discover, schema_of
from titanlab.parallelism.schema import Parallelism
from titanlab.ranges import ranged
from titanlab.recipe.stage_pieces import stage_pieces
from titanlab.recipe.training_schema import Training

if TYPE_CHECKING:
    from titanlab.ac.contract import ACConfig
    from titanlab.data.contract import DataConfig
    from titanlab.model.contract import ModelConfig
    from titanlab.optimizer.contract import OptimizerConfig
    from titanlab.precision.contract import PrecisionConfig
    from titanlab.schedule.contract import PipelineSchedule
    from titanlab.tracker.contract import TrackerConfig
else:
    # OmegaConf takes dataclasses and Any as types of fields, and no Protocol.
    ACConfig = DataConfig = ModelConfig = OptimizerConfig = PrecisionConfig = PipelineSchedule = TrackerConfig = Any


@ranged("")
@dataclass(kw_only=True)
class Recipe:
    """Root of a configuration; each field but the first few is a config group.

    Attributes:
        name: label of the run, in its folder's name.
        sweep: label of the collection that the run belongs to, a folder of its own.
        runs: folder of all runs.
        seed: of initial values and of the order of data.
        repeat: number of this repetition of an otherwise equal run.
        world: number of processes; null: the product of the degrees.
        init_from: weights that a new run begins with, and nothing else of where they are from: a folder that
            `titanlab import` made, one of Hugging Face's, or a run; null: the seed makes them.
    """

    name: str = field(default="run", metadata={"identity": False})
    sweep: str = field(default="single", metadata={"identity": False})
    runs: str = field(default="runs", metadata={"identity": False})
    # Its own rule says more.
    seed: int = field(default=0, metadata={"most": None})
    repeat: int = 0
    world: int | None = None
    # Not part of the identity by name: the weights' own fingerprint is.
    init_from: str | None = field(default=None, metadata={"identity": False})
    training: Training = MISSING
    model: ModelConfig = MISSING
    parallelism: Parallelism = MISSING
    schedule: PipelineSchedule = MISSING
    precision: PrecisionConfig = MISSING
    ac: ACConfig = field(default=MISSING, metadata={"before": {"kind": "none"}})
    compile: Compile = MISSING
    optimizer: OptimizerConfig = MISSING
    data: DataConfig = MISSING
    checkpoint: Checkpoint = MISSING
    cluster: Cluster = field(default=MISSING)
    tracker: TrackerConfig = field(default=MISSING, metadata={"identity": False})
    launch: Any = field(default=MISSING, metadata={"identity": False})

    @property
    def layout(self) -> Layout:
        """The degrees of a resolved recipe."""
        return Layout(**self.parallelism.degrees())

    @property
    def local_batch(self) -> int:
        """Sequences of one data-parallel process in one step."""
        return self.training.global_batch // self.layout.data

    @property
    def microbatch(self) -> int:
        """Sequences of one forward pass: what is given, or in a pipeline one, and else all."""
        return self.training.microbatch or (1 if self.layout.pipeline > 1 else self.local_batch)

    @property
    def microbatches(self) -> int:
        """Forward passes of one process in one step."""
        return self.local_batch // self.microbatch

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all processes."""
        return self.training.global_batch * self.training.seq_len


def pieces_by_stage(recipe: Recipe) -> list[tuple[str, ...]]:
    """Pieces of the model in every stage of a resolved recipe's pipeline.

    Raises:
        ConfigError: the split that the recipe gives does not fit.
    """
    model, sizes = recipe.model, {"batch": recipe.microbatch, "seq_len": recipe.training.seq_len}
    return stage_pieces(
        model.account(),
        split=recipe.parallelism.split,
        placement=recipe.schedule.placement(ranks=recipe.layout.pipeline),
        block=model.block_operations(**sizes),
        edges=model.edge_operations(**sizes),
    )


def from_mapping(mapping: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_mapping` wrote, checked field by field.

    Raises:
        ConfigError: an option that is not installed, an unknown key or a value of the wrong type.
    """
    groups = discover()
    nodes: dict[str, Any] = {}
    for key, value in mapping.items():
        if key in groups:
            if not isinstance(value, Mapping):
                raise ConfigError(key, value, "must be a mapping", "compare it with `titanlab train --cfg job`")
            kind = value.get("kind") if None not in groups[key] else None
            nodes[key] = OmegaConf.structured(schema_of(key, kind))
    try:
        base = OmegaConf.structured(Recipe)
        merged = OmegaConf.merge(base, OmegaConf.create(nodes), OmegaConf.create(_literal(dict(mapping))))
        recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        key = error.full_key or "config"
        # Of a key that no schema has, OmegaConf does not tell the value.
        value = error.value if error.value is not None else mapping.get(key)
        raise ConfigError(
            key, value, str(error.msg).splitlines()[0], "compare it with `titanlab train --cfg job`"
        ) from error
    assert isinstance(recipe, Recipe)
    return recipe


def _literal(value: Any) -> Any:
    """The same plain values, in which OmegaConf takes no text for an interpolation: all have been resolved."""
    if isinstance(value, Mapping):
        return {key: _literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_literal(inner) for inner in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def to_mapping(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested dictionaries of plain values, in the order of its fields."""
    return dataclasses.asdict(recipe)


def resolve(recipe: Recipe, *, world: int | None, accelerator: str, device: str) -> Recipe:
    """The recipe with all that it leaves open filled in: degrees of -1, world, device, steps of warm-up.

    Args:
        world: processes that torchrun or Slurm have started; None: the recipe decides.
        accelerator: `cpu` or `cuda`, what this host has; used where the recipe says `auto`.
        device: the accelerator's name, used where the recipe gives none.
    """
    if world is not None and recipe.world not in (None, world):
        raise ConfigError("world", recipe.world, f"{world} processes were started", f"try world={world}, or null")
    layout = _layout(recipe, world)
    cluster = recipe.cluster
    if cluster.accelerator == "auto":
        cluster = dataclasses.replace(cluster, accelerator=accelerator)
    if cluster.device is None:
        cluster = dataclasses.replace(cluster, device=device if cluster.accelerator == accelerator else "cpu")
    schedule = recipe.optimizer.schedule
    schedule = dataclasses.replace(schedule, warmup_steps=schedule.warmup(recipe.training.steps))
    return dataclasses.replace(
        recipe,
        world=layout.world,
        optimizer=dataclasses.replace(recipe.optimizer, schedule=schedule),
        parallelism=recipe.parallelism.with_degrees(layout.degrees()),
        cluster=cluster,
    )


def shortened_warmup(recipe: Recipe) -> str:
    """The notice about a warm-up that the recipe leaves open and the run is too short for; else empty."""
    steps, schedule = recipe.training.steps, recipe.optimizer.schedule
    if schedule.warmup_steps is not None or steps >= WARMUP_STEPS:
        return ""
    return (
        f"optimizer.schedule.warmup_steps={schedule.warmup(steps)}, a tenth of the steps: "
        f"the default of {WARMUP_STEPS} is more than the run has"
    )


def _layout(recipe: Recipe, world: int | None) -> Layout:
    if recipe.world is not None and recipe.world < 1:
        raise ConfigError("world", recipe.world, "must be at least 1", "try 1, or null for the product of the degrees")
    try:
        return resolve_layout(recipe.parallelism.degrees(), world if world is not None else recipe.world)
    except ConfigError as error:
        if world is None or error.key != "world":
            raise
        # Another world is not to be had by an override: it has been started.
        cure = "start as many processes as the degrees make, or let one degree be -1"
        raise ConfigError("WORLD_SIZE", world, error.rule, cure) from error
