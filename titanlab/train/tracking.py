"""Describes a run to its trackers, holds rows until a checkpoint, and finds what a tracker lacks. Imports no torch.

`HeldRows` holds a row until a checkpoint includes its step, so that a rollback never has to withdraw a row. No
tracker can: wandb takes the steps of a run in ascending order and drops a second row of a step; TensorBoard shows both.
`rebuild` writes a tracker's files again from metrics.jsonl.
"""

from __future__ import annotations

import time as clock
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError, TitanlabError
from titanlab.recipe import Recipe, to_mapping
from titanlab.records import EXPERTS, RunFolder, metrics_of, point_of
from titanlab.system import shown_path
from titanlab.techniques.tracker.contract import (
    FINISHED,
    RECORD_FILE,
    Record,
    TrackedRun,
    Tracker,
    TrackerConfig,
    file_of,
    open_tracker,
    read_record,
    records_in,
    write_record,
)
from titanlab.techniques.tracker.wandb import is_uploaded, offline_files


def tracked_run(
    recipe: Recipe,
    run: RunFolder,
    *,
    attempt: int,
    resumed_step: int = 0,
    id: str | None = None,  # noqa: A002
    is_live: bool = True,
    record_file: str = RECORD_FILE,
) -> TrackedRun:
    """The description of a run for trackers.

    Args:
        id: the run's id in the tracker, as a checkpoint has it; used if the run's folder has no such id.
        is_live: whether the run is training now.
    """
    account = recipe.model.account()
    known = (None if (identity := run.identity()) is None else identity.tracker_id) or id
    if known is None:
        # If an earlier version of titanlab made the run, only the records of earlier attempts may have the id.
        ids = {attempt: record.id for kind in records(run).values() for attempt, record in kind.items() if record.id}
        known = ids[max(ids)] if ids else None
    return TrackedRun(
        id=known or run.hash8 or run.path.name,
        name=run.path.name,
        sweep=recipe.sweep,
        folder=run.path,
        config=to_mapping(recipe),
        layout=recipe.layout.degrees(),
        facts={
            "parameters": account.parameter_count,
            "tokens_per_step": recipe.tokens_per_step,
            "device": recipe.cluster.device,
            "layout.label": recipe.layout.label,
            **{f"point.{key}": value for key, value in point_of(run).items()},
        },
        tags=[recipe.model.kind, str(recipe.cluster.device), recipe.precision.kind],
        notes=recipe.notes,
        attempt=attempt,
        resumed_step=resumed_step,
        is_live=is_live,
        record_file=record_file,
    )


def records(run: RunFolder) -> dict[str, dict[int, Record]]:
    """The records of the run's attempts: kind of tracker → attempt → record."""
    by_kind: dict[str, dict[int, Record]] = {}
    for attempt in run.attempts():
        for kind, record in records_in(run.attempt_folder(attempt)).items():
            by_kind.setdefault(kind, {})[attempt] = record
    return by_kind


def has_tracker(run: RunFolder, kind: str) -> bool:
    """Whether a tracker of this kind has taken rows of the run, during the run or afterwards."""
    return kind in records(run) or kind in records_in(run.path)


_WANDB = "wandb"


def tracker_gap(run: RunFolder) -> str | None:
    """A line on what the trackers of an ended run lack; None if they are complete, or if there are none.

    Reads only records unless rows are missing.
    """
    gaps = []
    for kind, by_attempt in records(run).items():
        rebuilt = records_in(run.path).get(kind)
        if rebuilt is not None and rebuilt.state == FINISHED:
            by_attempt = {attempt: record for attempt, record in by_attempt.items() if attempt > rebuilt.attempt}
        else:
            rebuilt = None
        unfinished = {attempt: record for attempt, record in by_attempt.items() if record.state != FINISHED}
        wanted = [record.wanted for record in (*by_attempt.values(), *([] if rebuilt is None else [rebuilt]))]
        if unfinished:
            gap = _unfinished(run, unfinished)
        elif left_out := sum(record.left_out for record in by_attempt.values()):
            gap = f"lacks {left_out} rows, because the tracker could not keep up"
        elif "online" in wanted and waiting_files(run):
            gaps.append(f"{kind}: written offline, not uploaded; titanlab sync {shown_path(run.path)}")
            continue
        else:
            continue
        gaps.append(f"{kind}: {gap}; titanlab sync --rebuild {shown_path(run.path)}")
    return " · ".join(gaps) or None


