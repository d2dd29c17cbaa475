"""The plan of a world: the fastest recipes that fit, or why there is none and what would work."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titanlab.cluster.schema import Cluster
from titanlab.costs.layout import AXES, Layout, resolve_layout
from titanlab.distributed.host import this_host
from titanlab.errors import ConfigError
from titanlab.planner.machine import Machine, machine_of
from titanlab.planner.search.choices import choices_of
from titanlab.planner.search.ranking import Ranked, Ranking
from titanlab.planner.search.space import Space
from titanlab.recipe.memory_rules import check_addressable
from titanlab.recipe.recipe import Recipe, resolve
from titanlab.recipe.recipe_rules import check_processes

# Share of a device's memory that recipes leave free, for CUDA, NCCL and the errors of the estimate. Datasheets count
# memory in units of 1e9 bytes, which is 7 % less than what a driver reports, so that the real margin is larger.
MARGIN = 0.03
MOST = 1000
# Worlds and batches that are tried when nothing fits.
_LARGER_WORLDS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer to a request.

    Attributes:
        base: the recipe of the request, resolved for its world.
        machine: of its cluster.
        limit: bytes of a device that recipes may reserve; infinite if the cluster does not say it.
        best: the fastest recipes, in order.
        listed, too_large: numbers of recipes in the space, and of those that do not fit.
        dropped: number of layouts by the rule that forbids them.
        refused: number of recipes by the rule that forbids them, of those that were fast enough to be looked at.
        advice: what would work, if `best` is empty.
    """

    base: Recipe
    machine: Machine
    limit: float
    best: Sequence[Ranked]
    listed: int
    too_large: int
    dropped: Mapping[str, int]
    refused: Mapping[str, int]
    advice: Sequence[str] = ()


def for_planning(recipe: Recipe, *, stands: bool = False) -> Recipe:
    """The recipe, resolved without this host.

    Args:
        stands: keep its degrees; otherwise only their product matters, and all processes shard.

    Raises:
        ConfigError: the cluster leaves its device open, or the accelerator of other hosts; or the world is below 1.
    """
    known = "name one, such as cluster=h100 or cluster=cpu"
    if recipe.cluster.accelerator == "auto":
        if not recipe.launch.runs_here:
            rule = "is whatever a node has, and a plan is for machines whose facts are known"
            raise ConfigError("cluster.accelerator", "auto", rule, known)
        recipe = dataclasses.replace(recipe, cluster=here(recipe.cluster))
    cluster = recipe.cluster
    if cluster.accelerator == "cuda" and cluster.device in (None, "cpu"):
        rule = "names no GPU, and a plan is for machines whose facts are known"
        raise ConfigError("cluster.device", cluster.device, rule, known)
    if not stands:
        world = recipe.world
        if world is None:
            world = resolve_layout(recipe.parallelism.degrees(), None).world
        if world < 1:
            raise ConfigError("world", world, "must be at least 1", "try world=8")
        check_processes(world)
        degrees = {**dict.fromkeys(AXES, 1), "shard": world}
        own = dataclasses.replace(recipe.parallelism.with_degrees(degrees), expert=1)
        recipe = dataclasses.replace(recipe, world=world, parallelism=own)
    resolved = resolve(recipe, world=None, accelerator="cpu", device="cpu")
    # Each layout of the search has its own.
    training = dataclasses.replace(resolved.training, loss_chunk=recipe.training.loss_chunk)
    return dataclasses.replace(resolved, training=training)


def here(cluster: Cluster) -> Cluster:
    """The cluster with this host's accelerator, where it leaves it open."""
    host = this_host()
    device = host.device if cluster.device is None else cluster.device
    per_node = host.count if cluster.per_node is None else cluster.per_node
    return dataclasses.replace(cluster, accelerator=host.accelerator, device=device, per_node=per_node)


