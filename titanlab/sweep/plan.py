"""Plans a sweep: composes, checks and names every point, or drops it with a reason.

Data that many points share is checked, fingerprinted and prepared once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlab.costs import AUTO
from titanlab.data import source
from titanlab.distributed import this_host
from titanlab.errors import ConfigError
from titanlab.launch import shape_of
from titanlab.plan import MEMORY_ERROR, beyond_node
from titanlab.recipe import Loader, Recipe, check_data, resolve, shortened_warmup
from titanlab.records import Identity, check_runs, identify
from titanlab.sweep.composer import Composer
from titanlab.sweep.request import CONTROL, Request, read_request
from titanlab.sweep.rows import estimated
from titanlab.sweep.space import WHERE, Expression, SweepPoint, Values, canonical_text, control_points, keys_of
from titanlab.sweep.submit import check_resolved, machine_of
from titanlab.sweep.sweep_folder import SINGLE
from titanlab.system import counted
from titanlab.train import check_beginning, start_fingerprint

COMMAND_LINE = "command line"
# Keys of files and folders: a path that is missing here may exist on the hosts of the runs.
_PLACES = ("data.files", "data.folder", "data.path", "data.tokenizer", "init_from", "checkpoint.load_from")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A point that can run: its recipe is resolved, with the point's label as its name."""

    point: SweepPoint
    recipe: Recipe
    identity: Identity


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A point that cannot run, or need not.

    Attributes:
        stage: `where`, `layout`, `composition`, `rule`, `memory` or `duplicate`.
    """

    point: SweepPoint
    stage: str
    reason: str


class Unfit(Exception):
    """Raised if a point is dropped; `stage` has the values of `Dropped.stage`."""

    def __init__(self, stage: str, reason: ConfigError | str) -> None:
        self.stage = stage
        self.reason = reason
        super().__init__(stage, str(reason))


@dataclass(frozen=True, kw_only=True)
class Study:
    """A planned sweep.

    Attributes:
        origin: the file that defines it, such as `sweeps/quickstart_layouts`, or `command line`.
        definition: overrides, space, conditions and repeats, as plain values.
        notices: one line for each change that titanlab made to recipes.
    """

    name: str
    origin: str
    definition: Mapping[str, Any]
    planned: tuple[PlannedRun, ...]
    dropped: tuple[Dropped, ...]
    notices: tuple[str, ...] = ()


def plan_study(
    arguments: Sequence[str],
    *,
    whole: bool = False,
    loader: Loader | None = None,
    elsewhere: bool = False,
    measured: bool = False,
) -> Study:
    """Plan the sweep of a command line. Writes nothing, and prepares no data (see `with_data`).

    Args:
        whole: raise an error if any point cannot run, unless a condition drops it.
        loader: has composed these arguments, which describe one recipe; None: nothing is composed yet.
        elsewhere: the runs are not for this host, so that its devices, memory and files do not matter.
        measured: profile three steps of each run (`profiler=breakdown`), unless a profiler is chosen already.

    Raises:
        ConfigError: the sweep is wrong, or none of its points can run.
    """
    request = read_request(arguments, loader, measured=measured)
    composer = Composer(request.loader, request.points)
    checks = Checks(elsewhere=elsewhere)
    recipes, unfit = sift(
        request.points, lambda number: checks.planned(composer, request.points[number], request.where), whole=whole
    )
    for recipe in recipes.values():
        # Raises an error if the cluster is too small, before any data is prepared.
        shape_of(recipe)
    check_runs(next(iter(recipes.values())).runs)
    study = _named(request, composer, checks, recipes, unfit)
    if request.control is not None:
        try:
            recipe = checks.planned(composer, request.control, [])
            shape_of(recipe)
        except Unfit as error:
            cure = "give it values that can run: control: {parallelism: single, world: 1}"
            raise ConfigError(CONTROL, dict(request.control), f"cannot run: {error.reason}", cure) from error
        runs = []
        for number, point in enumerate(control_points(request.control, request.repeats), 1):
            named = dataclasses.replace(recipe, sweep=study.name, name=f"{CONTROL}-{number}", repeat=point.repeat)
            runs.append(PlannedRun(point=point, recipe=named, identity=checks.identify(named)))
        study = dataclasses.replace(study, planned=(*study.planned, *runs))
    notices = [*request.notices, *checks.notices]
    submitted = [each.recipe for each in study.planned if not each.recipe.launch.runs_here]
    apart = [recipe for recipe in submitted if recipe.leaves_node(recipe.cluster.per_node)]
    for first in apart[:1]:
        whose = "" if len(apart) == 1 else f"{first.name}, the first of {len(apart)} such runs: "
        notices.append(whose + beyond_node(first, first.cluster.per_node or 1))
    return dataclasses.replace(study, notices=tuple(notices))


def with_data(study: Study, report: Callable[[str], None], *, whole: bool = False) -> Study:
    """Prepare the runs' data, equal data only once. Returns the study without points that break a rule on the data."""
    checks, runs = Checks(), study.planned
    points = [planned.point.values for planned in runs]
    kept, unfit = sift(points, lambda number: checks.prepare(runs[number].recipe, report), whole=whole)
    dropped = [
        Dropped(point=runs[number].point, stage=error.stage, reason=str(error.reason))
        for number, error in unfit.items()
    ]
    return dataclasses.replace(
        study, planned=tuple(runs[number] for number in kept), dropped=(*study.dropped, *dropped)
    )