def _unfinished(run: RunFolder, unfinished: Mapping[int, Record]) -> str:
    """A phrase that says which rows may be missing from attempts whose tracker was not closed."""
    last = max((row["step"] for row in run.metrics() if row["attempt"] in unfinished), default=None)
    taken = max((record.step for record in unfinished.values() if record.step is not None), default=None)
    if last is None or (taken is not None and taken >= last):
        return "was not closed, and may lack the last rows"
    return f"may lack all {last} steps" if taken is None else f"has at least the steps up to {taken} of {last}"


def waiting_files(run: RunFolder) -> list[Path]:
    """Files of wandb that were not uploaded, or not completely, in the order of their steps."""
    attempts = records(run).get(_WANDB, {})
    # An online run that ended abruptly may have rows that were not uploaded.
    unfinished = [
        file
        for record in attempts.values()
        # The record may come from a stranger, and the files are uploaded: accept only folders inside the run.
        if record.mode == "online"
        and record.state != FINISHED
        and record.folder is not None
        and not Path(record.folder).is_absolute()
        and ".." not in Path(record.folder).parts
        for file in (run.path / record.folder).glob("run-*.wandb")
    ]
    files = {*offline_files(run.path), *unfinished}
    # Sort by attempt before time: the times in the names of wandb's folders come from hosts whose clocks may differ.
    places = {record.folder: attempt for attempt, record in attempts.items()}
    return sorted(
        (file for file in files if not is_uploaded(file)),
        key=lambda file: (places.get(str(file.parent.relative_to(run.path)), 0), file.parent.name.partition("run-")[2]),
    )


def has_repeated_steps(run: RunFolder) -> bool:
    """Whether waiting files of wandb have steps twice, because an attempt repeated steps of an earlier one.

    wandb keeps the first row of a step that it gets; for the run the last row is valid.
    """
    waiting = {str(file.parent.relative_to(run.path)) for file in waiting_files(run)}
    attempts = {attempt: record for attempt, record in records(run).get(_WANDB, {}).items() if record.folder in waiting}
    begins = {row["attempt"]: row["step"] for row in run.metrics("attempt")} if len(attempts) > 1 else {}
    return any(
        earlier.step is not None and earlier.step > begins.get(attempt, earlier.step)
        for attempt in attempts
        for before, earlier in attempts.items()
        if before < attempt
    )


