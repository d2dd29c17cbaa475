"""Rewrites a tracker's files from metrics.jsonl, for runs whose tracker lacks rows."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from titanlab.errors import ConfigError, TitanlabError
from titanlab.recipe import Recipe, frozen_recipe
from titanlab.records import EXPERTS, Outcome, RunFolder, metrics_of
from titanlab.techniques.tracker.contract import (
    FINISHED,
    RECORD_FILE,
    Record,
    TrackerConfig,
    file_of,
    open_tracker,
    read_record,
    write_record,
)
from titanlab.train.tracked_run import records, tracked_run


class RebuildError(TitanlabError):
    """The tracker could not write the rows."""


def rebuild(run: RunFolder, tracker: TrackerConfig | None = None) -> list[Record]:
    """Rewrite the files of a run's trackers with all valid rows and the summary, under the same id.

    The run's own files are moved to `replaced/`; files of an earlier call are deleted, so that only one copy remains.

    Args:
        tracker: another tracker than those of the run, whose files are written too; None: those of the run.

    Returns:
        a record for each tracker.

    Raises:
        ConfigError: the run is in progress, has no rows, or has no tracker with files.
        RebuildError: a tracker could not write them; its earlier files are unchanged.
    """
    with run.claim():
        attempt = run.newest_attempt() or 1
        has_own = (run.attempt_folder(attempt) / "config.yaml").is_file()
        recipe = frozen_recipe(run, attempt=attempt if has_own else None)
        rows = [row for row in run.metrics() if row["kind"] != EXPERTS]
        parts = recipe.tracker.parts()
        own = next((config for config in parts.values() if tracker is not None and config.kind == tracker.kind), None)
        if own is not None:
            # With the project, the group and the tags that the run asked for.
            parts = {own.kind: own}
        elif tracker is not None:
            parts = {tracker.kind: tracker}
        configs = [made for config in parts.values() if (made := config.for_rebuild(len(rows))) is not None]
        if not configs:
            rule = "keeps nothing beside metrics.jsonl, which is whole"
            raise ConfigError("tracker", recipe.tracker.kind, rule, "nothing is to be done")
        if not rows:
            raise ConfigError("run", run.path, "has no rows in metrics.jsonl", "there is nothing to write")
        several = len(recipe.tracker.parts()) > 1 or (tracker is not None and own is None)
        return [_rewritten(run, recipe, config, rows, attempt, several=several) for config in configs]


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
    tracker.finish(_summary(outcome, rows), exit_code=outcome.kind.exit_code if outcome else 1)
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
    # The mode that the run's attempts asked for, not that of the rebuild.
    modes = [record.wanted for record in records(run).get(config.kind, {}).values()] or [made.wanted]
    made = replace(made, rebuilt=True, wanted=modes[-1], folder=place)
    write_record(described.record, made)
    return made


def _summary(outcome: Outcome | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians and totals of the run's result; its latest row if no result was written."""
    if outcome is not None:
        return {**asdict(outcome)["metrics"], "outcome": outcome.kind.value}
    return metrics_of(rows[-1])
