"""Lists of actions in CSV files: one line per rank, one cell per action, empty cells for idle time.

The format is that of torch's `_PipelineScheduleRuntime._load_csv` with format="compute_only", and of its `_dump_csv`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.system import counted, read_text, user_path, write_text
from titanlab.techniques.schedule.action import Action, Kind, OrderError, placement_of, validate
from titanlab.techniques.schedule.contract import PipelineSchedule

KEY = "schedule.file"

_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")  # torch's notation for a forward and a backward pass that may overlap
_OTHERS = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")


def read_actions(path: str | Path) -> list[list[Action]]:
    """Read actions by rank, and check that they are complete and executable.

    Raises:
        ConfigError: the file cannot be read, or a cell breaks a rule.
    """
    try:
        rows = list(csv.reader(read_text(Path(path)).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}").splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        cure = "give a CSV, say of `titanlab schedule 1f1b --csv my.csv`"
        raise ConfigError(KEY, path, f"cannot be read ({reason})", cure) from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    orders: list[list[Action]] = []
    cells: list[list[int]] = []  # the cell number of each action, counted from 1
    for line, row in enumerate(rows, 1):
        numbered = [
            (action, number)
            for number, text in enumerate(row, 1)
            for action in _actions(text.strip(), path, f"line {line}, cell {number}")
        ]
        orders.append([action for action, _ in numbered])
        cells.append([number for _, number in numbered])
    if not any(orders):
        raise ConfigError(KEY, path, "has no action", "give it one line a rank, with cells like 0F0,0B0")
    try:
        validate(orders, placement_of(orders), microbatches=_microbatches(orders))
    except OrderError as error:
        cell = "" if error.index is None else f", cell {cells[error.rank][error.index]}"
        cure = "each stage runs each microbatch F and B once (or F, I and W) on one rank, and after what it needs"
        raise ConfigError(KEY, path, f"line {error.rank + 1}{cell}: {error.rule}", cure) from error
    return orders


def write_actions(path: Path, orders: Sequence[Sequence[Action]]) -> None:
    """Write a file that `read_actions` and torch can read."""
    write_text(path, "".join(",".join(str(action) for action in order) + "\n" for order in orders))


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
            rule = f"{place}: {part.strip()!r} is not an action"
            raise ConfigError(KEY, path, rule, "write stage, F, B, I or W, and microbatch, as in 0F0")


@option("schedule", "csv")
@dataclass(frozen=True, kw_only=True)
class CsvSchedule(PipelineSchedule):
    """The actions in a file.

    Attributes:
        file: one line per rank, one cell per action: `0F0` is stage 0, forward, microbatch 0; B is a backward pass; I
            and W are its halves (gradient of the input, gradient of the weights).
    """

    kind: str = "csv"
    file: str = ""

    def __post_init__(self) -> None:
        if not self.file.strip():
            cure = "write one with `titanlab schedule 1f1b --csv my.csv`: schedule.file=my.csv"
            raise ConfigError(KEY, self.file, "names no file", cure)
        # An absolute path, because ranks need not start in the same folder.
        object.__setattr__(self, "file", str(user_path(self.file).absolute()))

    def fixed_size(self) -> tuple[int, int]:
        orders = read_actions(self.file)
        return len(orders), _microbatches(orders)

    def stage_count(self, *, ranks: int) -> int:
        """The least possible number, one stage for each rank; only the file has the exact number."""
        return ranks

    def placement(self, *, ranks: int) -> list[int]:
        return placement_of(self._orders(ranks))

    def check_pipeline(self, *, ranks: int, microbatches: int) -> None:
        self.actions(ranks=ranks, microbatches=microbatches)

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        orders = self._orders(ranks)
        expected = _microbatches(orders)
        if expected != microbatches:
            rule = f"is for {counted(expected, 'microbatch', 'microbatches')} a step, and a step has {microbatches}"
            more, fewer = expected // microbatches, microbatches // expected
            if microbatches * more == expected:
                cure = f"try training.global_batch times {more}, or schedule=1f1b"
            elif expected * fewer == microbatches:
                cure = f"try training.microbatch times {fewer}, or schedule=1f1b"
            else:
                cure = f"try schedule=1f1b, or a file for {microbatches}"
            raise ConfigError(KEY, self.file, rule, cure)
        return orders

    def _orders(self, ranks: int) -> list[list[Action]]:
        orders = read_actions(self.file)
        if len(orders) != ranks:
            rule = f"has {len(orders)} lines, one a rank, and the pipeline has {ranks} ranks"
            raise ConfigError(KEY, self.file, rule, f"try parallelism.pipeline={len(orders)}, or schedule=1f1b")
        return orders


def _microbatches(orders: list[list[Action]]) -> int:
    return 1 + max(action.microbatch for order in orders for action in order)
