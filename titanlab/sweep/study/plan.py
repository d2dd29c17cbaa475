"""Plans a sweep: composes, checks and names every point, or drops it with a reason.

Cheap checks come first: conditions and degrees need only values that exist without a composition, so that only points
that may run are composed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
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
from titanlab.sweep.study.control import CONTROL, control_points
from titanlab.sweep.study.data_once import DataOnce
from titanlab.sweep.study.point import Point
from titanlab.sweep.study.prune import Unfit, prune
from titanlab.sweep.study.request import Request, read_request
from titanlab.sweep.study.sieve import Sieve
from titanlab.sweep.study.space import Values, canonical_text
from titanlab.train.starting_weights import check_beginning

SINGLE = "single"
COMMAND_LINE = "command line"


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


def _control(values: Values, repeats: int, composer: Composer, check: _Checks, sweep: str) -> list[Planned]:
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
        planned.append(Planned(point=point, recipe=named, identity=check.data.identify(named)))
    return planned


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
