"""Plans for a number of processes, as text and values: the fastest recipes that fit; or why none fits, and advice."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.costs import AXES, Layout, resolve_layout, training_flops_per_token
from titanlab.distributed import this_host
from titanlab.errors import ConfigError
from titanlab.plan.machine import Machine, machine_of, memory_error
from titanlab.plan.memory import added, stored_pieces
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.ranking import NEAR, Ranked, RecipeRanking
from titanlab.plan.space import Choices, LayoutSpace, Vary, choices_of
from titanlab.plan.step_time import StepTime, step_time
from titanlab.ranges import declared_fields
from titanlab.recipe import Recipe, check_addressable, check_data, check_processes, resolve
from titanlab.system import counted, grouped, significant

# Share of a device's memory that recipes leave free, for CUDA and NCCL and for the error of the estimate. The real
# margin is larger: the planner takes a datasheet's GB as 1e9 bytes, 7 % less than a driver reports.
MARGIN = round(0.02 + memory_error(), 2)
MOST = 1000
# Multiples of the world to try if no recipe fits.
_LARGER_WORLDS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The planner's answer for one recipe and world.

    Attributes:
        base: the given recipe, resolved for its world.
        ranking: has the machine, the limit of its memory, and how many recipes were listed and left out.
        advice: if `best` is empty, lines that say what would work.
    """

    base: Recipe
    ranking: RecipeRanking
    best: Sequence[Ranked]
    advice: Sequence[str] = ()


def for_planning(recipe: Recipe, *, stands: bool = False) -> Recipe:
    """The recipe, resolved for its cluster and not for this host, unless its jobs run here.

    Args:
        stands: keep the recipe's degrees; otherwise only their product counts, and becomes `shard`.

    Raises:
        ConfigError: no device is named, or no accelerator for jobs on other hosts; or the world is below 1.
    """
    known = "name one, such as cluster=h100 or cluster=cpu"
    if recipe.cluster.accelerator == "auto":
        if not recipe.launch.runs_here:
            rule = "is whatever a node has, and a plan is for machines whose facts are known"
            raise ConfigError("cluster.accelerator", "auto", rule, known)
        host, cluster = this_host(), recipe.cluster
        device = host.device if cluster.device is None else cluster.device
        per_node = host.count if cluster.per_node is None else cluster.per_node
        cluster = dataclasses.replace(cluster, accelerator=host.accelerator, device=device, per_node=per_node)
        recipe = dataclasses.replace(recipe, cluster=cluster)
    cluster = recipe.cluster
    if cluster.accelerator == "cuda" and cluster.device in (None, "cpu"):
        rule, cure = "names no GPU, and a plan is for machines whose facts are known", "name one, such as cluster=h100"
        if cluster.device == "cpu":
            # The user chose cluster=cpu, and then set cluster.accelerator=cuda.
            rule = "is not a GPU, and cluster.accelerator=cuda"
            cure = "try cluster=h100, or add cluster.accelerator=cpu"
        raise ConfigError("cluster.device", cluster.device, rule, cure)
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
    # Undo what `resolve` computed: each layout of the search has its own loss_chunk.
    training = dataclasses.replace(resolved.training, loss_chunk=recipe.training.loss_chunk)
    return dataclasses.replace(resolved, training=training)


def plan(recipe: Recipe, *, vary: Vary = (), top: int = 20) -> Plan:
    """Find the fastest recipes for a recipe's number of processes.

    Raises:
        ConfigError: a value of the request is wrong, or its devices cannot compute in its precision.
    """
    if not 1 <= top <= MOST:
        raise ConfigError("--top", top, f"must lie in 1 to {MOST:,}", "try 20")
    check_addressable(recipe)
    machine = machine_of(recipe)
    ranking = _ranking(recipe, machine, machine.memory_bytes * (1 - MARGIN), vary)
    _check_precisions(ranking.space)
    with no_collection():
        best = ranking.best(top)
        return Plan(base=recipe, ranking=ranking, best=best, advice=[] if best else _advice(ranking, vary))


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause Python's garbage collector, which takes a tenth of a search: a search makes many objects, but no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _ranking(recipe: Recipe, machine: Machine, limit: float, vary: Vary) -> RecipeRanking:
    space = LayoutSpace(recipe, per_node=machine.per_node, choices=choices_of(recipe, vary=vary))
    return RecipeRanking(space=space, machine=machine, limit=limit)


