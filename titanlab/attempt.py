"""An attempt at a run, from outside its ranks: what is done before they start, and what their ends add up to."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace

from titanlab.checkpoint.folders import check_shapes, latest, step_of
from titanlab.data import source
from titanlab.host import Host
from titanlab.options import account_of
from titanlab.outcome import Outcome, first_cause, from_exit
from titanlab.provenance import collect
from titanlab.recipe import Recipe, to_mapping
from titanlab.run_folder import RunFolder


def begin(run: RunFolder, recipe: Recipe, host: Host, *, started_by: str) -> int:
    """Begin the next attempt at a claimed run. Returns its number.

    Raises:
        ConfigError: the run's checkpoint is of another model.
    """
    own = latest(run.checkpoints)
    if own is not None:
        check_shapes(own, account_of(recipe.model).account(recipe.model).parameters, "run")
    devices = {"accelerator": recipe.cluster.accelerator, "name": recipe.cluster.device, "count": host.count}
    provenance = collect(devices=devices, launcher=started_by)
    return run.begin_attempt(to_mapping(recipe), provenance.record, patch=provenance.patch)


def keep_tokenizer(run: RunFolder, recipe: Recipe) -> None:
    """Copy the tokenizer into the run, so that its checkpoints mean something wherever the folder goes."""
    tokenizer = source.tokenizer(recipe.data)
    if tokenizer is None:
        return
    run.tokenizer.mkdir(exist_ok=True)
    for name in (tokenizer.file.name, "tokenizer_config.json"):
        kept = tokenizer.file.with_name(name)
        if kept.is_file():
            shutil.copy(kept, run.tokenizer)


def conclude(run: RunFolder, attempt: int, exits: Mapping[int, int]) -> Outcome:
    """The outcome of an attempt whose ranks have ended without recording one: recorded now.

    Args:
        exits: exit codes of the ranks that ended badly, by rank; what they noted themselves comes first.
    """
    notes = {note.rank or 0: note for note in run.failures(attempt)}
    for rank, code in exits.items():
        notes.setdefault(rank, from_exit(code, rank=rank, attempt=attempt))
    outcome = with_progress(run, first_cause(notes.values()) if notes else from_exit(0, attempt=attempt))
    run.write_result(outcome)
    return outcome


def with_progress(run: RunFolder, outcome: Outcome) -> Outcome:
    """The outcome with the last step of its attempt that anybody knows of."""
    # A status may be a second old, and there may be more steps than rows.
    status = run.known_status()
    mine = status if status is not None and status.attempt == outcome.attempt else None
    rows = [row for row in run.metrics("train") if row["attempt"] == outcome.attempt]
    opened = [row["step"] for row in run.metrics("attempt") if row["attempt"] == outcome.attempt]
    saved = latest(run.checkpoints)
    last = {key: value for key, value in rows[-1].items() if key not in _ROW} if rows else outcome.metrics
    return replace(
        outcome,
        step=max([mine.step if mine else 0, step_of(saved) if saved else 0, *opened, *(row["step"] for row in rows)]),
        steps=mine.steps if mine else None,
        metrics=outcome.metrics or last,
    )


_ROW = ("kind", "step", "attempt", "time")
