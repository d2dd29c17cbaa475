"""Plans a sweep: composes, checks and names every point, or drops it with a reason; then orders the runs.

Cheap checks come first: conditions and degrees need only values that exist without a composition, so that only points
that may run are composed. Data that many points share is checked, fingerprinted and prepared once.

Repeats start in turns, A B B A A B, with the control before, between and after. A machine that becomes slower or faster
meanwhile then does so for all recipes alike. Every second round is backwards: over two rounds, a steady drift is the
same for each recipe.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.data import source
from titanlab.distributed.host import this_host
from titanlab.errors import ConfigError
from titanlab.launch.submission import shape_of
from titanlab.ranges import plain
from titanlab.recipe.compose import Loader
from titanlab.recipe.recipe import Recipe, shortened_warmup
from titanlab.recipe.recipe_rules import check_data
from titanlab.records.identity import Identity, identify
from titanlab.records.run_folder import check_runs
from titanlab.sweep.composer import Composer
from titanlab.sweep.enqueue import checked
from titanlab.sweep.prune import Sieve, Unfit, prune
from titanlab.sweep.request import CONTROL, Request, control_points, read_request
from titanlab.sweep.space import SweepPoint, Values, canonical_text
from titanlab.train.starting_weights import check_beginning, start_fingerprint

SINGLE = "single"
COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A point that can run: its recipe is resolved, and has the point's label as its name."""

    point: SweepPoint
    recipe: Recipe
    identity: Identity


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A point that cannot run, or need not.

    Attributes:
        stage: `where`, `layout`, `composition`, `rule`, `memory` or `duplicate`.
        reason: one line.
    """

    point: SweepPoint
    stage: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Study:
    """A planned sweep.

    Attributes:
        name: of its folder.
        origin: the file that defines it, such as `sweeps/quickstart_layouts`, or `command line`.
        definition: overrides, space, conditions and repeats, as plain values.
        planned: points that will run, in the space's order.
        dropped: points that will not run, in the same order.
        notices: one line for each change that titanlab made to recipes.
    """

    name: str
    origin: str
    definition: Mapping[str, Any]
    planned: tuple[PlannedRun, ...]
    dropped: tuple[Dropped, ...]
    notices: tuple[str, ...] = ()


def plan_study(
    arguments: Sequence[str], *, whole: bool = False, loader: Loader | None = None, elsewhere: bool = False
) -> Study:
    """Plan the sweep of a command line, without its data (see `with_data`). Nothing is written.

    Args:
        arguments: overrides and Hydra's flags.
        whole: raise an error if any point cannot run, unless a condition drops it.
        loader: has composed these arguments, which describe one recipe; None: nothing is composed yet.
        elsewhere: the runs are not for this host, so that its devices, memory and files do not matter.

    Raises:
        ConfigError: the sweep is wrong, or none of its points can run.
    """
    request = read_request(arguments, loader)
    composer = Composer(request.loader, request.points)
    left = Sieve(request.points, whole=whole)
    left.keep(lambda point, _: prune(composer, point, request.where))
    check = _Checks(elsewhere=elsewhere)
    left.check_shared(lambda point: check.composed(composer, point))
    recipes = left.keep(lambda point, _: check.composed(composer, point))
    for recipe in recipes.values():
        # Raises an error if the cluster is too small, before any data is prepared.
        shape_of(recipe)
    check_runs(next(iter(recipes.values())).runs)
    study = _named(request, composer, left, recipes, check.data)
    if request.control is not None:
        control = _control(request.control, request.repeats, composer, check, study.name)
        study = dataclasses.replace(study, planned=(*study.planned, *control))
    return dataclasses.replace(study, notices=tuple(check.notices))


def with_data(study: Study, report: Callable[[str], None], *, whole: bool = False) -> Study:
    """The study after its data is prepared, each data once; points that break a rule on the data are dropped.

    Raises:
        ConfigError: no point is left.
    """
    data = DataOnce()
    left = Sieve([planned.point.values for planned in study.planned], whole=whole)
    kept = left.keep(lambda _, number: data.prepare(study.planned[number].recipe, report))
    dropped = [
        Dropped(point=study.planned[number].point, stage=unfit.stage, reason=str(unfit.reason))
        for number, unfit in left.dropped.items()
    ]
    planned = tuple(study.planned[number] for number in kept)
    return dataclasses.replace(study, planned=planned, dropped=(*study.dropped, *dropped))


class _Checks:
    """Composes and checks points; what many points share is computed once."""

    def __init__(self, *, elsewhere: bool) -> None:
        self.data = DataOnce(elsewhere=elsewhere)
        self._elsewhere = elsewhere
        # A dict as an ordered set.
        self.notices: dict[str, None] = {}
        self._here = functools.cache(this_host)

    def composed(self, composer: Composer, point: Values) -> Recipe:
        """The resolved recipe of a point, after every check that needs no prepared data.

        Raises:
            Unfit: it cannot be composed, or breaks a rule.
        """
        try:
            recipe = composer.recipe(point)
        except ConfigError as error:
            raise Unfit("composition", error) from error
        try:
            resolved = checked(recipe, self._here, elsewhere=self._elsewhere)
            self.data.check(resolved)
            if not self._elsewhere:
                check_beginning(resolved)
        except ConfigError as error:
            raise Unfit("rule", error) from error
        if notice := shortened_warmup(recipe):
            self.notices[notice] = None
        return resolved


def _named(request: Request, composer: Composer, left: Sieve, recipes: Mapping[int, Recipe], data: DataOnce) -> Study:
    """The study, with a name for every run; points that would be the same run are dropped."""
    name = _folder(request, composer, next(iter(recipes.values())))
    planned: list[PlannedRun] = []
    dropped: list[Dropped] = []
    known: dict[str, str] = {}
    for number, values in enumerate(request.points):
        unfit = left.dropped.get(number)
        for repeat in range(request.repeats):
            point = SweepPoint(values=values, repeat=repeat if unfit else recipes[number].repeat + repeat)
            if unfit is not None:
                dropped.append(Dropped(point=point, stage=unfit.stage, reason=str(unfit.reason)))
                continue
            recipe = recipes[number]
            label = _label(request, recipe, point)
            recipe = dataclasses.replace(recipe, sweep=name, name=label, repeat=point.repeat)
            identity = data.identify(recipe)
            if identity.sha256 in known:
                reason = f"is the same run as {known[identity.sha256]}"
                dropped.append(Dropped(point=point, stage="duplicate", reason=reason))
                continue
            known[identity.sha256] = label
            planned.append(PlannedRun(point=point, recipe=recipe, identity=identity))
    return Study(
        name=name,
        origin=f"sweeps/{request.option}" if request.option else COMMAND_LINE,
        definition=request.definition,
        planned=tuple(planned),
        dropped=tuple(dropped),
    )


def _control(values: Values, repeats: int, composer: Composer, check: _Checks, sweep: str) -> list[PlannedRun]:
    """The runs of the control.

    Raises:
        ConfigError: it cannot run.
    """
    try:
        prune(composer, values, [])
        recipe = check.composed(composer, values)
        shape_of(recipe)
    except Unfit as unfit:
        cure = "give it values that can run: control: {parallelism: single, world: 1}"
        raise ConfigError(CONTROL, dict(values), f"cannot run: {unfit.reason}", cure) from unfit
    planned = []
    for number, point in enumerate(control_points(values, repeats), 1):
        named = dataclasses.replace(recipe, sweep=sweep, name=f"{CONTROL}-{number}", repeat=point.repeat)
        planned.append(PlannedRun(point=point, recipe=named, identity=check.data.identify(named)))
    return planned


def _label(request: Request, recipe: Recipe, point: SweepPoint) -> str:
    if "name" in point.values:
        return recipe.name
    if not point.values:
        return recipe.name + point.suffix
    # The user has set `name`: keep it as a prefix.
    return f"{recipe.name[:35]}-{point.label}" if request.named else point.label


def _folder(request: Request, composer: Composer, recipe: Recipe) -> str:
    """The sweep's name: the key `sweep`, else the name of its file, else a name derived from its space."""
    if recipe.sweep != SINGLE:
        return recipe.sweep
    if request.option is not None:
        return request.option.rpartition("/")[2]
    if request.space is None:
        return SINGLE
    text = canonical_text([request.space, [expression.text for expression in request.where], request.repeats])
    return f"{composer.value({}, 'name')}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