def plan(recipe: Recipe, *, vary: Sequence[str] = (), top: int = 20) -> Plan:
    """Plan the world of a recipe.

    Args:
        recipe: of `for_planning`.
        vary: see `choices_of`.
        top: how many recipes are wanted.

    Raises:
        ConfigError: a value of the request is wrong, or its devices cannot compute in its precision.
    """
    if not 1 <= top <= MOST:
        raise ConfigError("--top", top, f"must lie in 1 to {MOST:,}", "try 20")
    check_addressable(recipe)
    machine = machine_of(recipe)
    limit = machine.memory_bytes * (1 - MARGIN)
    ranking = _ranking(recipe, machine, limit, vary)
    _check_precisions(ranking.space)
    with no_collection():
        best = ranking.best(top)
        advice = [] if best else _advice(ranking, vary)
    return Plan(
        base=recipe,
        machine=machine,
        limit=limit,
        best=best,
        listed=ranking.listed,
        too_large=ranking.too_large,
        dropped=ranking.space.dropped,
        refused=ranking.refused,
        advice=advice,
    )


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector rests: a search makes many small objects and no cycles (a tenth of its time)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _ranking(recipe: Recipe, machine: Machine, limit: float, vary: Sequence[str]) -> Ranking:
    world = recipe.layout.world
    space = Space(recipe=recipe, world=world, per_node=machine.per_node, choices=choices_of(recipe, vary=vary))
    return Ranking(space=space, machine=machine, limit=limit, excess=machine.allocator_excess)


def _check_precisions(space: Space) -> None:
    """Check that one of the precisions can be computed in: otherwise every recipe would be asked, in vain."""
    refusal: ConfigError | None = None
    for choice in space.choices.precisions:
        try:
            choice.value.check_device(accelerator=space.recipe.cluster.accelerator, device=space.recipe.cluster.device)
        except ConfigError as error:
            refusal = refusal or error
        else:
            return
    if refusal is not None:
        raise refusal


def _advice(ranking: Ranking, vary: Sequence[str]) -> list[str]:
    """What is nearest to a request that no recipe answers."""
    if ranking.listed == 0:
        return _other_worlds(ranking, vary) + _other_batches(ranking, vary)
    if ranking.least is None:
        return [f"every layout breaks a rule: {rule}" for rule in list(ranking.refused)[:3]]
    needed, recipe = ranking.least
    smallest = f"{recipe.layout.label}, microbatch {recipe.microbatch}, ac={recipe.ac.kind}"
    has = f"{ranking.limit / 1e9:.1f} GB that a device has"
    lines = [f"the smallest needs {needed / 1e9:.1f} GB of the {has}: {smallest}"]
    for factor in _LARGER_WORLDS:
        world = ranking.space.world * factor
        if (fastest := _first(ranking, world, ranking.space.recipe.training.global_batch, vary)) is not None:
            lines.append(f"it fits on {world:,} devices: world={world} ({fastest.recipe.layout.label})")
            break
    else:
        lines.append("nor does it fit on 64 times as many: try precision=bf16_full, or a smaller model")
    return lines


def _other_worlds(ranking: Ranking, vary: Sequence[str]) -> list[str]:
    """The next smaller world that has a recipe."""
    world, batch = ranking.space.world, ranking.space.recipe.training.global_batch
    for smaller in range(world - 1, max(0, world - 257), -1):
        if (fastest := _first(ranking, smaller, batch, vary)) is not None:
            return [f"the nearest smaller world that works: world={smaller} ({fastest.recipe.layout.label})"]
    return []


def _other_batches(ranking: Ranking, vary: Sequence[str]) -> list[str]:
    """The next global batch that some layout of the world divides."""
    world, batch = ranking.space.world, ranking.space.recipe.training.global_batch
    for unit in (world, world // math.gcd(world, ranking.machine.per_node)):
        larger = -(-batch // unit) * unit
        if larger != batch and (fastest := _first(ranking, world, larger, vary)) is not None:
            return [f"or another batch: training.global_batch={larger} ({fastest.recipe.layout.label})"]
    return []


def _first(ranking: Ranking, world: int, batch: int, vary: Sequence[str]) -> Ranked | None:
    """The fastest recipe of another world or batch; None: there is none."""
    base = ranking.space.recipe
    recipe = dataclasses.replace(
        base,
        world=world,
        training=dataclasses.replace(base.training, global_batch=batch),
        parallelism=dataclasses.replace(base.parallelism.with_degrees(Layout(shard=world).degrees()), expert=1),
    )
    other = _ranking(recipe, ranking.machine, ranking.limit, vary)
    best = other.best(1) if other.space.has_layouts() else []
    return best[0] if best else None
