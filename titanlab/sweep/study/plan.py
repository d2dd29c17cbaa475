"""Plans a sweep: composes, checks and names every point, or drops it with a reason.

Cheap checks come first: conditions and degrees need only values that exist without a composition, so that only points
that may run are composed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.distributed.host import Host, check_host, this_host
from titanlab.errors import ConfigError
from titanlab.launch.shape import check_cluster, shape_of
from titanlab.recipe.composition.loader import Loader
from titanlab.recipe.memory_rules import check_host_memory
from titanlab.recipe.recipe import Recipe, resolve, shortened_warmup
from titanlab.recipe.recipe_rules import check_all_but_data
from titanlab.records.identity import Identity
from titanlab.records.run_folder import check_runs
from titanlab.sweep.study.composer import Composer
from titanlab.sweep.study.data_once import DataOnce
from titanlab.sweep.study.point import Point
from titanlab.sweep.study.prune import Unfit, prune
from titanlab.sweep.study.request import Request, read_request
from titanlab.sweep.study.space import Values, canonical_text, keys_of
from titanlab.weights.starting_weights import check_beginning

SINGLE = "single"
COMMAND_LINE = "command line"
# The number of points that `check_shared` checks before all others; that takes about a second.
_PROBES = 8


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A point that can run: its recipe is resolved, and has the point's label as its name."""

    point: Point
    recipe: Recipe
    identity: Identity


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A point that cannot run, or need not.

    Attributes:
        stage: `where`, `layout`, `composition`, `rule`, `memory` or `duplicate`.
        reason: one line.
    """

    point: Point
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
    planned: tuple[Planned, ...]
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


class Sieve:
    """Points from which successive stages drop some; with `whole`, a stage's error is raised instead."""

    def __init__(self, points: Sequence[Values], *, whole: bool) -> None:
        self.points = points
        self._whole = whole
        self.dropped: dict[int, Unfit] = {}

    def __iter__(self) -> Iterator[int]:
        """The numbers of the points that are left."""
        return (number for number in range(len(self.points)) if number not in self.dropped)

    def keep(self, stage: Callable[[Values, int], Any]) -> dict[int, Any]:
        """Apply a stage to every point that is left, and drop those that it finds unfit. Returns its results by number.

        Raises:
            ConfigError: no point is left.
        """
        results: dict[int, Any] = {}
        for number in list(self):
            try:
                results[number] = stage(self.points[number], number)
            except Unfit as unfit:
                if self._whole and isinstance(unfit.reason, ConfigError):
                    raise unfit.reason from unfit
                self.dropped[number] = unfit
        if not results:
            raise self._nothing_left()
        return results

    def check_shared(self, stage: Callable[[Values], Any]) -> None:
        """Check a few points before all others, to report an error of the shared recipe at once.

        An error is shared if the stage raises it, with the same words, for the first point, for others up to the last,
        and for the recipe without any point's values, and if its key is not swept.

        Raises:
            ConfigError: the shared error.
        """
        numbers = list(self)
        if len(numbers) <= _PROBES:
            return
        error = _error(stage, self.points[numbers[0]])
        if error is None or error.key in keys_of(self.points):
            return
        others = [self.points[numbers[place * (len(numbers) - 1) // _PROBES]] for place in range(1, _PROBES + 1)]
        if all(str(_error(stage, point)) == str(error) for point in (*others, {})):
            raise error

    def _nothing_left(self) -> ConfigError:
        dropped = list(self.dropped.values())
        texts = Counter((unfit.stage, str(unfit.reason)) for unfit in dropped)
        (stage, reason), count = texts.most_common(1)[0]
        first = dropped[0].reason
        if isinstance(first, ConfigError) and len(texts) == 1:
            # All points have the same error: it does not depend on the swept values.
            return first
        if stage == "where" and len(texts) == 1:
            return ConfigError("where", reason, f"is met by none of {len(dropped)} points", "ask for less")
        rule = f"none of {len(dropped)} points can be run; {count} of them for one reason ({stage}: {reason})"
        cure = "change that, or sweep other values"
        return ConfigError("space", ",".join(keys_of(self.points)), rule, cure)


def _error(stage: Callable[[Values], Any], point: Values) -> ConfigError | None:
    """The ConfigError for which a stage drops a point; None if it keeps the point, or drops it for another reason."""
    try:
        stage(point)
    except Unfit as unfit:
        return unfit.reason if isinstance(unfit.reason, ConfigError) else None
    return None


class _Checks:
    """Composes and checks points; what many points share is computed once."""

    def __init__(self, *, elsewhere: bool) -> None:
        self.data = DataOnce(elsewhere=elsewhere)
        self._elsewhere = elsewhere
        # A dict as an ordered set.
        self.notices: dict[str, None] = {}
        self._host: Host | None = None

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
            checked = self._checked(recipe)
            if notice := shortened_warmup(recipe):
                self.notices[notice] = None
            return checked
        except ConfigError as error:
            raise Unfit("rule", error) from error

    def _checked(self, recipe: Recipe) -> Recipe:
        if recipe.launch.runs_here:
            self._host = self._host or this_host()
            recipe = resolve(recipe, world=None, accelerator=self._host.accelerator, device=self._host.device)
        else:
            # It will run on other hosts: do not use the devices of this one.
            cluster = recipe.cluster
            check_cluster(cluster, recipe.launch)
            recipe = resolve(recipe, world=None, accelerator=cluster.accelerator, device=cluster.device or "cpu")
        check_all_but_data(recipe)
        self.data.check(recipe)
        if recipe.launch.runs_here and self._host is not None and not self._elsewhere:
            check_host(
                self._host,
                accelerator=recipe.cluster.accelerator,
                device=recipe.cluster.device,
                processes=recipe.layout.world,
            )
            check_host_memory(recipe, self._host, processes=recipe.layout.world)
        if not self._elsewhere:
            check_beginning(recipe)
        return recipe


def _named(request: Request, composer: Composer, left: Sieve, recipes: Mapping[int, Recipe], data: DataOnce) -> Study:
    """The study, with a name for every run; points that would be the same run are dropped."""
    name = _folder(request, composer, next(iter(recipes.values())))
    planned: list[Planned] = []
    dropped: list[Dropped] = []
    known: dict[str, str] = {}
    for number, values in enumerate(request.points):
        unfit = left.dropped.get(number)
        for repeat in range(request.repeats):
            point = Point(values=values, repeat=repeat if unfit else recipes[number].repeat + repeat)
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
            planned.append(Planned(point=point, recipe=recipe, identity=identity))
    return Study(
        name=name,
        origin=f"sweeps/{request.option}" if request.option else COMMAND_LINE,
        definition=request.definition,
        planned=tuple(planned),
        dropped=tuple(dropped),
    )


def _label(request: Request, recipe: Recipe, point: Point) -> str:
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