# Keys of files and folders: what is wrong with them here may be right where the runs are.
_PLACES = ("data.files", "data.folder", "data.path", "data.tokenizer", "init_from", "checkpoint.load_from")


class DataOnce:
    """Remembers results for the data of a sweep's recipes.

    Args:
        elsewhere: data and starting weights need not be on this host.
    """

    def __init__(self, *, elsewhere: bool = False) -> None:
        self._elsewhere = elsewhere
        self._results: dict[str, Any] = {}
        # Once data is prepared, more rules can be checked: results of `check` from before are not used again.
        self._prepared: set[str] = set()

    def check(self, recipe: Recipe) -> None:
        """Check the rules on a recipe's data that can be checked at this time.

        Raises:
            ConfigError: it breaks a rule.
        """
        training = recipe.training
        inputs = [training.seq_len, training.global_batch, recipe.layout.data, recipe.model.vocab_size]
        inputs += [training.validation_sequences, training.validate_every]
        try:
            is_prepared = canonical_text(_plain(recipe)) in self._prepared
            self._once(["check", is_prepared, _plain(recipe), inputs], lambda: check_data(recipe))
        except ConfigError as error:
            if not (self._elsewhere and error.key in _PLACES):
                raise

    def prepare(self, recipe: Recipe, report: Callable[[str], None]) -> None:
        """Prepare a recipe's data, and check the rules that need the prepared data.

        Raises:
            Unfit: the data cannot be used, or this recipe cannot use it.
        """
        try:
            self._once(["prepare", _plain(recipe)], lambda: source.prepare(recipe.data, report=report))
            self._prepared.add(canonical_text(_plain(recipe)))
            self.check(recipe)
        except ConfigError as error:
            raise Unfit("rule", error) from error

    def identify(self, recipe: Recipe) -> Identity:
        """The identity of a checked recipe."""
        data = self._here(["fingerprint", _plain(recipe)], lambda: source.fingerprint(recipe.data))
        weights = self._here(["weights", recipe.init_from], lambda: start_fingerprint(recipe))
        hardware = str(recipe.cluster.device)
        return identify(recipe, data=data, hardware=hardware, repeat=recipe.repeat, weights=weights)

    def _here(self, inputs: list[Any], act: Callable[[], Any]) -> Any:
        """The result; `elsewhere` instead if the files are not here and need not be."""
        try:
            return self._once(inputs, act)
        except ConfigError as error:
            if not (self._elsewhere and error.key in _PLACES):
                raise
            return "elsewhere"

    def _once(self, inputs: list[Any], act: Callable[[], Any]) -> Any:
        key = canonical_text(inputs)
        if key not in self._results:
            try:
                self._results[key] = act()
            except ConfigError as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, ConfigError):
            raise result
        return result


