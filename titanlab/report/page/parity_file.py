"""parity.json of a sweep's folder: proofs that its recipes train the same, which `titanlab parity` keeps there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from titanlab.errors import TitanlabError
from titanlab.parity import parity_file


class ParityRow(NamedTuple):
    """One comparison, in words."""

    run: str
    layout: str
    precision: str
    loss: str
    grad_norm: str
    gradient: str
    parameter: str
    tolerance: str
    verdict: str
    reason: str


class Parity(NamedTuple):
    """The comparisons of a sweep.

    Attributes:
        note: why there are none; empty: there are some.
    """

    time: str = ""
    reference: str = ""
    rows: tuple[ParityRow, ...] = ()
    note: str = ""


def read_parity(folder: Path) -> Parity | None:
    """The comparisons in a sweep's folder; None: there is no file. A damaged file is a note."""
    try:
        value = parity_file.read_parity(folder)
    except TitanlabError as error:
        return Parity(note=f"{parity_file.NAME} cannot be read: {error}")
    if value is None:
        return None
    return Parity(value["time"], value["reference"], tuple(map(_row, value["rows"])))


def _row(row: Mapping[str, Any]) -> ParityRow:
    passed = row.get("passed")
    return ParityRow(
        run=str(row.get("run") or ""),
        layout=str(row.get("layout") or ""),
        precision=str(row.get("precision") or ""),
        loss=_number(row.get("loss")),
        grad_norm=_number(row.get("grad_norm")),
        gradient=_largest(row.get("gradient")),
        parameter=_largest(row.get("parameter")),
        tolerance=_tolerance(row.get("tolerance")),
        verdict="PASS" if passed is True else "FAIL" if passed is False else "unknown",
        reason=str(row.get("reason") or ""),
    )


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:.2g}"


def _largest(value: Any) -> str:
    """A pair of the largest difference and the name of its tensor."""
    if isinstance(value, list) and len(value) == 2:
        name = f" ({value[1]})" if value[1] else ""
        return f"{_number(value[0])}{name}"
    return _number(value)


def _tolerance(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_number(inner)}" for key, inner in value.items())
    return _number(value)
