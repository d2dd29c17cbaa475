"""The table of a sweep: a row for every run and every dropped point, from the files in its folder.

docs/comparing.md explains the columns. `status --json` and the files of `collect` have the same columns.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.costs import AXES, Layout, meter
from titanlab.errors import ConfigError, TitanlabError
from titanlab.launch import JobState, States, Submission, launcher_named
from titanlab.options import discover
from titanlab.records import OutcomeKind, RunFolder, Status
from titanlab.sweep.reconcile import ACTIVE, WAITING, close_dead_runs, reconcile, state_of
from titanlab.sweep.space import as_text, canonical_text, stack_steps
from titanlab.sweep.sweep_folder import SweepFolder, jobs_of, present_code
from titanlab.system import write_bytes
from titanlab.techniques.optimizer.contract import Schedule
from titanlab.techniques.tracker.trackers_schema import Jsonl
from titanlab.train import tracker_gap

if TYPE_CHECKING:
    from titanlab.plan import Estimate
    from titanlab.recipe import Recipe


# Increase SCHEMA when a column changes its meaning or is removed, but not for new columns.
SCHEMA = 2
# Prefix of the columns for keys that the sweep varies, one column for each key.
POINT = "point."

TEXT, WHOLE, NUMBER, TRUTH = "text", "whole", "number", "yes/no"


COLUMNS: Mapping[str, str] = {
    name: kind
    for kind, names in (
        (TEXT, "sweep run name hash8"),
        (WHOLE, "repeat"),
        (TRUTH, "control"),
        (WHOLE, "stack_step"),
        (TEXT, "state outcome previous_outcome dropped_stage cause"),
        (WHOLE, "rank step steps attempt restarts"),
        (TEXT, "parent_run"),
        (WHOLE, "parent_step"),
        (WHOLE, " ".join(f"layout.{axis}" for axis in AXES)),
        (TEXT, "layout.label"),
        (WHOLE, "world hosts cores"),
        (TRUTH, "oversubscribed emulated"),
        (TEXT, "accelerator device model precision ac compile schedule optimizer data"),
        (WHOLE, "seed layers dim seq_len global_batch microbatch tokens_per_step"),
        (NUMBER, "tokens_per_second tokens_per_second_all tflops mfu_percent"),
        (TEXT, "mfu_convention"),
        (NUMBER, "step_seconds step_seconds_q1 step_seconds_q3 data_percent"),
        (WHOLE, "measured_steps"),
        (NUMBER, "memory_gib"),
        (WHOLE, "memory_rank"),
        (NUMBER, "estimate.step_seconds estimate.tokens_per_second estimate.memory_gib"),
        (TEXT, "estimate.note"),
        (NUMBER, "first_loss loss validation_loss"),
        (WHOLE, "tokens_seen skipped_steps"),
        (NUMBER, "flops_per_token compile_seconds train_seconds paused_seconds seconds_left"),
        (TEXT, "launcher job_id queue_reason scheduler_state"),
        (WHOLE, "exit_code"),
        (TEXT, "code"),
        (TRUTH, "stale"),
        (TEXT, "git_commit"),
        (TRUTH, "git_dirty"),
        (TEXT, "torch host_names"),
        (NUMBER, "started updated ended"),
        (TEXT, "notes tracker_gap folder"),
    )
    for name in names.split()
}
"""The type of each column, in the order of the table."""
NAMES = tuple(COLUMNS)


def fitting_value(name: str, value: Any) -> Any:
    """A column's value as files can store it; None if it has the wrong type, as in a damaged file."""
    kind = COLUMNS.get(name, TEXT)
    if kind == TEXT:
        # JSON can escape a lone surrogate; UTF-8 cannot encode it.
        return value.encode(errors="replace").decode() if isinstance(value, str) else None
    if isinstance(value, bool) or kind == TRUTH:
        return value if isinstance(value, bool) and kind == TRUTH else None
    if kind == NUMBER:
        try:
            # Convert to float: parquet refuses a whole number above 2**53 in a column of floats.
            return float(value) if isinstance(value, int | float) else None
        except OverflowError:
            return None
    # Files store whole numbers in 64 bits.
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def point_keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the point's columns, which follow all other columns in the rows."""
    return [name for name in next(iter(rows), {}) if name.startswith(POINT)]