def _plain(recipe: Recipe) -> Any:
    return [type(recipe.data).__qualname__, plain(recipe.data)]


def starting_order(points: Sequence[SweepPoint]) -> list[int]:
    """The numbers of the points in the order in which their runs should start.

    Args:
        points: with repeats, in the order of the plan.
    """
    rounds: list[list[int]] = []
    seen = Counter[str]()
    for number, point in enumerate(points):
        if point.is_control:
            continue
        # `repeat` may be swept like any other key.
        recipe = canonical_text({key: value for key, value in point.values.items() if key != "repeat"})
        if seen[recipe] == len(rounds):
            rounds.append([])
        rounds[seen[recipe]].append(number)
        seen[recipe] += 1
    order = [number for index, round_ in enumerate(rounds) for number in (reversed(round_) if index % 2 else round_)]
    return _with_controls(order, rounds, [number for number, point in enumerate(points) if point.is_control])


def _with_controls(order: list[int], rounds: Sequence[Sequence[int]], controls: Sequence[int]) -> list[int]:
    """The order with the control first, last, and at equal distances: between rounds, if that fits their number."""
    if not controls:
        return order
    if len(controls) == len(rounds) + 1:
        ends = [sum(map(len, rounds[:index])) for index in range(len(controls))]
    else:
        ends = [len(order) * index // max(1, len(controls) - 1) for index in range(len(controls))]
    placed: list[int] = []
    for control, start, end in zip(controls, ends, [*ends[1:], len(order)], strict=True):
        placed += [control, *order[start:end]]
    return placed
