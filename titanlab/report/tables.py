"""Tables of a report: headings and cells as text, which the page escapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from titanlab.system.text import grouped, significant

_LONG = 40


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell.

    Attributes:
        text: what it shows.
        run: name of a run's folder, to which the cell links.
        more: text that is shown on demand.
        is_number: aligned to the right.
        items: parts of the text, each of which stays in one line where it can.
    """

    text: str
    run: str = ""
    more: str = ""
    is_number: bool = False
    items: Sequence[str] = ()

    @property
    def is_long(self) -> bool:
        """Whether it needs a wide column."""
        return len(self.text) > _LONG or bool(self.items)


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """One table; the first cell of a row is its heading.

    Attributes:
        caption: what the table is.
        headings: of the columns.
        rows: the cells.
        columns: whether the headings are names of columns, shown as code.
        shown: how many rows are visible at once; the others are shown on demand.
        more: number of rows that are left out.
    """

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    columns: bool = False
    shown: int = 60
    more: int = field(default=0)


def text(value: Any, *, digits: int = 4) -> Cell:
    """A cell of a text or a plain value; numbers are rounded to significant digits, None is empty."""
    if isinstance(value, bool):
        return Cell(text="yes" if value else "no")
    if isinstance(value, int | float):
        whole = isinstance(value, int) or abs(value) >= 1000
        return Cell(text=grouped(value) if whole else significant(value, digits), is_number=True)
    return Cell(text="" if value is None else str(value))


def speed_text(value: float) -> str:
    """Tokens per second, or a share."""
    return grouped(value) if value >= 100 else significant(value)


def run_cell(name: object) -> Cell:
    """A cell that links to a run's folder."""
    return Cell(text=str(name), run=str(name))


def values_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, caption: str) -> PageTable:
    """The values of some columns of the sweep's table, a row for each run."""
    return PageTable(
        caption=caption,
        headings=["run", *columns],
        rows=[[run_cell(row["run"]), *(text(row.get(name)) for name in columns)] for row in rows],
        columns=True,
    )
