"""Which checkpoints of a run can go: those that neither `resume` nor the rules of its recipe need."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from titanlab.checkpoint.contents import read_contents
from titanlab.checkpoint.listing import ListedCheckpoint, list_checkpoints
from titanlab.checkpoint.remote.address_schema import Place, StorePath
from titanlab.errors import ConfigError
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder


def removable(
    run: RunFolder, place: Place, *, keep: int | None, verifies: bool, named: Collection[str] = ()
) -> list[ListedCheckpoint]:
    """The checkpoints of a run that can go.

    The newest whole one always stays, also if younger ones are damaged, and so does the newest with the optimizer.
    Without a whole one nothing goes.

    Args:
        keep: how many of the newest stay; None: checkpoint.keep of the recipe, and 1 for a run that is done.
        verifies: read every byte of those that stay, and not only index and sizes.
        named: real paths of checkpoints from which other runs start.
    """
    rows = list_checkpoints(place, verifies=verifies)
    whole = [row for row in rows if row.state == "complete" and row.problem is None]
    if not whole:
        return []
    stay = _by_rule(run, whole, keep)
    stay.add(whole[-1].name)
    stay |= {row.name for row in [_newest_full(place, whole)] if row is not None}
    return [
        row for row in rows if row.name not in stay and row.state != "unfinished" and not _is_named(place, row, named)
    ]


def _by_rule(run: RunFolder, whole: Sequence[ListedCheckpoint], keep: int | None) -> set[str]:
    rules = run.section("checkpoint")
    every, count = _number(rules.get("keep_every")), keep
    if count is None:
        count = _number(rules.get("keep", 2))
        if count == 0:
            count = len(whole)  # The recipe keeps all of them.
        elif (result := run.result()) is not None and result.kind is OutcomeKind.DONE:
            count = 1
    newest = {row.name for row in whole[len(whole) - min(count, len(whole)) :]}
    return newest | {row.name for row in whole if every and row.step % every == 0}


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _newest_full(place: Place, whole: Sequence[ListedCheckpoint]) -> ListedCheckpoint | None:
    """The newest checkpoint that has more than the model: a run can go on from it."""
    for row in reversed(whole):
        try:
            if read_contents(place / row.name, "run").saved.contents is None:
                return row
        except ConfigError:
            continue
    return None


def _is_named(place: Place, row: ListedCheckpoint, named: Collection[str]) -> bool:
    path = place / row.name
    text = str(path) if isinstance(path, StorePath) else str(Path(path).resolve())
    # `load_from` may also name the run, or its folder of checkpoints; an address may end with a slash.
    return any(f"{text}/".startswith(f"{name.rstrip('/')}/") for name in named)
