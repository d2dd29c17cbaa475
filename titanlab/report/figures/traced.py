"""A matplotlib figure whose marks name the run folders and the columns that they are drawn from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.figure import Figure


class Mark(NamedTuple):
    """The source of one mark of a figure.

    Attributes:
        runs: names of the run folders.
        columns: names of the table's columns, or of metrics.jsonl.
    """

    runs: tuple[str, ...]
    columns: tuple[str, ...]
    text: str


class TracedFigure(Figure):
    """A figure that knows the source of its marks; in an SVG file, the key of a mark is the id of its element.

    Attributes:
        has_heading: whether the title of the first axes is the title of the whole figure, which a page does not repeat.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.marks: dict[str, Mark] = {}
        self.has_heading = False

    def trace(self, artist: Artist, *, runs: Iterable[str], columns: Iterable[str], text: str = "") -> None:
        """Record the source of an artist of this figure."""
        key = f"mark-{len(self.marks)}"
        artist.set_gid(key)
        self.marks[key] = Mark(tuple(runs), tuple(columns), text)
