"""Rows of a sweep's table, from a data frame or as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame


def records_of(runs: DataFrame | Sequence[Mapping[str, Any]]) -> list[dict[Any, Any]]:
    """The rows of a table, with None for missing values.

    Args:
        runs: the frame of `sweep_frame`, or rows of `titanlab.sweep.table.rows`.
    """
    if isinstance(runs, Sequence):
        return [dict(row) for row in runs]
    plain = runs.astype(object)
    records: list[dict[Any, Any]] = plain.where(plain.notna(), None).to_dict("records")
    return records
