"""The space of recipes for a world: every allowed layout, with every microbatch, schedule and checkpointing policy.

The rules of recipes decide what is allowed. Options of other packages take part, because options are discovered.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from titanlab.costs import Layout, account_for, divisors
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.parallelism import Parallelism
from titanlab.plan.stages import model_facts
from titanlab.recipe import Recipe, recipe_rules
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.schedule.contract import PipelineSchedule

# Groups of options that the planner varies only on request.
VARIED = ("precision", "compile")
# The groups to vary: their names; or group → configs to try, where an empty list stands for all configs.
Vary = Mapping[str, Sequence[Any]] | Sequence[str]


def choices_of(recipe: Recipe, *, vary: Vary = ()) -> Choices:
    """The choices for a resolved recipe; in each list the recipe's own option comes first.

    Args:
        vary: groups of `VARIED` that vary; the other groups of `VARIED` stay as the recipe has them.

    Raises:
        ConfigError: a name is not in `VARIED`.
    """
    for name in vary:
        if name not in VARIED:
            rule = "cannot be varied" if name else "names no group"
            cure = f"try {', '.join(VARIED)} or cluster=h100,h200; all else varies anyway"
            raise ConfigError("--vary", name, rule, cure)
    given = vary if isinstance(vary, Mapping) else dict.fromkeys(vary, ())
    schedules = [other for schedule in _defaults("schedule") for other in schedule.alternatives()]
    # Leave out policies that let a compiler decide what is recomputed: their memory cannot be predicted.
    acs = [policy for policy in _defaults("ac") if policy.compiler_budget() is None]
    all_of = {"precision": _defaults("precision"), "compile": [Compile(), Compile(blocks=True, loss=True)]}
    varied = {name: given[name] or all_of[name] for name in given}
    return Choices(
        schedules=_named([recipe.schedule, *schedules], _name_of_schedule),
        acs=_named([recipe.ac, *acs], _name),
        precisions=_named([recipe.precision, *varied.get("precision", ())], _name),
        compiles=_named([recipe.compile, *varied.get("compile", ())], _name_of_compile),
    )


def _defaults(group: str) -> list[Any]:
    """The default config of each kind that needs no value from a person."""
    configs = []
    for option in discover()[group].values():
        with contextlib.suppress(ConfigError):
            configs.append(option.schema())
    return configs


def _named(values: Iterable[Any], name: Callable[[Any], str]) -> list[Choice]:
    """The values as choices, each value once."""
    return [Choice(name(value), value) for value in {repr(value): value for value in values}.values()]


def _name_of_schedule(schedule: PipelineSchedule) -> str:
    stages = schedule.stage_count(ranks=1)
    return f"{schedule.kind} ×{stages}" if stages > 1 else schedule.kind


def _name_of_compile(config: Compile) -> str:
    return "+".join(name for name, on in (("block", config.blocks), ("loss", config.loss)) if on) or "off"


def _name(value: Any) -> str:
    """An option's name in tables: its kind, and the fields that differ from their defaults."""
    changed = []
    for each in dataclasses.fields(value):
        own = getattr(value, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if each.name != "kind" and own != default and isinstance(own, int | float | bool):
            changed.append(f"{each.name}={str(own).lower() if isinstance(own, bool) else own}")
    return " ".join([value.kind, *changed])


# Reasons to leave out a layout that no rule forbids, as long as other layouts are left.
BEYOND_NODE = "tensor parallelism would leave its node"
UNEVEN_NODES = "shards of a copy of the model would fill some nodes in part"
SHORT_CHUNKS = "context parallelism would cut sequences into chunks of fewer than 1,024 tokens"
# Least tokens of a chunk; a ring has two chunks a rank. Shorter chunks give a GPU too little work between exchanges.
_LEAST_CHUNK = 1024


class Choice(NamedTuple):
    """One value of a part of a recipe that the space varies: its name for tables, and the config."""

    name: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the space varies in addition to degrees and microbatch; each field has at least one choice."""

    schedules: Sequence[Choice]
    acs: Sequence[Choice]
    precisions: Sequence[Choice]
    compiles: Sequence[Choice]


class SpacePoint(NamedTuple):
    """The choices that make one recipe of the space; without a pipeline, the schedule is the given recipe's."""

    layout: Layout
    microbatch: int
    schedule: Choice
    ac: Choice
    precision: Choice
    compile: Choice


class LayoutSpace:
    """The recipes that the world and the global batch of a resolved recipe allow.

    Attributes:
        recipe: has the values that the space does not vary.
        dropped: rule → number of layouts that break it; filled while layouts are listed.
    """

    def __init__(self, recipe: Recipe, *, per_node: int, choices: Choices) -> None:
        """`per_node`: number of processes on a node, or on the neighbouring nodes that share a link."""
        self.recipe, self.world, self.per_node, self.choices = recipe, recipe.layout.world, per_node, choices
        self.dropped: Counter[str] = Counter()
        facts = model_facts(recipe.model)
        # An account with only one block: the rules look at each parameter, but blocks are alike.
        self._account = dataclasses.replace(facts.sample, layers=facts.account.layers, pieces=facts.account.pieces)
        # These caches live as long as the space: each rule is checked once for all layouts that are equal for it.
        # `recipe_of` has a small cache: few points are asked for again much later.
        self.recipe_of = functools.lru_cache(maxsize=4096)(self._recipe_of)
        self._context_broken = functools.cache(self._context_rule)
        self._expert_broken = functools.cache(self._expert_rule)
        self._tensor_broken = functools.cache(self._tensor_rule)
        self._degree_broken = functools.cache(self._degree_rule)
        self._legal = functools.cache(self._legal_schedules)
        self._parallelism = functools.cache(self._with_degrees)
        self._reducing_last = functools.cache(
            lambda layout: _changed(self._parallelism(layout), layout=layout, reduce_gradients="last")
        )
        self._training = functools.cache(lambda size: dataclasses.replace(recipe.training, microbatch=size))

    def layouts(self) -> list[Layout]:
        """The layouts that the rules allow; those that are never the fastest are left out if others are allowed."""
        found: dict[str, list[Layout]] = {reason: [] for reason in ("", UNEVEN_NODES, SHORT_CHUNKS, BEYOND_NODE)}
        self.dropped.clear()
        for layouts in _without_experts(self.world):
            first = layouts[0]
            # A large world has hundreds of thousands of layouts: check those that break the same rule only once.
            if self._are_alike(first) and (rule := self.broken(first)):
                self.dropped[rule] += sum(1 + len(self._expert_degrees(layout)) for layout in layouts)
                continue
            for layout in self._with_experts(layouts):
                if rule := self.broken(layout):
                    self.dropped[rule] += 1
                else:
                    found[self._never_fast(layout)].append(layout)
        chosen = next((reason for reason, layouts in found.items() if layouts), "")
        self.dropped.update({reason: len(layouts) for reason, layouts in found.items() if layouts and reason != chosen})
        return found[chosen]

    def _are_alike(self, layout: Layout) -> bool:
        """Whether layouts that differ from `layout` only in `replicate`, `shard` and `expert` break the same rule."""
        if self.recipe.training.global_batch % layout.data or self._context_broken(layout.context):
            return True
        return self._account.experts is None and (layout.tensor == 1 or bool(self._degree_broken(layout.tensor)))

    def _never_fast(self, layout: Layout) -> str:
        """The reason why some other layout of the space is at least as fast; empty: no reason is known."""
        if self.per_node % layout.tensor:
            return BEYOND_NODE
        is_short = layout.context > 1 and self.recipe.training.seq_len < 2 * _LEAST_CHUNK * layout.context
        if is_short and self.recipe.cluster.accelerator == "cuda":
            return SHORT_CHUNKS
        copy = layout.fsdp * layout.tensor
        return UNEVEN_NODES if layout.replicate > 1 and copy % self.per_node and self.per_node % copy else ""

    def has_layouts(self) -> bool:
        """Whether the rules allow any layout; for a large world without one this is much faster than `layouts`."""
        possible = (
            Layout(
                replicate=replicate, shard=data // replicate, context=context, tensor=tensor, pipeline=left // tensor
            )
            for data in divisors(math.gcd(self.world, self.recipe.training.global_batch))
            for context in divisors(self.world // data)
            if not self._context_broken(context)
            for left in [self.world // data // context]
            for tensor in divisors(left)
            if self._account.experts is not None or not self._degree_broken(tensor)
            for replicate in divisors(data)
        )
        return not all(map(self.broken, self._with_experts(possible)))

    def _with_experts(self, layouts: Iterable[Layout]) -> Iterator[Layout]:
        """Each layout without expert parallelism, then with each degree of expert parallelism that it can have."""
        for layout in layouts:
            yield layout
            for degree in self._expert_degrees(layout):
                yield dataclasses.replace(layout, expert=degree)

    def _expert_degrees(self, layout: Layout) -> Sequence[int]:
        """The degrees of expert parallelism above 1 that a layout can have."""
        experts = self._account.experts
        if experts is None or (layout.tensor > 1 and not self.recipe.parallelism.sequence_parallel):
            return ()
        return divisors(math.gcd(experts.count, layout.fsdp * layout.tensor))[1:]

    def points(self, layout: Layout) -> Iterator[SpacePoint]:
        """The points of a layout; `broken_rule` tells whether the rules allow the recipe of a point."""
        for microbatch, schedules in self.microbatches(layout):
            for schedule, others in itertools.product(schedules, self.others()):
                yield SpacePoint(layout, microbatch, schedule, *others)

    def microbatches(self, layout: Layout) -> Iterator[tuple[int, Sequence[Choice]]]:
        """Microbatches of a layout, each with the schedules that its pipeline can run."""
        local = self.recipe.training.global_batch // layout.data
        within = Layout(tensor=layout.tensor, context=layout.context)
        sequence_parallel = self.recipe.parallelism.sequence_parallel
        for microbatch in divisors(local):
            if layout.tensor > 1 and self._tensor_broken(within, microbatch, sequence_parallel=sequence_parallel):
                continue
            schedules = self.schedules(layout, local // microbatch)
            if schedules:
                yield microbatch, schedules

    def schedules(self, layout: Layout, microbatches: int | None = None) -> Sequence[Choice]:
        """The schedules that a layout's pipeline can run; without a pipeline, only the recipe's own."""
        if layout.pipeline == 1:
            return [Choice("", self.recipe.schedule)]
        return self.choices.schedules if microbatches is None else self._legal(layout.pipeline, microbatches)[0]

    def others(self) -> Iterator[tuple[Choice, Choice, Choice]]:
        return itertools.product(self.choices.acs, self.choices.precisions, self.choices.compiles)

    def _recipe_of(self, point: SpacePoint) -> Recipe:
        # Copy the recipe, because making a new one would check each of its values again.
        recipe = copy.copy(self.recipe)
        vars(recipe).update(
            world=point.layout.world,
            parallelism=self._parallelism(point.layout),
            training=self._training(point.microbatch),
            schedule=point.schedule.value,
            ac=point.ac.value,
            precision=point.precision.value,
            compile=point.compile.value,
        )
        if recipe.parallelism.reduce_gradients == "auto" and recipe.reduces_each:
            # Reducing last is faster in most cases; if it does not fit, the ranking reduces after each microbatch.
            vars(recipe).update(parallelism=self._reducing_last(point.layout))
        return recipe

    def broken_rule(self, recipe: Recipe) -> str:
        """The first rule that a recipe of the space breaks; empty: it breaks none."""
        # The rules look at each parameter, but blocks are alike: check an account with one block first, which is fast.
        lighter = copy.copy(recipe.model)
        object.__setattr__(lighter, "account", lambda: self._account)
        if not _broken(recipe_rules.check_all_but_data, dataclasses.replace(recipe, model=lighter)):
            return ""
        return _broken(recipe_rules.check_all_but_data, recipe)

    def broken(self, layout: Layout) -> str:
        """A rule that every point of a layout breaks; empty: no such rule is known."""
        batch = self.recipe.training.global_batch
        if batch % layout.data:
            return f"training.global_batch={batch} is not a multiple of the data-parallel processes"
        rule = self._context_broken(layout.context) or self._within_broken(layout)
        if rule or layout.pipeline == 1:
            return rule
        for microbatch in divisors(batch // layout.data):
            legal, rule = self._legal(layout.pipeline, batch // layout.data // microbatch)
            if legal:
                return ""
        return rule

    def _within_broken(self, layout: Layout) -> str:
        """The rule that a layout's tensor or expert parallelism breaks, alone or together with FSDP2's shards."""
        if layout.expert == 1 and (rule := self._degree_broken(layout.tensor)):
            return rule
        within = Layout(tensor=layout.tensor, shard=layout.fsdp, expert=layout.expert)
        return self._expert_broken(within) or self._tensor_broken(within, 1, sequence_parallel=False)

    def _degree_rule(self, tensor: int) -> str:
        """The rule that a degree of tensor parallelism breaks, however FSDP2 shards; without expert parallelism."""
        return self._tensor_broken(Layout(tensor=tensor), 1, sequence_parallel=False)

    def _context_rule(self, context: int) -> str:
        recipe, layout = self.recipe, Layout(context=context)
        given = {"seq_len": recipe.training.seq_len, "kernel": recipe.model.attention}
        return _broken(recipe_rules.check_context, layout, self._account, **given)

    def _expert_rule(self, layout: Layout) -> str:
        return _broken(recipe_rules.check_expert, layout, self.recipe.parallelism, self._account)

    def _tensor_rule(self, layout: Layout, microbatch: int, *, sequence_parallel: bool) -> str:
        config = dataclasses.replace(self.recipe.parallelism, sequence_parallel=sequence_parallel)
        given = {"seq_len": self.recipe.training.seq_len, "microbatch": microbatch}
        return _broken(recipe_rules.check_tensor, layout, config, account_for(self._account, layout), **given)

    def _legal_schedules(self, pipeline: int, microbatches: int) -> tuple[Sequence[Choice], str]:
        """The schedules that a pipeline can run, and the rule that forbids the last of the other schedules."""
        if pipeline > self._account.layers and microbatches > 1:
            # The pipeline has more ranks than the model has blocks, whatever the number of microbatches.
            return self._legal(pipeline, 1)
        legal, last, config, layout = [], "", self.recipe.parallelism, Layout(pipeline=pipeline)
        for choice in self.choices.schedules:
            given = (layout, config, self._account, choice.value)
            if rule := _broken(recipe_rules.check_pipeline, *given, microbatches=microbatches):
                last = rule
            else:
                legal.append(choice)
        return legal, last

    def _with_degrees(self, layout: Layout) -> Parallelism:
        own = self.recipe.parallelism
        return _changed(
            own,
            **layout.degrees(),
            layout=layout,
            expert=layout.expert,
            # AsyncTP needs tensor parallelism.
            async_tensor=own.async_tensor and layout.tensor > 1,
            symmetric_memory=own.symmetric_memory and layout.fsdp > 1,
            # A split that the user gave fits only the number of ranks that it was made for.
            split=own.split if layout.pipeline == self.recipe.layout.pipeline else None,
        )


def _changed(parallelism: Parallelism, *, layout: Layout, **values: Any) -> Parallelism:
    """A copy of the config for a layout, with changed values; a new config would check each of its values again."""
    made = copy.copy(parallelism)
    vars(made).update(values, layout=layout)
    return made


def reducing_each(recipe: Recipe) -> Recipe:
    """The recipe with gradients reduced after each microbatch: by `auto` if `auto` decides so, else by `each`."""
    found = copy.copy(recipe)
    for choice in ("auto", "each"):
        changed = _changed(recipe.parallelism, layout=recipe.layout, reduce_gradients=choice)
        vars(found).update(parallelism=changed)
        if found.reduces_each:
            break
    return found


def _broken(check: Callable[..., None], *given: Any, **named: Any) -> str:
    """The text of the rule that a check finds broken; empty: none."""
    try:
        check(*given, **named)
    except ConfigError as error:
        return f"{error.key} {error.rule}"
    return ""


def all_layouts(world: int) -> Iterator[Layout]:
    return itertools.chain.from_iterable(_without_experts(world))


def _without_experts(world: int) -> Iterator[list[Layout]]:
    """All layouts without expert parallelism, in lists whose layouts differ only in `replicate` and `shard`."""
    for pipeline in divisors(world):
        for tensor in divisors(world // pipeline):
            for context in divisors(world // pipeline // tensor):
                data = world // pipeline // tensor // context
                within = {"pipeline": pipeline, "context": context, "tensor": tensor}
                yield [Layout(**within, replicate=copies, shard=data // copies) for copies in divisors(data)]