def beyond_node(recipe: Recipe, per_node: int) -> str:
    """The warning for a resolved recipe whose tensor parallelism leaves its node; names the planner's layout, if any.

    The planner varies only degrees and microbatch here: this takes a tenth of a second, and a full search seconds.
    """
    devices = per_node * recipe.cluster.linked_nodes
    line = (
        f"parallelism.tensor={recipe.layout.tensor} sends between nodes of {counted(devices, 'device')}, over a network"
    )
    if recipe.cluster.accelerator == "cpu":
        # Estimates for CPUs are too rough to recommend a layout.
        return line
    with contextlib.suppress(ConfigError), no_collection():
        recipe = dataclasses.replace(recipe, cluster=dataclasses.replace(recipe.cluster, per_node=per_node))
        machine, every = machine_of(recipe), choices_of(recipe)
        # Take the first option of each field, which is the recipe's own.
        own = Choices(**{field.name: getattr(every, field.name)[:1] for field in dataclasses.fields(every)})
        space = _LayoutsForData(recipe, per_node=machine.per_node, choices=own)
        ranking = RecipeRanking(space=space, machine=machine, limit=machine.memory_bytes * (1 - MARGIN))
        speed = grouped(step_time(recipe, machine, pipeline=simulated_time).tokens_per_second)
        for best in ranking.best(1):
            keys = [word for word in overrides(best, recipe) if not word.startswith(("ac", "schedule"))]
            better = f"{best.recipe.layout.label}, with {grouped(best.time.tokens_per_second)}: {' '.join(keys)}"
            line += f": an estimated {speed} tokens/s a device; the planner would take {better}"
    return line


class _LayoutsForData(LayoutSpace):
    """A space with only those layouts whose data-parallel processes can divide the recipe's data."""

    def layouts(self) -> list[Layout]:
        found = super().layouts()
        allowed = set()
        for layout in {layout.data: layout for layout in found}.values():
            with contextlib.suppress(ConfigError):
                parallelism = self.recipe.parallelism.with_degrees(layout.degrees())
                check_data(dataclasses.replace(self.recipe, parallelism=parallelism))
                allowed.add(layout.data)
        return [layout for layout in found if layout.data in allowed]


def _check_precisions(space: LayoutSpace) -> None:
    """Check that the devices can compute in at least one of the precisions; otherwise every recipe would fail."""
    refusals, cluster = [], space.recipe.cluster
    for choice in space.choices.precisions:
        try:
            choice.value.check_device(accelerator=cluster.accelerator, device=cluster.device)
            return
        except ConfigError as error:
            refusals.append(error)
    raise refusals[0]


