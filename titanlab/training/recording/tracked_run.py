"""The description of a run for its tracker, during training or later from its folder; torch-free."""

from __future__ import annotations

from titanlab.recipe.recipe import Recipe, to_mapping
from titanlab.records.points_file import point_of
from titanlab.records.run_folder import RunFolder
from titanlab.tracker.record import FILE, Record, records_in
from titanlab.tracker.tracked_run import TrackedRun


def tracked_run(
    recipe: Recipe,
    run: RunFolder,
    *,
    attempt: int,
    resumed_step: int = 0,
    id: str | None = None,  # noqa: A002
    is_live: bool = True,
    record_file: str = FILE,
) -> TrackedRun:
    """The description of a run for trackers.

    Args:
        recipe: of this attempt.
        id: the tracker's id of the run in a checkpoint, for runs whose folder has none.
        is_live: whether the run is training now.
        record_file: name of the tracker's record.
    """
    account = recipe.model.account()
    return TrackedRun(
        id=run.tracker_id() or id or _known_id(run) or run.hash8 or run.path.name,
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
        attempt=attempt,
        resumed_step=resumed_step,
        is_live=is_live,
        record_file=record_file,
    )


def records(run: RunFolder) -> dict[str, dict[int, Record]]:
    """For each kind of tracker that the run has had, the record of each attempt that has one."""
    by_kind: dict[str, dict[int, Record]] = {}
    for attempt in run.attempts():
        for kind, record in records_in(run.attempt_folder(attempt)).items():
            by_kind.setdefault(kind, {})[attempt] = record
    return by_kind


def has_tracker(run: RunFolder, kind: str) -> bool:
    """Whether a tracker of this kind has taken rows of the run, or its files were written afterwards."""
    return kind in records(run) or kind in records_in(run.path)


def _known_id(run: RunFolder) -> str | None:
    """The id in the records of earlier attempts, for runs of earlier versions without a checkpoint."""
    ids = {attempt: record.id for kind in records(run).values() for attempt, record in kind.items() if record.id}
    return ids[max(ids)] if ids else None
