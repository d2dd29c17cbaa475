"""The communication of a rank in a step as a table: count and bytes by axis and kind of operation.

The bytes of an operation are those of its whole tensor:

- `all_reduce`, `broadcast`, `reduce`: the tensor;
- `all_gather`, `gather`: the output, with the parts of all ranks;
- `reduce_scatter`, `scatter`, `all_to_all`: the input;
- `send`, `recv`: the message.

Padding counts, since it is sent. The table also estimates the bytes that the rank itself sends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from titanlab.costs.layout import AXES, FOLD

# Bytes that a rank sends for each byte of the tensor, in units of (ranks − 1) / ranks, by the ring algorithms
# (Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). In an `all_to_all` a rank keeps its own part.
_RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
_RECEIVES = ("recv", "barrier")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The operations of one kind on one axis, of one rank in a step.

    Attributes:
        axis: the group's axis: an axis of the layout, `shard·context` if these share a group, or `world`.
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `recv`, ….
        count: number of operations.
        bytes: of their tensors.
        wire_bytes: bytes that the rank sends for them, by the ring algorithms.
    """

    axis: str
    kind: str
    count: int
    bytes: int
    wire_bytes: int


class Traffic:
    """Sums of operations by axis and kind."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[int]] = {}

    def add(self, axis: str, kind: str, size: int, *, ranks: int, times: int = 1, own: int | None = None) -> None:
        """Count operations.

        Args:
            size: bytes of one operation.
            ranks: size of the group. A group of one rank sends nothing, so it is not counted.
            times: number of equal operations.
            own: bytes of one `all_to_all` that the rank keeps; None: an equal part.
        """
        if ranks == 1 or times == 0:
            return
        sums = self._sums.setdefault((axis, kind), [0, 0, 0])
        sums[0] += times
        sums[1] += times * size
        sums[2] += times * (size - own if own is not None else wire_bytes(kind, size, ranks=ranks))

    def rows(self) -> list[Row]:
        """The rows of the table: axes from outermost to innermost, kinds in alphabetical order."""
        return sorted(
            (
                Row(axis=axis, kind=kind, count=count, bytes=size, wire_bytes=wire)
                for (axis, kind), (count, size, wire) in self._sums.items()
            ),
            key=lambda row: (_order(row.axis), row.axis, row.kind),
        )


def _order(axis: str) -> tuple[int, int]:
    """Sort key: axes from outermost to innermost, joint axes after their first axis, then the world, then others."""
    first, *others = axis.split(FOLD)
    names = (*AXES, "world")
    return (names.index(first) if first in names else len(names), len(others))


def wire_bytes(kind: str, size: int, *, ranks: int) -> int:
    """Bytes that each rank sends for an operation on `size` bytes, by the ring algorithm if the kind has one."""
    if kind in _RECEIVES:
        return 0
    return _RING[kind] * size * (ranks - 1) // ranks if kind in _RING else size


def lines(rows: Iterable[Row]) -> list[str]:
    """One line of text per axis: `shard: 12 all_gather 25.2 MB, 7 reduce_scatter 12.6 MB`."""
    by_axis: dict[str, list[str]] = {}
    for row in rows:
        by_axis.setdefault(row.axis, []).append(f"{row.count} {row.kind} {_readable(row.bytes)}")
    return [f"{axis}: {', '.join(parts)}" for axis, parts in by_axis.items()]


def flat(rows: Iterable[Row]) -> dict[str, int]:
    """The table as one mapping for trackers: `traffic/shard/all_gather_bytes` → bytes, and so on."""
    table = {}
    for row in rows:
        # In ASCII, for trackers and shells.
        key = f"traffic/{row.axis.replace(FOLD, '_')}/{row.kind}"
        table.update({f"{key}_count": row.count, f"{key}_bytes": row.bytes, f"{key}_wire_bytes": row.wire_bytes})
    return table


def _readable(size: int) -> str:
    """Bytes in decimal units: `40 B`, `25.2 MB`."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"