def fitting(study: Study, *, strictly: bool) -> Study:
    """The study without the runs that do not fit into memory, with a notice on runs that may not fit.

    Args:
        strictly: leave out every run whose estimate exceeds a device's memory; False: only runs that exceed it by more
            than the error of estimates.
    """
    kept: list[PlannedRun] = []
    dropped: list[Dropped] = []
    doubtful = 0
    for planned in study.planned:
        estimate = estimated(planned.recipe)
        if isinstance(estimate, str) or estimate.fits or not (strictly or estimate.cannot_fit):
            kept.append(planned)
            doubtful += not isinstance(estimate, str) and not estimate.fits
        else:
            assert estimate.limit_bytes is not None
            needed, limit = estimate.reserved_bytes / 1e9, estimate.limit_bytes / 1e9
            reason = f"would reserve about {needed:.0f} GB of a device's {limit:.1f} GB"
            dropped.append(Dropped(point=planned.point, stage="memory", reason=reason))
    if not kept:
        rule = f"none of {len(study.planned)} runs fits into memory; {dropped[-1].reason}"
        cure = "see what fits: titanlab plan; or submit them all the same: --keep"
        raise ConfigError("arguments", study.name, rule, cure)
    notices = list(study.notices)
    percent = f"{100 * MEMORY_ERROR:.0f} %"
    if doubtful:
        notices.append(
            f"{counted(doubtful, 'run')} may not fit into memory: each estimate exceeds it, but by less than the "
            f"largest error of estimates ({percent}); --prune leaves them out"
        )
    if dropped and not strictly:
        notices.append(
            f"{counted(len(dropped), 'run')} left out: their estimates exceed a device's memory by more than "
            f"{percent}, the largest error of estimates; --keep keeps all"
        )
    return dataclasses.replace(study, planned=tuple(kept), dropped=(*study.dropped, *dropped), notices=tuple(notices))


def sift(
    points: Sequence[Values], stage: Callable[[int], Any], *, whole: bool
) -> tuple[dict[int, Any], dict[int, Unfit]]:
    """Call `stage` with the number of each point. Returns results, and why points are unfit, by number.

    Args:
        whole: raise an error if any point is unfit, unless a condition drops it.

    Raises:
        ConfigError: no point is left.
    """
    results: dict[int, Any] = {}
    dropped: dict[int, Unfit] = {}
    for number in range(len(points)):
        try:
            results[number] = stage(number)
        except Unfit as unfit:
            if whole and isinstance(unfit.reason, ConfigError):
                raise unfit.reason from unfit
            dropped[number] = unfit
    if results:
        return results, dropped
    texts = Counter((unfit.stage, str(unfit.reason)) for unfit in dropped.values())
    (name, reason), count = texts.most_common(1)[0]
    first = dropped[0].reason
    if isinstance(first, ConfigError) and len(texts) == 1:
        # All points have the same error: it does not depend on the swept values.
        raise first
    if name == "where" and len(texts) == 1:
        raise ConfigError(WHERE, reason, f"is met by none of {len(dropped)} points", "ask for less")
    rule = f"none of {len(dropped)} points can be run; {count} of them for one reason ({name}: {reason})"
    raise ConfigError("space", ",".join(keys_of(points)), rule, "change that, or sweep other values")


def _named(
    request: Request, composer: Composer, checks: Checks, recipes: Mapping[int, Recipe], unfit: Mapping[int, Unfit]
) -> Study:
    """The study with a name for every run, without points that would be the same run as another."""
    # The sweep's name: the key `sweep`, else the name of the sweep's file, else a name derived from its space.
    first = next(iter(recipes.values()))
    name = first.sweep
    if name == SINGLE and request.option is not None:
        name = request.option.rpartition("/")[2]
    elif name == SINGLE and request.space is not None:
        text = canonical_text([request.space, [expression.text for expression in request.where], request.repeats])
        # The name does not depend on which points can run: the same command always gives the same folder.
        common = composer.plain_value({}, "name") or first.name
        name = f"{common}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
    planned: list[PlannedRun] = []
    dropped: list[Dropped] = []
    known: dict[str, str] = {}
    for number, values in enumerate(request.points):
        for repeat in range(request.repeats):
            if (error := unfit.get(number)) is not None:
                point = SweepPoint(values=values, repeat=repeat)
                dropped.append(Dropped(point=point, stage=error.stage, reason=str(error.reason)))
                continue
            recipe = recipes[number]
            point = SweepPoint(values=values, repeat=recipe.repeat + repeat)
            label = point.label
            if "name" in values:
                label = recipe.name
            elif not values:
                label = recipe.name + point.suffix
            elif request.named:
                # The user has set `name`: keep it as a prefix.
                label = f"{recipe.name[:35]}-{label}"
            recipe = dataclasses.replace(recipe, sweep=name, name=label, repeat=point.repeat)
            identity = checks.identify(recipe)
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


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """Turn a ConfigError into Unfit: the point is then dropped, with this name as the stage."""
    try:
        yield
    except ConfigError as error:
        raise Unfit(name, error) from error


