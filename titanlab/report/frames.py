"""A sweep as pandas data frames: a row for each run, and a row for each logged step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.records import TRAIN
from titanlab.sweep import SweepFolder, SweepTable, arrow_table, point_keys, recipe_columns
from titanlab.system import user_path

if TYPE_CHECKING:
    from pandas import DataFrame

# Columns of every frame of metrics, also of an empty one.
METRICS = ("step", "attempt", "time", meter.LOSS, meter.TOKENS_SEEN)


def sweep_frame(path: Path | str) -> DataFrame:
    """One row for each run and each dropped point; docs/comparing.md lists the columns.

    Whole numbers and booleans are nullable (`Int64`, `boolean`), other numbers are floats; the types never depend on
    the values. The frame comes from files only; no scheduler is asked.

    Args:
        path: a sweep's folder, or a parquet file that `titanlab collect` wrote.

    Raises:
        ConfigError: the path is neither of these.
    """
    import pyarrow as pa
    from pyarrow import parquet

    path = user_path(path)
    if not path.is_file():
        sweep = folder_of(path)
        return frame_of(arrow_table(SweepTable(sweep).rows(), sweep.name))
    try:
        return frame_of(parquet.read_table(path))
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError("path", path, "is not a Parquet file", "name a sweep's folder, or SWEEP.parquet") from error


def frame_of(table: Any) -> DataFrame:
    """The frame of an Arrow table, with the column types that the files of `titanlab collect` have."""
    import pandas as pd
    import pyarrow as pa

    types = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
    frame: DataFrame = table.to_pandas(types_mapper=types.get)
    return frame


def metrics_frame(path: Path | str, kind: str = TRAIN) -> DataFrame:
    """One row for each logged step of each run, under the names of metrics.jsonl.

    The columns `run`, `name`, `layout.label` (of the attempt that wrote the row) and `point.KEY` come first.
    Rows that a later attempt has replaced are left out.

    Args:
        path: a sweep's folder.
        kind: `train` or `validation`.

    Raises:
        ConfigError: the path is not the folder of a sweep.
    """
    import pandas as pd

    sweep = folder_of(user_path(path))
    steps = []
    for row in SweepTable(sweep).rows():
        # A run with unreadable files has no layout, and its metrics cannot be trusted.
        if row["run"] is None or row["layout.label"] is None:
            continue
        run = sweep.run(row["run"])
        points = {name: row[name] for name in point_keys([row])}
        labels: dict[int, str] = {}
        for metrics in run.metrics(kind):
            attempt = metrics["attempt"]
            if attempt not in labels:
                is_latest = attempt == row["attempt"]
                labels[attempt] = (
                    row["layout.label"] if is_latest else recipe_columns(run.config(attempt))["layout.label"]
                )
            steps.append({"run": row["run"], "name": row["name"], "layout.label": labels[attempt], **points, **metrics})
    return pd.DataFrame(steps) if steps else pd.DataFrame(columns=["run", "name", "layout.label", *METRICS])


def folder_of(path: Path) -> SweepFolder:
    """The sweep in a folder.

    Raises:
        ConfigError: the path is not the folder of a sweep.
    """
    sweep = SweepFolder(path.absolute())
    if not (sweep.manifest() or sweep.runs()):
        raise ConfigError("path", path, "is not a sweep's folder", "try runs/NAME; `titanlab status` lists them")
    return sweep