def recipe_columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layout, techniques and sizes of a resolved recipe.

    Raises:
        LookupError, TypeError: the config is not a recipe.
    """
    training, compiled = config["training"], config["compile"]
    degrees = {axis: config["parallelism"][axis] for axis in AXES}
    layout = Layout(**degrees, expert=config["parallelism"]["expert"])
    # Computed as in Recipe.microbatch; creating a Recipe would take longer than the whole row.
    microbatch = training["microbatch"] or (1 if layout.pipeline > 1 else training["global_batch"] // layout.data)
    precision, accelerator, device = config["precision"], config["cluster"]["accelerator"], config["cluster"]["device"]
    return {
        **{f"layout.{axis}": degree for axis, degree in layout.degrees().items()},
        "layout.label": layout.label,
        "world": layout.world,
        "repeat": config["repeat"],
        "notes": config.get("notes"),
        "seed": config["seed"],
        "accelerator": accelerator,
        "device": device,
        **{group: config[group]["kind"] for group in ("model", "precision", "ac", "optimizer", "data")},
        "emulated": _emulates(precision["kind"], precision.get("emulate"), accelerator, device),
        "compile": "+".join(part for part in ("blocks", "loss") if compiled.get(part)) or "off",
        "schedule": config["schedule"]["kind"] if layout.pipeline > 1 else None,
        "layers": config["model"].get("layers"),
        "dim": config["model"].get("dim"),
        "seq_len": training["seq_len"],
        "global_batch": training["global_batch"],
        "microbatch": microbatch,
        "tokens_per_step": training["global_batch"] * training["seq_len"],
    }


@functools.cache
def _emulates(precision: str, emulate: str | None, accelerator: str, device: str) -> bool:
    """Whether a precision of 8 bits multiplies in 32 bits on this device."""
    known = discover()["precision"].get(precision)
    if emulate is None or known is None:
        return False
    schema = known.schema(emulate=emulate)
    return bool(schema.on_device(accelerator=accelerator, device=device).emulate == "true")


# Column → its entry in a result's summary, or in the latest metrics of a running attempt.
_OF_METRICS = {
    "tokens_per_second": meter.TOKENS_PER_SECOND,
    "tflops": meter.TFLOPS,
    "mfu_percent": meter.MFU,
    "step_seconds_q1": meter.STEP_SECONDS_LOW,
    "step_seconds_q3": meter.STEP_SECONDS_HIGH,
    "data_percent": meter.DATA_PERCENT,
    "measured_steps": meter.MEASURED_STEPS,
    "first_loss": "first_loss",
    "loss": meter.LOSS,
    "validation_loss": meter.VALIDATION_LOSS,
    "tokens_seen": meter.TOKENS_SEEN,
    "skipped_steps": meter.SKIPPED_STEPS,
    "flops_per_token": "flops_per_token",
    "compile_seconds": "compile/seconds",
    "train_seconds": meter.TRAIN_SECONDS,
    "paused_seconds": meter.PAUSED_SECONDS,
}


def figure_columns(metrics: Mapping[str, Any], *, world: int) -> dict[str, Any]:
    """Speed, memory and losses, from a result's summary or from the latest row of a running attempt."""
    columns = {name: metrics.get(entry) for name, entry in _OF_METRICS.items()}
    # A row of metrics has the median under a key of its own; a result's summary has it under STEP_SECONDS.
    columns["step_seconds"] = metrics.get(meter.STEP_SECONDS_MEDIAN, metrics.get(meter.STEP_SECONDS))
    per_device = columns["tokens_per_second"]
    columns["tokens_per_second_all"] = None if per_device is None else per_device * world
    peak, formula, convention = metrics.get("peak_tflops"), metrics.get("flops_convention"), None
    if peak is not None and formula is not None:
        source = metrics.get("peak_source") or "unknown source"
        convention = f"{formula} FLOPs a token, over {peak:.4g} TFLOP/s ({source})"
    # Take the largest peak of all ranks. The peak of the rank that logs may have grown since the ranks were compared.
    memory, memory_rank = metrics.get(meter.MEMORY_MOST), metrics.get(meter.MEMORY_MOST_RANK)
    own = metrics.get(meter.MEMORY_RESERVED, metrics.get("memory/max_resident(GiB)"))
    if memory is None or (own is not None and own > memory):
        memory, memory_rank = own, 0 if own is not None and world == 1 else None
    return {**columns, "mfu_convention": convention, "memory_gib": memory, "memory_rank": memory_rank}