class Checks:
    """Checks recipes; checks shared parts, above all data, only once.

    Args:
        elsewhere: the runs are not for this host: data and starting weights need not be here.
    """

    def __init__(self, *, elsewhere: bool = False) -> None:
        self._elsewhere = elsewhere
        self._here = functools.cache(this_host)
        self._results: dict[tuple[Any, ...], Any] = {}
        self._prepared: set[Any] = set()
        # A dict serves as an ordered set.
        self.notices: dict[str, None] = {}

    def planned(self, composer: Composer, point: Values, where: Sequence[Expression]) -> Recipe:
        """The resolved recipe of a point, after every check that needs no prepared data.

        Raises:
            Unfit: the point cannot be composed, does not meet a condition, or breaks a rule.
            ConfigError: a condition cannot be computed.
        """

        @functools.cache
        def composed() -> tuple[Recipe, Recipe]:
            """The recipe, and the resolved recipe."""
            with _stage("composition"):
                recipe = composer.recipe(point)
            with _stage("rule"):
                accelerator, device = machine_of(recipe, self._here)
            with _stage("layout"):
                return recipe, resolve(recipe, world=None, accelerator=accelerator, device=device)

        def look(key: str) -> Any:
            """The value of a key in the resolved recipe; of a group, its option, for which no recipe is resolved."""
            if composer.is_group(key):
                with _stage("composition"):
                    return composer.option(point, key)
            try:
                value: Any = composed()[1]
            except Unfit as unfit:
                # The condition may exclude this wrong recipe: give it the typed value, unless the value is still open.
                value = composer.plain_value(point, key)
                is_of_layout = key.partition(".")[0] in ("world", "parallelism")
                if value in (None, AUTO) or (unfit.stage == "layout" and is_of_layout):
                    raise
                return value
            for part in key.split("."):
                if not hasattr(value, part):
                    raise KeyError(key)
                value = getattr(value, part)
            return value

        for expression in where:
            if not expression.holds(look, SweepPoint(values=point).label):
                raise Unfit("where", expression.text)
        recipe, final = composed()
        with _stage("rule"):
            check_resolved(final, self._here, elsewhere=self._elsewhere)
            self._check_data(final)
            if not self._elsewhere:
                check_beginning(final)
        if notice := shortened_warmup(recipe):
            self.notices[notice] = None
        return final

    def prepare(self, recipe: Recipe, report: Callable[[str], None]) -> None:
        """Prepare a recipe's data, and check the rules that need the prepared data.

        Raises:
            Unfit: the data cannot be used, or this recipe cannot use it.
        """
        with _stage("rule"):
            self._once(("prepare", recipe.data), lambda: source.prepare(recipe.data, report=report))
            self._prepared.add(recipe.data)
            self._check_data(recipe)

    def identify(self, recipe: Recipe) -> Identity:
        """The identity of a checked recipe."""
        data = self._once(("fingerprint", recipe.data), lambda: source.fingerprint(recipe.data))
        weights = self._once(("weights", recipe.init_from), lambda: start_fingerprint(recipe))
        hardware = str(recipe.cluster.device)
        return identify(recipe, data=data, hardware=hardware, repeat=recipe.repeat, weights=weights)

    def _check_data(self, recipe: Recipe) -> None:
        training = recipe.training
        inputs = [training.seq_len, training.global_batch, recipe.layout.data, recipe.model.vocab_size]
        inputs += [training.validation_sequences, training.validate_every]
        # The check is repeated after the data is prepared: more rules can then be checked.
        self._once(("check", recipe.data in self._prepared, recipe.data, *inputs), lambda: check_data(recipe))

    def _once(self, key: tuple[Any, ...], act: Callable[[], Any]) -> Any:
        """The result of `act`, computed once for a key; "elsewhere" if its files may be, and are, on other hosts."""
        if key not in self._results:
            try:
                self._results[key] = act()
            except ConfigError as error:
                self._results[key] = error
        result = self._results[key]
        if not isinstance(result, ConfigError):
            return result
        if self._elsewhere and result.key in _PLACES:
            return "elsewhere"
        raise result
