"""The memory of each run, measured and by the planner's items."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.errors import ConfigError
from titanlab.plan.machine import machine_of
from titanlab.plan.memory import ITEMS, most_memory, reserved_bytes
from titanlab.recipe.recipe import from_mapping
from titanlab.report.frames import sweep_frame
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system.files import user_path

if TYPE_CHECKING:
    from pandas import DataFrame

_GIB = 1024**3
ITEM = "item."
COLUMNS = (
    *("run", "name", "layout.label", "world", "precision", "ac", "pipeline_rank", "moment"),
    *(f"{ITEM}{name}" for name in ITEMS),
    *("tensors_gib", "estimated_gib", "measured_gib", "error_percent"),
)


def memory_frame(path: Path | str) -> DataFrame:
    """One row for each run: the planner's account of the rank that needs most, beside the measurement.

    The account is computed from the recipe alone: the items are the tensors that exist at the moment of a step at which
    their sum is largest. `estimated_gib` adds what the allocator takes beside tensors; on a CPU it adds the memory of a
    process without tensors, since the measurement there is the resident memory of the process.

    Args:
        path: a sweep's folder.

    Returns:
        Columns: `run`, `name`, `layout.label`, `world`, `precision`, `ac`, `pipeline_rank`, `moment` (`loss`,
        `backward`, `end` or `optimizer`), `item.NAME` in GiB, `tensors_gib` (their sum), `estimated_gib`,
        `measured_gib` (empty where a run has not ended well), `error_percent` of the estimate.

    Raises:
        ConfigError: the path is no sweep's folder.
    """
    import pandas as pd

    sweep = SweepFolder(user_path(path).absolute())
    runs = sweep_frame(sweep.path)
    rows = []
    for row in runs[runs.run.notna() & runs["layout.label"].notna()].to_dict("records"):
        account = _account(sweep, str(row["run"]))
        if account is None:
            continue
        measured = row["memory_gib"] if row["outcome"] == "done" else None
        known = {name: row[name] for name in ("run", "name", "layout.label", "world", "precision", "ac")}
        error = None if measured is None else 100 * (account["estimated_gib"] / measured - 1)
        rows.append({**known, **account, "measured_gib": measured, "error_percent": error})
    numbers = [name for name in COLUMNS if name.endswith(("_gib", "_percent"))]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(dict.fromkeys(numbers, float))


def _account(sweep: SweepFolder, name: str) -> dict[str, Any] | None:
    """The planner's columns; None: nothing is known of the devices."""
    run = sweep.run(name)
    recipe = from_mapping(run.config(run.newest_attempt() or None))
    try:
        most, machine = most_memory(recipe), machine_of(recipe)
    except ConfigError:
        return None
    return {
        "pipeline_rank": most.rank,
        "moment": most.moment,
        **{f"{ITEM}{item}": most.items[item] / _GIB for item in ITEMS},
        "tensors_gib": most.allocated / _GIB,
        "estimated_gib": reserved_bytes(recipe, machine, most) / _GIB,
    }
