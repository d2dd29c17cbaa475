"""How the speed of a recipe grows with its devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titanlab.report.figures.records import records_of
from titanlab.sweep.comparison import groups

if TYPE_CHECKING:
    from pandas import DataFrame

    from titanlab.sweep.comparison import Group

# Recipes that agree in these differ in their layout only.
_ALIKE = (
    *("model", "layers", "dim", "seq_len", "precision", "ac", "compile", "optimizer", "data"),
    *("accelerator", "device"),
)
COLUMNS = (
    *("recipe", "layout.label", "world", "reference", "tokens_per_second", "tokens_per_second_all"),
    *("speedup", "efficiency_percent", "mfu_percent", "oversubscribed", "runs"),
)


def scaling_frame(runs: DataFrame, *, weak: bool = False) -> DataFrame:
    """One row for each recipe whose speed was measured, compared with the same recipe on fewer devices.

    The reference of a recipe is the fastest recipe (per device) on the smallest number of devices that differs from it
    in the layout only. `speedup` is the ratio of tokens per second of all devices, and `efficiency_percent` that of one
    device, in percent: 100 where twice the devices are twice as fast. Where there were more processes than cores,
    `oversubscribed` is true, and the speed says nothing about the layout.

    Args:
        runs: the frame of `titanlab.report.frames.sweep_frame`.
        weak: the batch grows with the devices: recipes are compared that have the same batch of one device. Otherwise
            they have the same global batch (strong scaling).

    Returns:
        Columns: `recipe`, `layout.label`, `world`, `reference` (its recipe), `tokens_per_second` of one device,
        `tokens_per_second_all`, `speedup`, `efficiency_percent`, `mfu_percent`, `oversubscribed`, `runs` (how many the
        medians are taken over).
    """
    import pandas as pd

    measured = [group for group in groups(records_of(runs)) if group.typical("tokens_per_second")]
    families: dict[tuple[Any, ...], list[Group]] = {}
    for group in measured:
        families.setdefault(_family(group.rows[0], weak=weak), []).append(group)
    rows = [row for members in families.values() for row in _rows(members)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _family(row: Mapping[str, Any], *, weak: bool) -> tuple[Any, ...]:
    batch = row["global_batch"] / row["world"] if weak else row["global_batch"]
    return (*(row[name] for name in _ALIKE), batch)


def _rows(members: Sequence[Group]) -> list[dict[str, Any]]:
    least = min(group.world for group in members)
    reference = max((group for group in members if group.world == least), key=lambda group: _speed(group))
    whole = _speed(reference) * reference.world
    return [
        {
            "recipe": group.label,
            "layout.label": group.layout,
            "world": group.world,
            "reference": reference.label,
            "tokens_per_second": _speed(group),
            "tokens_per_second_all": _speed(group) * group.world,
            "speedup": _speed(group) * group.world / whole,
            "efficiency_percent": 100 * _speed(group) / _speed(reference),
            "mfu_percent": group.typical("mfu_percent"),
            "oversubscribed": group.is_oversubscribed,
            "runs": len(group.values("tokens_per_second")),
        }
        for group in sorted(members, key=lambda group: group.world)
    ]


def _speed(group: Group) -> float:
    speed = group.typical("tokens_per_second")
    assert speed is not None
    return speed