def _advice(ranking: RecipeRanking, vary: Vary) -> list[str]:
    """Lines that name the nearest world or batch for which some recipe fits, or the rules that forbid all layouts."""
    world, batch = ranking.space.world, ranking.space.recipe.training.global_batch
    if ranking.listed == 0:
        worlds = ((smaller, batch) for smaller in range(world - 1, max(0, world - 257), -1))
        units = (world, world // math.gcd(world, ranking.machine.per_node))
        batches = ((world, -(-batch // unit) * unit) for unit in units)
        lines = []
        if (fastest := _fastest(ranking, worlds, vary)) is not None:
            layout = fastest.recipe.layout
            lines.append(f"the nearest smaller world that works: world={layout.world} ({layout.label})")
        if (fastest := _fastest(ranking, batches, vary)) is not None:
            larger, label = fastest.recipe.training.global_batch, fastest.recipe.layout.label
            lines.append(f"or another batch: training.global_batch={larger} ({label})")
        return lines
    if ranking.least is None:
        return [f"every layout breaks a rule: {rule}" for rule in list(ranking.refused)[:3]]
    needed, recipe = ranking.least
    smallest = f"{recipe.layout.label}, microbatch {recipe.microbatch}, ac={recipe.ac.kind}"
    has = f"{ranking.limit / 1e9:.1f} GB that a device has"
    lines = [f"the smallest needs {needed / 1e9:.1f} GB of the {has}: {smallest}"]
    fastest = _fastest(ranking, ((world * factor, batch) for factor in _LARGER_WORLDS), vary)
    if fastest is None:
        return [*lines, "nor does it fit on 64 times as many: try precision=bf16_full, or a smaller model"]
    layout = fastest.recipe.layout
    return [*lines, f"it fits on {layout.world:,} devices: world={layout.world} ({layout.label})"]


def _fastest(ranking: RecipeRanking, requests: Iterable[tuple[int, int]], vary: Vary) -> Ranked | None:
    """The fastest recipe for the first of the (world, batch) requests for which any recipe fits; None: none does."""
    base = ranking.space.recipe
    for world, batch in requests:
        if (world, batch) == (ranking.space.world, base.training.global_batch):
            continue
        recipe = dataclasses.replace(
            base,
            world=world,
            training=dataclasses.replace(base.training, global_batch=batch),
            parallelism=dataclasses.replace(base.parallelism.with_degrees(Layout(shard=world).degrees()), expert=1),
        )
        other = _ranking(recipe, ranking.machine, ranking.limit, vary)
        if other.space.has_layouts() and (best := other.best(1)):
            return best[0]
    return None


HEADINGS = (
    "", "layout", "schedule", "mb", "AC", "precision", "compile", "GB", "reserved", "tok/s/GPU", "MFU", "step", "of it"
)  # fmt: skip
FIGURES = ("", "mb", "GB", "reserved", "tok/s/GPU", "MFU", "step")
_RULES = 6
_PARTS = 3
# Smaller differences than this share of a step are not mentioned.
_SMALL = 0.002


def table_rows(plan: Plan, others: Sequence[Ranked] = ()) -> list[tuple[str, ...]]:
    """The rows of a plan's table, with the columns of `HEADINGS`; columns whose cells are all empty may be left out.

    Args:
        others: recipes of other plans in the same table. A column is empty only if these recipes do not need it either.
    """
    shown = [*plan.best, *others]
    varied = [len({getattr(ranked.point, name).name for ranked in shown}) > 1 for name in ("precision", "compile")]
    return [
        (
            str(place),
            ranked.recipe.layout.label,
            ranked.point.schedule.name,
            str(ranked.point.microbatch),
            ranked.point.ac.name,
            ranked.point.precision.name if varied[0] else "",
            ranked.point.compile.name if varied[1] else "",
            f"{ranked.memory.allocated / 1e9:.1f}",
            f"{ranked.reserved / 1e9:.1f}",
            grouped(ranked.time.tokens_per_second),
            "" if math.isnan(ranked.time.mfu) else f"{100 * ranked.time.mfu:.1f}%",
            f"{significant(ranked.time.seconds, 4)} s",
            split_text(ranked.time),
        )
        for place, ranked in enumerate(plan.best, start=1)
    ]


def not_priced(recipe: Recipe) -> list[str]:
    """A line for each chosen option whose effect on the time of a step is not known."""
    lines = []
    for group in dataclasses.fields(recipe):
        config = getattr(recipe, group.name)
        schema: type = type(config)
        for field, declared in declared_fields(schema) if dataclasses.is_dataclass(schema) else ():
            value, values = getattr(config, field.name), declared.get("not_priced", ())
            is_unknown = value != field.default if values is True else value in values
            if is_unknown:
                shown = f"{group.name}.{field.name}={str(value).lower()}"
                lines.append(f"{shown}: its effect on the time of a step is not known")
    return lines


@dataclass(frozen=True, kw_only=True)
class WholeModel:
    """FLOPs of a step without recomputation, and bytes of parameters and of optimizer state; over all devices."""

    step_flops: int
    model_bytes: int
    optimizer_bytes: int

    def __str__(self) -> str:
        sizes = (
            f"the model takes {self.model_bytes / 1e9:,.1f} GB and its optimizer {self.optimizer_bytes / 1e9:,.1f} GB"
        )
        return f"{self.step_flops / 1e15:,.4g} PFLOP a step; {sizes}"


def whole_model(recipe: Recipe) -> WholeModel:
    stored = stored_pieces(recipe.model, recipe.precision, recipe.optimizer, 1, 1, freeze=recipe.training.freeze)
    whole = added(stored.values())
    per_token = training_flops_per_token(recipe.account, seq_len=recipe.training.seq_len)
    return WholeModel(
        step_flops=per_token * recipe.tokens_per_step,
        model_bytes=whole.parameters,
        optimizer_bytes=whole.optimizer,
    )


def title(plan: Plan) -> str:
    base, machine, limit = plan.base, plan.ranking.machine, "memory not known"
    if not math.isinf(machine.memory_bytes):
        limit = (
            f"{machine.memory_bytes / 1e9:.0f} GB each, {100 * MARGIN:.0f} % of it left free for CUDA, NCCL and errors"
        )
    return (
        f"{base.model.account().parameter_count / 1e9:.2f}B parameters on {counted(base.layout.world, machine.name)} "
        f"({limit}); "
        f"{counted(base.training.global_batch, 'sequence')} of {grouped(base.training.seq_len)} tokens, "
        f"{whole_model(base)}"
    )


def machine_rows(plans: Mapping[str, Plan]) -> list[tuple[str, ...]]:
    """The rows of several machines' plans, the fastest machine first; the first column has the machine's name."""
    ordered = sorted(plans.items(), key=lambda item: item[1].best[0].time.seconds if item[1].best else math.inf)
    every = [ranked for each in plans.values() for ranked in each.best]
    none = ("", "no layout fits", *[""] * (len(HEADINGS) - 2))
    return [(name, *row[1:]) for name, each in ordered for row in table_rows(each, every) or [none]]


def split_text(time: StepTime) -> str:
    """The largest parts of a step: `compute 84%, bubble 9%, tensor 4%`."""
    parts = sorted(time.parts.items(), key=lambda part: -part[1])[:_PARTS]
    return ", ".join(f"{name} {100 * seconds / time.seconds:.0f}%" for name, seconds in parts if seconds > 0)


def left_out(plan: Plan) -> list[str]:
    ranking = plan.ranking
    lines = [f"{ranking.listed:,} recipes; {ranking.too_large:,} of those looked at do not fit"]
    for heading, rules in (
        ("layouts that no recipe can have, by rule:", ranking.space.dropped),
        ("fast recipes that a rule forbids:", ranking.refused),
    ):
        if rules:
            lines += [heading, *(f"  {line}" for line in summary(rules, _RULES))]
    return lines


def reasons(best: Sequence[Ranked]) -> list[str]:
    """One sentence for each recipe: which parts of its step make it slower than the recipe above it."""
    others = (f"{place + 1} {_difference(best[place - 1], best[place])}" for place in range(1, len(best)))
    return [_first(best), *others]


def closeness(plan: Plan) -> str:
    """How close the first recipe comes to the memory of a device; empty if the memory is not known."""
    size = plan.ranking.machine.memory_bytes
    if not plan.best or math.isinf(size):
        return ""
    left = size - plan.best[0].reserved
    return (
        f"1 leaves {left / 1e9:.1f} of {size / 1e9:.0f} GB; the median error of the estimate is "
        f"{100 * memory_error():.0f} %, here {memory_error() * plan.best[0].reserved / 1e9:.1f} GB"
    )


def _first(best: Sequence[Ranked]) -> str:
    """The sentence that says why the first recipe is first."""
    fastest = min(best, key=lambda ranked: ranked.time.seconds)
    if fastest is best[0]:
        return f"1 is the fastest that fits: {split_text(best[0].time)}"
    slower = best[0].time.seconds / fastest.time.seconds - 1
    alike = sum(ranked.time.seconds <= (1 + NEAR) * fastest.time.seconds for ranked in best[1:])
    rule = f"has the fewest axes of those within {100 * NEAR:.0f} % of the fastest, {best.index(fastest) + 1}"
    return f"1 {rule} ({alike} others here): {100 * slower:.1f} % slower, {split_text(best[0].time)}"


def _difference(above: Ranked, ranked: Ranked) -> str:
    change = ranked.time.seconds - above.time.seconds
    small = _SMALL * above.time.seconds
    names = dict.fromkeys((*above.time.parts, *ranked.time.parts))
    parts = {name: ranked.time.parts.get(name, 0.0) - above.time.parts.get(name, 0.0) for name in names}
    named = sorted((part for part in parts.items() if abs(part[1]) > small), key=lambda part: -abs(part[1]))[:_PARTS]
    terms = ", ".join(f"{name} {seconds:+.3g} s" for name, seconds in named)
    freed = above.reserved - ranked.reserved
    memory = f"; it takes {abs(freed) / 1e9:.1f} GB {'less' if freed > 0 else 'more'}" if abs(freed) > 0.5e9 else ""
    if not terms:
        return f"takes as long within {100 * _SMALL:.1f} %{memory}"
    return f"is {abs(change):.3g} s {'faster' if change < 0 else 'slower'}: {terms}{memory}"


def plan_values(plan: Plan) -> dict[str, Any]:
    ranking = plan.ranking
    return {
        "world": plan.base.layout.world,
        "device": ranking.machine.name,
        "memory_bytes": ranking.machine.memory_bytes,
        "limit_bytes": ranking.limit,
        "global_batch": plan.base.training.global_batch,
        "seq_len": plan.base.training.seq_len,
        **dataclasses.asdict(whole_model(plan.base)),
        "not_priced": not_priced(plan.base),
        "recipes": ranking.listed,
        "too_large": ranking.too_large,
        "dropped_layouts": dict(ranking.space.dropped),
        "refused": dict(ranking.refused),
        "advice": list(plan.advice),
        "best": [_values(ranked, plan.base) for ranked in plan.best],
    }


def _values(ranked: Ranked, base: Recipe) -> dict[str, Any]:
    return {
        "layout": ranked.recipe.layout.label,
        "degrees": ranked.recipe.layout.degrees(),
        "schedule": ranked.point.schedule.name,
        "microbatch": ranked.point.microbatch,
        "microbatches": ranked.recipe.microbatches,
        "ac": ranked.point.ac.name,
        "precision": ranked.point.precision.name,
        "compile": ranked.point.compile.name,
        "overrides": overrides(ranked, base),
        "allocated_bytes": ranked.memory.allocated,
        "reserved_bytes": ranked.reserved,
        "memory": dict(ranked.memory.items),
        "step_seconds": ranked.time.seconds,
        "parts": dict(ranked.time.parts),
        "tokens_per_second_per_device": ranked.time.tokens_per_second,
        "mfu": ranked.time.mfu,
    }


def overrides(ranked: Ranked, base: Recipe) -> list[str]:
    """The overrides that change the recipe `base` to this recipe; precision and compile only if they differ."""
    degrees = [f"parallelism.{axis}={degree}" for axis, degree in ranked.recipe.layout.degrees().items()]
    if ranked.recipe.model.account().experts is not None:
        degrees.append(f"parallelism.expert={ranked.recipe.layout.expert}")
    arguments = [*degrees, f"training.microbatch={ranked.point.microbatch}", *_chosen("ac", ranked.point.ac.value)]
    if ranked.recipe.layout.pipeline > 1:
        arguments += _chosen("schedule", ranked.point.schedule.value)
    if ranked.recipe.parallelism.reduce_gradients != base.parallelism.reduce_gradients:
        arguments.append(f"parallelism.reduce_gradients={ranked.recipe.parallelism.reduce_gradients}")
    if ranked.recipe.precision != base.precision:
        arguments += _chosen("precision", ranked.recipe.precision)
    if ranked.recipe.compile != base.compile:
        arguments += _fields("compile", ranked.recipe.compile, bool | str)
    return arguments


def _chosen(group: str, option: Any) -> list[str]:
    """Overrides for an option and all its numbers, defaults too: the requested recipe may have other numbers."""
    return [f"{group}={option.kind}", *_fields(group, option, int | float)]


def _fields(group: str, option: Any, types: Any) -> list[str]:
    values = {field.name: getattr(option, field.name) for field in dataclasses.fields(option)}
    return [f"{group}.{name}={str(value).lower()}" for name, value in values.items() if isinstance(value, types)]


def summary(dropped: Mapping[str, int], limit: int) -> list[str]:
    """Lines for the `limit` rules that drop the most layouts, and a line for all other rules."""
    rows = sorted(dropped.items(), key=lambda row: -row[1])
    lines = [f"{count:,}: {rule}" for rule, count in rows[:limit]]
    if len(rows) > limit:
        lines.append(f"{sum(count for _, count in rows[limit:]):,}: {len(rows) - limit} other rules")
    return lines