class HeldRows:
    """Gives a tracker rows only up to the newest checkpoint; later rows wait.

    Args:
        tracker: the started tracker that gets the rows.
        saved_step: returns the step of the newest checkpoint.
    """

    def __init__(self, tracker: Tracker, saved_step: Callable[[], int]) -> None:
        self._tracker, self._saved_step = tracker, saved_step
        self._rows: deque[tuple[int, Mapping[str, Any], float]] = deque()
        self._logged = 0

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Keep a row with its time, and log the kept rows whose step is in a checkpoint."""
        self._rows.append((step, dict(metrics), clock.time() if time is None else time))
        self._release(self._saved_step())

    def go_back(self, to: int) -> None:
        """Drop the rows after step `to`, from which the run continues."""
        self._rows = deque(row for row in self._rows if row[0] <= to)

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """Log all rows, and finish."""
        self._release(None)
        self._tracker.finish(summary, exit_code=exit_code)

    def _release(self, until: int | None) -> None:
        while self._rows and (until is None or self._rows[0][0] <= until):
            step, metrics, time = self._rows.popleft()
            # Skip steps that the tracker has: if the newest checkpoint is damaged, a rollback goes further back.
            if step >= self._logged:
                self._tracker.log(step, metrics, time=time)
                self._logged = step


class RebuildError(TitanlabError):
    """The tracker could not write the rows."""


def rebuild(run: RunFolder, tracker: TrackerConfig | None = None) -> list[Record]:
    """Rewrite the files of a run's trackers with all valid rows and the summary, under the same id.

    The run's own files are moved to `replaced/`; files of an earlier call are deleted, so that only one copy remains.

    Args:
        tracker: write the files of this tracker only, which the run may lack; None: write those of the run's trackers.

    Returns:
        a record for each tracker.

    Raises:
        ConfigError: the run is in progress, has no rows, or has no tracker with files.
        RebuildError: a tracker could not write them; its earlier files are unchanged.
    """
    # Imported here: it needs Hydra.
    from titanlab.recipe import frozen_recipe

    with run.claim():
        attempt = run.newest_attempt() or 1
        has_own = (run.attempt_folder(attempt) / "config.yaml").is_file()
        recipe = frozen_recipe(run, attempt=attempt if has_own else None)
        rows = [row for row in run.metrics() if row["kind"] != EXPERTS]
        own = {config.kind: config for config in recipe.tracker.parts().values()}
        # Prefer the run's own config of this tracker, which has the project, the group and the tags.
        wanted = list(own.values()) if tracker is None else [own.get(tracker.kind, tracker)]
        configs = [made for config in wanted if (made := config.for_rebuild(len(rows))) is not None]
        if not configs:
            rule = "writes nothing besides metrics.jsonl, which is complete"
            raise ConfigError("tracker", recipe.tracker.kind, rule, "there is nothing to do")
        if not rows:
            raise ConfigError("run", run.path, "has no rows in metrics.jsonl", "there is nothing to write")
        several = len(own) > 1 or (tracker is not None and tracker.kind not in own)
        return [_rewritten(run, recipe, config, rows, attempt, several=several) for config in configs]


def write_at_end(run: RunFolder, recipe: Recipe, attempt: int) -> str | None:
    """Write the files of those trackers that write when a run has ended. The caller has claimed the run.

    Returns:
        why a file could not be written, in one line; None: all are written.
    """
    parts = recipe.tracker.parts()
    configs = [config for config in parts.values() if config.is_written_at_end]
    try:
        rows = [row for row in run.metrics() if row["kind"] != EXPERTS] if configs else []
        for config in configs if rows else ():
            config = config.for_rebuild(len(rows)) or config
            config.check_installed()
            _rewritten(run, recipe, config, rows, attempt, several=len(parts) > 1)
    except (TitanlabError, OSError) as error:
        return f"its files for wandb are not written ({error}); metrics.jsonl has everything"
    return None


def is_due(run: RunFolder) -> bool:
    """Whether a run has ended, its tracker writes files at the end, and these files lack the last attempt."""
    try:
        is_at_end = any(config.get("mode") == "at_end" for config in configs_of(run))
        has_rows = is_at_end and run.result() is not None and any(row["kind"] != EXPERTS for row in run.metrics())
    except ConfigError:
        return False  # `titanlab status` names the damaged file.
    written = records_in(run.path).get(_WANDB)
    return has_rows and (written is None or written.state != FINISHED or written.attempt < run.newest_attempt())


def configs_of(run: RunFolder) -> list[Mapping[str, Any]]:
    """The tracker section of a run's config.yaml, and the config of each tracker in that section."""
    tracker = run.section("tracker")
    return [tracker, *(value for value in tracker.values() if isinstance(value, Mapping))]


def _rewritten(
    run: RunFolder,
    recipe: Recipe,
    config: TrackerConfig,
    rows: list[dict[str, Any]],
    attempt: int,
    *,
    several: bool,
) -> Record:
    """Rewrite the files of one tracker."""
    file = file_of(config.kind) if several else RECORD_FILE
    described = tracked_run(recipe, run, attempt=attempt, is_live=False, record_file=file)
    files = config.implementation()
    before = files.kept_files(run.path)
    earlier = read_record(described.record)
    warnings: list[str] = []
    tracker = open_tracker(config, described, warn=warnings.append)
    for row in rows:
        tracker.log(row["step"], metrics_of(row), time=row.get("time"))
    outcome = run.result()
    # The summary has the result's medians and totals, or the latest row if there is no result.
    summary = metrics_of(rows[-1]) if outcome is None else {**outcome.metrics, "outcome": outcome.kind.value}
    tracker.finish(summary, exit_code=outcome.kind.exit_code if outcome else 1)
    made, new = read_record(described.record), files.kept_files(run.path) - before
    if warnings or made is None or made.state != FINISHED or made.left_out or len(new) != 1:
        files.put_aside(run.path, new, keep=False)
        if earlier is not None:
            write_record(described.record, earlier)
        else:
            described.record.unlink(missing_ok=True)
        raise RebuildError(f"{run.path}: {'; '.join(warnings) or 'the tracker has not taken all rows'}")
    old = {path for path in before if earlier is not None and str(path.relative_to(run.path)) == earlier.folder}
    files.put_aside(run.path, old, keep=False)
    files.put_aside(run.path, before - old, keep=True)
    (place,) = (str(path.relative_to(run.path)) for path in new)
    # Record the mode that the run's attempts asked for, not the mode of this rebuild.
    modes = [record.wanted for record in records(run).get(config.kind, {}).values()] or [made.wanted]
    made = replace(made, rebuilt=True, wanted=modes[-1], folder=place)
    write_record(described.record, made)
    return made
