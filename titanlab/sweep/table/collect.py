"""A sweep's table as files: parquet with fixed types, and CSV."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.sweep.table.columns import COLUMNS, NUMBER, SCHEMA, TEXT, TRUTH, WHOLE, fitting, point_keys

SCHEMA_KEY, SWEEP_KEY = "titanlab.schema", "titanlab.sweep"


def parquet_schema(points: Sequence[str], sweep: str) -> Any:
    """The schema of the file: all columns, and a text column for each key of the points.

    Args:
        points: names of the points' columns.
    """
    import pyarrow as pa

    types = {TEXT: pa.string(), WHOLE: pa.int64(), NUMBER: pa.float64(), TRUTH: pa.bool_()}
    fields = [pa.field(column.name, types[column.type]) for column in COLUMNS]
    fields += [pa.field(name, pa.string()) for name in points]
    return pa.schema(fields, metadata={SCHEMA_KEY: str(SCHEMA), SWEEP_KEY: sweep})


def arrow_table(rows: Sequence[Mapping[str, Any]], sweep: str) -> Any:
    """The rows as a table of pyarrow; a value of another kind than its column is left out."""
    import pyarrow as pa

    sound = [{name: fitting(name, value) for name, value in row.items()} for row in rows]
    return pa.Table.from_pylist(sound, schema=parquet_schema(point_keys(rows), sweep))


def write_table(rows: Sequence[Mapping[str, Any]], sweep: str, into: Path) -> list[Path]:
    """Write `<sweep>.parquet` and `<sweep>.csv`, each atomically. Returns their paths.

    Raises:
        ConfigError: the folder cannot be written.
    """
    from pyarrow import csv, parquet

    table = arrow_table(rows, sweep)
    # Spreadsheets compute a text that begins with these, and a cause may be text of anybody.
    plain = arrow_table([{name: _inert(value) for name, value in row.items()} for row in rows], sweep)
    try:
        into.mkdir(parents=True, exist_ok=True)
        return [
            _whole(into / f"{sweep}.parquet", lambda path: parquet.write_table(table, path)),
            _whole(into / f"{sweep}.csv", lambda path: csv.write_csv(plain, path)),
        ]
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


def _whole(path: Path, write: Callable[[Path], None]) -> Path:
    """Write a temporary file in the same folder, then rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
