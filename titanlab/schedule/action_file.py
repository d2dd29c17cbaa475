"""Lists of actions in CSV files: one line per rank, one cell per action, empty cells for idle time.

The format is that of torch's `_PipelineScheduleRuntime._load_csv` with format="compute_only", and of its `_dump_csv`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.schedule.action import Action, Kind
from titanlab.schedule.order import OrderError, placement_of, validate
from titanlab.system.files import read_text, write_text

KEY = "schedule.file"

_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")  # torch's notation for a forward and a backward pass that may overlap
_OTHERS = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")


def read_actions(path: str | Path) -> list[list[Action]]:
    """Read actions by rank, and check that they are complete and executable.

    Raises:
        ConfigError: the file cannot be read, or a cell breaks a rule.
    """
    orders: list[list[Action]] = []
    cells: list[list[int]] = []  # the cell number of each action, counted from 1
    for row in _rows(path):
        orders.append([])
        cells.append([])
        for number, text in enumerate(row, 1):
            for action in _actions(text.strip(), path, f"line {len(orders)}, cell {number}"):
                orders[-1].append(action)
                cells[-1].append(number)
    if not any(orders):
        raise ConfigError(KEY, path, "has no action", "give it one line a rank, with cells like 0F0,0B0")
    try:
        microbatches = 1 + max(action.microbatch for order in orders for action in order)
        validate(orders, placement_of(orders), microbatches=microbatches)
    except OrderError as error:
        cell = "" if error.index is None else f", cell {cells[error.rank][error.index]}"
        cure = "each stage runs each microbatch F and B once (or F, I and W) on one rank, and after what it needs"
        raise ConfigError(KEY, path, f"line {error.rank + 1}{cell}: {error.rule}", cure) from error
    return orders


def write_actions(path: Path, orders: Sequence[Sequence[Action]]) -> None:
    """Write a file that `read_actions` and torch can read."""
    write_text(path, "".join(",".join(str(action) for action in order) + "\n" for order in orders))


def _rows(path: str | Path) -> list[list[str]]:
    try:
        rows = list(csv.reader(read_text(Path(path)).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        cure = "give a CSV, say of `titanlab schedule 1f1b --csv my.csv`"
        raise ConfigError(KEY, path, f"cannot be read ({reason})", cure) from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    return rows


def _actions(text: str, path: str | Path, place: str) -> Iterator[Action]:
    """Actions of a cell: none, one, or the two of a pair."""
    pair = _PAIR.fullmatch(text)
    for part in pair[1].split(";") if pair else [text]:
        cell = _CELL.fullmatch(part.strip())
        if cell:
            yield Action(int(cell[1]), Kind(cell[2]), int(cell[3]))
        elif _OTHERS.fullmatch(part.strip()):
            rule = f"{place}: {part.strip()} is communication, which follows from the order"
            raise ConfigError(KEY, path, rule, "leave the cell empty")
        elif part.strip():
            rule = f"{place}: {part.strip()!r} is no action"
            raise ConfigError(KEY, path, rule, "write stage, F, B, I or W, and microbatch, as in 0F0")
