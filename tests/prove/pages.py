"""Tables of the documentation that `make test-full` writes: one line for each row of a matrix, with its differences."""

from __future__ import annotations

import os
from pathlib import Path

from titanlab.prove.parity import TraceDifference

DOCS = Path(__file__).parents[2] / "docs"


def columns(difference: TraceDifference) -> list[str]:
    """The differences of losses, gradient norms, gradients and parameters."""
    numbers = (difference.loss, difference.grad_norm, difference.gradient[0], difference.parameter[0])
    return [f"{number:.1e}" for number in numbers]


class Table:
    """The last table of a page: the number of a row, the cells that name it, then what was measured."""

    def __init__(self, page: str, rows: list[list[str]]) -> None:
        self._page = DOCS / page
        self._rows = [[str(number), *row] for number, row in enumerate(rows, 1)]
        self._measured: dict[int, list[str]] = {}

    def add(self, row: int, cells: list[str]) -> None:
        """Note what was measured for a row; with all of them, and where it is asked for, the page is written."""
        self._measured[row] = cells
        if os.environ.get("TITANLAB_WRITE_PARITY") == "1" and len(self._measured) == len(self._rows):
            lines = [f"| {' | '.join([*self._rows[row], *self._measured[row]])} |" for row in range(len(self._rows))]
            text = self._page.read_text()
            end = text.index("\n", text.rindex("|---|"))
            self._page.write_text("\n".join([text[:end], *lines]) + "\n")

    def check(self) -> None:
        """Check that the page has a line for each row, in their order."""
        lines = self._page.read_text().splitlines()
        shown = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and "e-" in line]
        assert [line[: len(self._rows[0])] for line in shown] == self._rows
