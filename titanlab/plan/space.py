"""Every layout of a world for a recipe, with microbatch, schedule and checkpointing; the rules of recipes decide.

The options of the varied groups are discovered, so that options of other packages take part.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from titanlab.costs import Layout, ModelAccount, account_for, divisors
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.parallelism import Parallelism
from titanlab.plan.stages import model_facts
from titanlab.recipe import Recipe, recipe_rules
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.schedule.contract import PipelineSchedule

# Groups that vary only on request.
VARIED = ("precision", "compile")


def choices_of(recipe: Recipe, *, vary: Sequence[str] = ()) -> Choices:
    """The choices for a resolved recipe: its own first.

    Args:
        vary: names of groups in `VARIED`; the others stay as the recipe has them.

    Raises:
        ConfigError: a name is not in `VARIED`.
    """
    for name in vary:
        if name not in VARIED:
            rule = "cannot be varied" if name else "names no group"
            raise ConfigError("--vary", name, rule, f"try {' or '.join(VARIED)}; all else varies anyway")
    compiles: list[Any] = [recipe.compile]
    if "compile" in vary:
        compiles += [Compile(), Compile(blocks=True, loss=True)]
    return Choices(
        schedules=_schedules(recipe.schedule),
        # Not the policies that leave recomputation to a compiler: their memory cannot be predicted.
        acs=_named([recipe.ac, *(policy for policy in _defaults("ac") if policy.compiler_budget() is None)]),
        precisions=_named([recipe.precision, *(_defaults("precision") if "precision" in vary else [])]),
        compiles=[
            Choice("+".join(name for name, on in (("block", value.blocks), ("loss", value.loss)) if on) or "off", value)
            for value in _different(compiles)
        ],
    )


def _defaults(group: str) -> list[Any]:
    """The default config of each kind that needs no value from a person."""
    configs = []
    for option in discover()[group].values():
        try:
            configs.append(option.schema())
        except ConfigError:
            continue
    return configs


def _schedules(own: PipelineSchedule) -> list[Choice]:
    """A recipe's own schedule, and those of every kind; names include the stages of a rank if there are several."""
    others = [other for schedule in _defaults("schedule") for other in schedule.alternatives()]
    choices = []
    for schedule in _different([own, *others]):
        stages = schedule.stage_count(ranks=1)
        choices.append(Choice(f"{schedule.kind} ×{stages}" if stages > 1 else schedule.kind, schedule))
    return choices


def _named(values: Iterable[Any]) -> list[Choice]:
    return [Choice(_name(value), value) for value in _different(values)]


