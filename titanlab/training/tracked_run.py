"""The description of a run for its tracker, during training or later from its folder; torch-free."""

from __future__ import annotations

import secrets

from titanlab.recipe.recipe import Recipe, to_mapping
from titanlab.records.points_file import point_of
from titanlab.records.run_folder import RunFolder
from titanlab.tracker.record import FILE, Record, read_record
from titanlab.tracker.tracked_run import TrackedRun


def tracked_run(
    recipe: Recipe,
    run: RunFolder,
    *,
    attempt: int,
    resumed_step: int = 0,
    id: str | None = None,  # noqa: A002
    is_live: bool = True,
) -> TrackedRun:
    """The description of a run for trackers.

    Args:
        recipe: of this attempt.
        id: the tracker's id of the run in a checkpoint; None: the id of earlier attempts, or a new one.
        is_live: whether the run is training now.
    """
    account = recipe.model.account()
    return TrackedRun(
        # Random digits, so that a run that was deleted and trained again gets another id.
        id=id or _known_id(run) or f"{run.hash8}-{secrets.token_hex(3)}",
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
    )


def records(run: RunFolder) -> dict[int, Record]:
    """The tracker's record of each attempt that has one."""
    by_attempt = {attempt: read_record(run.attempt_folder(attempt) / FILE) for attempt in run.attempts()}
    return {attempt: record for attempt, record in by_attempt.items() if record is not None}


def _known_id(run: RunFolder) -> str | None:
    """The id in the records of earlier attempts, for attempts that ended before their first checkpoint."""
    ids = [record.id for record in records(run).values() if record.id]
    return ids[-1] if ids else None