def origin_columns(env: Mapping[str, Any] | None, job: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The code, hosts and cores of an attempt, and whether it had more processes than cores.

    Args:
        env: the attempt's env.json; None: not begun. Parts are missing if all processes died before the attempt began.
        job: the attempt's job.json; empty: no scheduler assigned nodes.
    """
    code, host, packages = ((env or {}).get(section) or {} for section in ("code", "host", "packages"))
    git = code.get("git") or {}
    nodes, host_name, usable = job.get("nodes") or [], host.get("name"), host.get("usable_cores")
    columns = {
        "git_commit": git.get("sha"),
        "git_dirty": git.get("dirty"),
        "torch": packages.get("torch"),
        "host_names": ",".join(map(str, nodes or ([host_name] if host_name else []))) or None,
    }
    if not isinstance(host_name, str) or not isinstance(usable, int | None):
        return columns
    short = {str(node).partition(".")[0] for node in nodes}
    # On a test cluster, Slurm may have several names for one machine: count its cores once.
    hosts = len(short) if host_name.partition(".")[0] in short else 1
    cores = None if usable is None else usable * hosts
    on_cpu = config["cluster"]["accelerator"] == "cpu"
    is_oversubscribed = None if cores is None else on_cpu and config["world"] > cores
    return {**columns, "hosts": hosts, "cores": cores, "oversubscribed": is_oversubscribed}


# Stages that drop a point although it breaks no rule.
_UNWANTED = ("where", "duplicate")
Job = tuple[Submission, int]
"""A submission, and the index of a run in it."""
# What an attempt writes at its start: config.yaml, env.json (None: missing) and job.json (empty: missing).
_Attempt = tuple[Mapping[str, Any], Mapping[str, Any] | None, Mapping[str, Any]]


@dataclass
class SweepTable:
    """The rows of one sweep, computed again and again while the sweep runs: files that cannot change are read once.

    Args:
        code: fingerprint of the present code; None: no run is marked as stale.
        estimates: whether to estimate runs without a stored estimate: runs of earlier versions, and single runs.
    """

    sweep: SweepFolder
    code: str | None = None
    estimates: bool = False
    _attempts: dict[tuple[Path, int], _Attempt] = field(default_factory=dict)

    def rows(self, states: States | None = None) -> list[dict[str, Any]]:
        """A row for each run and each dropped point: in the order of the plan, then runs that are not in the plan.

        Args:
            states: the scheduler's states of jobs (see `job_states`); None: unknown.
        """
        steps = stack_steps(self.sweep.manifest().get("space"))
        points: list[dict[str, Any]] = [
            {**point, "stack_step": None if point.get("control") else steps.get(canonical_text(point.get("point")))}
            for point in self.sweep.points()
        ]
        folders = {run.path.name: run for run in self.sweep.runs()}
        jobs, known = jobs_of(self.sweep, self.sweep.submissions()), states or {}
        rows = []
        for point in points:
            name, drop = point.get("run"), point.get("dropped")
            facts = {"sweep": self.sweep.name, "repeat": point.get("repeat"), **_values(point)}
            if drop:
                outcome = None if drop["stage"] in _UNWANTED else OutcomeKind.INFEASIBLE.value
                facts |= {"state": "dropped", "outcome": outcome}
                rows.append({**facts, "dropped_stage": drop["stage"], "cause": drop["reason"]})
            elif name in folders:
                rows.append(self._row(folders.pop(name), point, jobs.get(name), known))
            else:
                gone = {"state": "missing", "cause": "its folder is gone; submit the sweep again"}
                rows.append({**facts, **_names(self.sweep.run(str(name))), **gone})
        # Runs that the sweep's plan does not contain any more.
        rows += [self._row(run, {}, jobs.get(name), known) for name, run in folders.items()]
        keys = list(dict.fromkeys(key for point in points for key in point.get("point", {})))
        return [{name: row.get(name) for name in (*NAMES, *(POINT + key for key in keys))} for row in rows]

    def _row(self, run: RunFolder, point: Mapping[str, Any], job: Job | None, known: States) -> dict[str, Any]:
        try:
            facts = self._facts(run, point, job, known.get((job[0].token, job[1])) if job else None)
        except Exception as error:
            # Catch everything: one damaged folder must not hide the others.
            cause = _said(error)
            if not isinstance(error, TitanlabError):
                cause = f"its files cannot be understood ({type(error).__name__}: {cause})"
            facts = {"state": "unreadable", "cause": cause}
        return {**facts, "sweep": self.sweep.name, **_names(run), **_values(point)}

    def _facts(
        self, run: RunFolder, point: Mapping[str, Any], job: Job | None, job_state: JobState | None
    ) -> dict[str, Any]:
        status, outcome = run.status() or Status(state="prepared", updated=0.0), run.result()
        state = state_of(status, outcome, job[0] if job else None, job_state)
        end = outcome if state == "ended" else None
        config, env, made_by = self._attempt(run, status.attempt, by_job=job is not None)
        # The result of the previous attempt; if the run waits to resume, its latest result.
        previous = run.result(status.attempt - 1) if status.attempt > 1 else None
        previous = previous if end is not None or outcome is None else outcome
        facts = {
            **recipe_columns(config),
            **figure_columns(end.metrics if end else status.metrics, world=config["world"]),
            "state": state,
            "previous_outcome": previous.kind.value if previous else None,
            "step": end.step if end else status.step,
            "steps": (end.steps if end else status.steps) or config["training"]["steps"],
            "attempt": status.attempt,
            # Most runs have one attempt: then do not read the folders of attempts.
            "restarts": run.restarts() if status.attempt > 1 else 0,
            "updated": status.updated or None,
            "folder": str(run.path),
            **dict(zip(("parent_run", "parent_step"), run.parent() or (None, None), strict=True)),
            **origin_columns(env, made_by, config),
            "launcher": env.get("launcher") if env else None,
        }
        if job is not None:
            submission, index = job
            is_own = (made_by.get("token"), made_by.get("index")) == (submission.token, index)
            launcher = launcher_named(submission.launcher)
            is_waiting = job_state is not None and job_state.state in (*WAITING, "unknown")
            facts |= {
                "launcher": submission.launcher,
                "job_id": (made_by.get("job_id") if is_own else None) or launcher.job_number(submission, index),
                "queue_reason": job_state.reason if job_state and is_waiting else None,
                "scheduler_state": job_state.raw if job_state and launcher.has_scheduler else None,
            }
        kept = point.get("estimate") or (_late_estimate(config) if self.estimates else None)
        facts |= estimate_columns(kept, facts["layout.label"])
        if env is not None:
            facts["started"] = env.get("time")
            # If all processes died before the attempt began, no code is recorded.
            fingerprint = env.get("code", {}).get("fingerprint")
            facts["code"] = fingerprint if isinstance(fingerprint, str) else None
            facts["stale"] = None if None in (facts["code"], self.code) else facts["code"] != self.code
        if end is None:
            stopped = run.stopped(status.attempt) if state in ACTIVE else None
            return {**facts, "cause": stopped, "seconds_left": None if stopped else status.seconds_left}
        facts["tracker_gap"] = tracker_gap(run) if config["tracker"]["kind"] != Jsonl.kind else None
        word = (end.scheduler or {}).get("state") or facts.get("scheduler_state")
        facts |= {"outcome": end.kind.value, "cause": end.cause, "rank": end.rank, "ended": end.ended}
        return {**facts, "exit_code": end.exit_code, "scheduler_state": word}

    def _attempt(self, run: RunFolder, attempt: int, *, by_job: bool) -> _Attempt:
        key = (run.path, attempt)
        if key not in self._attempts:
            # Raises an error if another version wrote the run: the meaning of its files may differ.
            run.identity()
            folder = run.attempt_folder(attempt)
            config = run.config(attempt if (folder / "config.yaml").is_file() else None)
            env = run.env(attempt) if attempt else None
            made_by = (run.job(attempt) if attempt else None) or {}
            if attempt and (env is None or (by_job and not made_by)):
                return config, env, made_by  # Do not cache them: the missing files are about to be written.
            self._attempts[key] = config, env, made_by
        return self._attempts[key]


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _names(run: RunFolder) -> dict[str, Any]:
    return {"run": run.path.name, "name": run.name, "hash8": run.hash8}


def _values(point: Mapping[str, Any]) -> dict[str, Any]:
    """The point's columns; empty for a run that is in no plan."""
    if not point:
        return {}
    values = {POINT + key: as_text(value) for key, value in point.get("point", {}).items()}
    return {"control": point.get("control") is True, "stack_step": point.get("stack_step"), **values}


PREFIX = "estimate."
FIGURES = ("step_seconds", "tokens_per_second", "memory_gib")
_OTHER_LAYOUT = "is that of {layout}, the layout in which it was submitted"


def estimated(recipe: Recipe) -> Estimate | str:
    """The estimate of a resolved recipe, or why there is none. It ignores name, repeat, seed and learning rate."""
    # Change a copy: making a new config would check the rate, and another package's optimizer may refuse 1.0.
    optimizer = copy.copy(recipe.optimizer)
    vars(optimizer).update(lr=1.0, schedule=Schedule())
    return _estimated(dataclasses.replace(recipe, name="", repeat=0, seed=0, notes=None, optimizer=optimizer))


@functools.cache
def _estimated(recipe: Recipe) -> Estimate | str:
    from titanlab.plan import estimate_or_reason

    return estimate_or_reason(recipe)


def estimate_values(recipe: Recipe) -> dict[str, Any]:
    """The estimate of a resolved recipe as plain values: `layout`, and the figures or why there are none."""
    values: dict[str, Any] = {"layout": recipe.layout.label, **dict.fromkeys(FIGURES), "note": None}
    try:
        answer = estimated(recipe)
    except TitanlabError as error:
        answer = str(error)
    if isinstance(answer, str):
        return {**values, "note": answer}
    seconds = answer.hours * 3600 / recipe.training.steps
    return {
        **values,
        "step_seconds": seconds,
        "tokens_per_second": recipe.tokens_per_step / seconds / recipe.layout.world if seconds > 0 else None,
        "memory_gib": answer.reserved_bytes / 2**30,
    }


def _late_estimate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The estimate of the recipe in a run's config.yaml, computed now."""
    from titanlab.recipe import from_mapping

    try:
        return estimate_values(from_mapping(config))
    except (TitanlabError, LookupError, TypeError, ValueError) as error:
        return {"note": f"its recipe cannot be read ({_said(error)})"}


def estimate_columns(kept: Mapping[str, Any] | None, layout: str | None) -> dict[str, Any]:
    """The estimate's columns of a row.

    Args:
        kept: the stored estimate of the run; None: there is none.
        layout: the layout of the latest attempt, which may differ from the estimated one.
    """
    if not isinstance(kept, Mapping):
        return {}
    if layout is not None and kept.get("layout") not in (None, layout):
        return {f"{PREFIX}note": _OTHER_LAYOUT.format(layout=kept["layout"])}
    return {f"{PREFIX}{name}": kept.get(name) for name in (*FIGURES, "note")}


SCHEMA_KEY, SWEEP_KEY = "titanlab.schema", "titanlab.sweep"


def arrow_table(rows: Sequence[Mapping[str, Any]], sweep: str) -> Any:
    """The rows as a table of pyarrow; a value of the wrong type for its column becomes null.

    Columns have the types of `COLUMNS`, and text for each key of the points, whatever the values are.
    """
    import pyarrow as pa

    types = {TEXT: pa.string(), WHOLE: pa.int64(), NUMBER: pa.float64(), TRUTH: pa.bool_()}
    fields = [pa.field(name, types[kind]) for name, kind in COLUMNS.items()]
    fields += [pa.field(name, pa.string()) for name in point_keys(rows)]
    sound = [{name: fitting_value(name, value) for name, value in row.items()} for row in rows]
    return pa.Table.from_pylist(sound, schema=pa.schema(fields, {SCHEMA_KEY: str(SCHEMA), SWEEP_KEY: sweep}))


def write_table(rows: Sequence[Mapping[str, Any]], sweep: str, into: Path) -> list[Path]:
    """Write `<sweep>.parquet` and `<sweep>.csv`, each atomically. Returns their paths.

    Raises:
        ConfigError: the folder cannot be written.
    """
    from pyarrow import csv, parquet

    table = arrow_table(rows, sweep)
    # Spreadsheets run a text that begins with `=` as a formula, and anybody may have written the text of a cause.
    plain = arrow_table([{name: _inert(value) for name, value in row.items()} for row in rows], sweep)
    try:
        into.mkdir(parents=True, exist_ok=True)
        written = []
        for kind, write, content in (("parquet", parquet.write_table, table), ("csv", csv.write_csv, plain)):
            buffer = io.BytesIO()
            write(content, buffer)
            written.append(into / f"{sweep}.{kind}")
            write_bytes(written[-1], buffer.getvalue())
        return written
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise ConfigError("--into", into, rule, "name a folder of yours") from error


def _inert(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


# A scheduler serves many users, so do not ask it at every call; without a scheduler only local files are read.
_ASK_SECONDS = 10.0


def look_at(
    sweep: SweepFolder,
    report: Callable[[str], None] = lambda line: None,
    *,
    estimates: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Callable[[], list[dict[str, Any]]]:
    """A function that returns the sweep's current rows at every call.

    Args:
        estimates: whether to estimate runs without a stored estimate, which takes some seconds.

    Each call writes results for runs whose jobs have ended without one; if a result cannot be written, it calls
    `report` once for each message.
    """
    reported: set[str] = set()

    def once(line: str) -> None:
        if line not in reported:
            reported.add(line)
            report(line)

    table = SweepTable(sweep, code=present_code(), estimates=estimates)
    states: States = {}
    due = -float("inf")

    def look() -> list[dict[str, Any]]:
        nonlocal states, due
        submitted = sweep.submissions()
        if not submitted:
            close_dead_runs(sweep)
        elif clock() >= due:
            states = reconcile(sweep, once)
            if any(launcher_named(submission.launcher).has_scheduler for submission in submitted):
                due = clock() + _ASK_SECONDS
        return table.rows(states)

    return look