def _different(values: Iterable[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())


def _name(value: Any) -> str:
    """The kind, with the fields that differ from their defaults."""
    changed = []
    for each in dataclasses.fields(value):
        field_value = getattr(value, each.name)
        default = each.default_factory() if callable(each.default_factory) else each.default
        if each.name != "kind" and field_value != default and isinstance(field_value, int | float | bool):
            changed.append(f"{each.name}={str(field_value).lower() if isinstance(field_value, bool) else field_value}")
    return " ".join([value.kind, *changed])


# Reason for which a layout is left out although no rule forbids it.
BEYOND_NODE = "tensor parallelism would leave its node"


class Choice(NamedTuple):
    """One value of a part of a recipe that the space varies: its name for tables, and the config."""

    name: str
    value: Any


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What the space varies beside degrees and microbatch; each has at least one value."""

    schedules: Sequence[Choice]
    acs: Sequence[Choice]
    precisions: Sequence[Choice]
    compiles: Sequence[Choice]


class SpacePoint(NamedTuple):
    """One recipe of the space, as what distinguishes it; without a pipeline, the schedule is that of the recipe."""

    layout: Layout
    microbatch: int
    schedule: Choice
    ac: Choice
    precision: Choice
    compile: Choice


@dataclass(kw_only=True)
class LayoutSpace:
    """The recipes that a world and a global batch allow.

    Attributes:
        recipe: resolved; it gives all values that the space does not vary.
        per_node: processes on a node, or on nodes that share a link.
        dropped: number of layouts by the rule that they break; filled while layouts are listed.
    """

    recipe: Recipe
    world: int
    per_node: int
    choices: Choices
    dropped: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        # A cache with the lifetime of the space.
        self.recipe_of = functools.cache(self._recipe_of)
        self._ask = functools.cache(self._broken_rule)
        self._legal = functools.cache(self._legal_schedules)
        self._parallelism = functools.cache(self._with_degrees)
        self._training = functools.cache(
            lambda microbatch: dataclasses.replace(self.recipe.training, microbatch=microbatch)
        )

    def layouts(self) -> list[Layout]:
        """All layouts that the rules allow, tensor parallelism inside a node if any such layout is allowed."""
        inside: list[Layout] = []
        beyond: list[Layout] = []
        self.dropped.clear()
        for layout in self._with_experts(all_layouts(self.world)):
            rule = self.broken(layout)
            if rule:
                self.dropped[rule] += 1
            else:
                (inside if self.per_node % layout.tensor == 0 else beyond).append(layout)
        if inside and beyond:
            self.dropped[BEYOND_NODE] += len(beyond)
        return inside or beyond

    def has_layouts(self) -> bool:
        """Whether the rules allow any layout; if there is none in a large world, much faster than `layouts`."""
        possible = (
            Layout(
                replicate=replicate, shard=data // replicate, context=context, tensor=tensor, pipeline=left // tensor
            )
            for data in divisors(math.gcd(self.world, self.recipe.training.global_batch))
            for context in divisors(self.world // data)
            if not self._context_broken(context)
            for left in [self.world // data // context]
            for tensor in divisors(left)
            for replicate in divisors(data)
        )
        return not all(map(self.broken, self._with_experts(possible)))

    def _with_experts(self, layouts: Iterable[Layout]) -> Iterator[Layout]:
        """The layouts, with each degree into which they can divide the model's experts."""
        experts = self._account.experts
        for layout in layouts:
            yield layout
            if experts is not None and (layout.tensor == 1 or self.recipe.parallelism.sequence_parallel):
                for degree in divisors(math.gcd(experts.count, layout.fsdp * layout.tensor))[1:]:
                    yield dataclasses.replace(layout, expert=degree)

    def points(self, layout: Layout) -> Iterator[SpacePoint]:
        """The points of a layout; `broken_rule` says whether one of them is a recipe."""
        for microbatch, schedules in self.microbatches(layout):
            for schedule in schedules:
                for ac, precision, compile_ in self.others():
                    yield SpacePoint(layout, microbatch, schedule, ac, precision, compile_)

    def microbatches(self, layout: Layout) -> Iterator[tuple[int, Sequence[Choice]]]:
        """Microbatches of a layout, each with the schedules that its pipeline can run."""
        local = self.recipe.training.global_batch // layout.data
        for microbatch in divisors(local):
            if self._tokens_broken(layout, microbatch):
                continue
            schedules = self.schedules(layout, local // microbatch)
            if schedules:
                yield microbatch, schedules

    def schedules(self, layout: Layout, microbatches: int | None = None) -> Sequence[Choice]:
        """The schedules of a layout's pipeline; without one, that of the recipe."""
        if layout.pipeline == 1:
            return [Choice("", self.recipe.schedule)]
        if microbatches is None:
            return self.choices.schedules
        legal, _ = self._legal(layout.pipeline, microbatches)
        return legal

    def others(self) -> Iterator[tuple[Choice, Choice, Choice]]:
        return itertools.product(self.choices.acs, self.choices.precisions, self.choices.compiles)

    def _recipe_of(self, point: SpacePoint) -> Recipe:
        # A copy: a new recipe would check each of its numbers again.
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
        return recipe

    def broken_rule(self, recipe: Recipe) -> str:
        """The first rule of recipes that a recipe of the space breaks; empty: none."""
        # Rules look at each parameter, but blocks are alike: an account with one block is much faster.
        lighter = copy.copy(recipe.model)
        object.__setattr__(lighter, "account", lambda: self._account)
        for asked in (dataclasses.replace(recipe, model=lighter), recipe):
            try:
                recipe_rules.check_all_but_data(asked)
            except ConfigError as error:
                text = f"{error.key} {error.rule}"
            else:
                return ""
        return text

    def broken(self, layout: Layout) -> str:
        """The rule that every point of a layout breaks; empty: none is known."""
        batch = self.recipe.training.global_batch
        if batch % layout.data:
            return f"training.global_batch={batch} is no multiple of the data-parallel processes"
        for rule in (self._context_broken(layout.context), self._tensor_broken(layout)):
            if rule:
                return rule
        if layout.pipeline == 1:
            return ""
        local = batch // layout.data
        broken = ""
        for microbatch in divisors(local):
            legal, broken = self._legal(layout.pipeline, local // microbatch)
            if legal:
                return ""
        return broken

    # The rules are those of recipes; each rule is checked once for all layouts that are equal for this rule.

    def _context_broken(self, context: int) -> str:
        return self._ask("context", Layout(context=context))

    def _tensor_broken(self, layout: Layout) -> str:
        layout = Layout(tensor=layout.tensor, shard=layout.fsdp, expert=layout.expert)
        return self._ask("expert", layout) or self._ask("tensor", layout)

    def _tokens_broken(self, layout: Layout, microbatch: int) -> str:
        layout = Layout(tensor=layout.tensor, context=layout.context)
        return self._ask("tokens", layout, microbatch) if layout.tensor > 1 else ""

    def _legal_schedules(self, pipeline: int, microbatches: int) -> tuple[Sequence[Choice], str]:
        """The schedules that a pipeline can run, and the rule that the last of the others breaks."""
        legal, broken, config = [], "", self.recipe.parallelism
        for choice in self.choices.schedules:
            try:
                recipe_rules.check_pipeline(
                    Layout(pipeline=pipeline), config, self._account, choice.value, microbatches=microbatches
                )
                legal.append(choice)
            except ConfigError as error:
                broken = f"{error.key} {error.rule}"
        return legal, broken

    def _broken_rule(self, check: str, layout: Layout, microbatch: int = 1) -> str:
        """The text of the rule that a check says is broken; empty: none."""
        account, config, seq_len = self._account, self.recipe.parallelism, self.recipe.training.seq_len
        try:
            if check == "context":
                kernel = self.recipe.model.attention
                recipe_rules.check_context(layout, account, seq_len=seq_len, kernel=kernel)
            elif check == "expert":
                recipe_rules.check_expert(layout, config, account)
            else:
                if check == "tensor":
                    config = dataclasses.replace(config, sequence_parallel=False)
                account = account_for(account, layout)
                recipe_rules.check_tensor(layout, config, account, seq_len=seq_len, microbatch=microbatch)
        except ConfigError as error:
            return f"{error.key} {error.rule}"
        return ""

    @functools.cached_property
    def _account(self) -> ModelAccount:
        # Only edges and one block: the rules look at each parameter, but blocks are alike.
        facts = model_facts(self.recipe.model)
        return dataclasses.replace(facts.sample, layers=facts.account.layers, pieces=facts.account.pieces)

    def _with_degrees(self, layout: Layout) -> Parallelism:
        own = self.recipe.parallelism
        return dataclasses.replace(
            own,
            **layout.degrees(),  # type: ignore[arg-type]
            expert=layout.expert,
            # AsyncTP needs tensor parallelism.
            async_tensor=own.async_tensor and layout.tensor > 1,
            symmetric_memory=own.symmetric_memory and layout.fsdp > 1,
            # A split by hand fits one number of stages only.
            split=own.split if layout.pipeline == self.recipe.layout.pipeline else None,
        )


def all_layouts(world: int) -> Iterator[Layout]:
    for pipeline in divisors(world):
        for tensor in divisors(world // pipeline):
            left = world // pipeline // tensor
            for context in divisors(left):
                for replicate in divisors(left // context):
                    yield Layout(
                        pipeline=pipeline,
                        replicate=replicate,
                        shard=left // context // replicate,
                        context=context,
                        tensor=tensor,
                    )
