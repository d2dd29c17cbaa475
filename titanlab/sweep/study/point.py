"""A point of a sweep, and the short name of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titanlab.costs.layout import SHORT
from titanlab.records.run_name import safe_name

LENGTH = 60  # of a label, in characters
BASE = "base"
# Names of options that mean nothing without their group.
_VAGUE = ("none", "off", "full", "block", "default", "local")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value for each key of a sweep.

    Attributes:
        values: by key; an option by its group.
        repeat: number of the repetition.
        is_control: whether it is a run of the sweep's control.
    """

    values: Mapping[str, Any]
    repeat: int = 0
    is_control: bool = False

    @property
    def label(self) -> str:
        """The values in short, for the name of a folder: `fsdp_tp-bf16`, `tp8-seq_len4096`."""
        parts = [_part(key, value) for key, value in self.values.items() if key not in ("name", "repeat")]
        text = safe_name("-".join(parts), otherwise=BASE)
        return text[: LENGTH - len(self.suffix)].rstrip("-._") + self.suffix

    @property
    def suffix(self) -> str:
        """The number of the repetition; empty for the first, whose name so does not depend on later repeats."""
        return f"-r{self.repeat}" if self.repeat else ""


def _part(key: str, value: Any) -> str:
    group, _, rest = key.rpartition(".")
    if not group and isinstance(value, str):
        option = value.rpartition("/")[2]
        return f"{rest}_{option}" if option in _VAGUE else option
    if isinstance(value, bool):
        return rest if value else f"no_{rest}"
    short = SHORT.get(rest, rest)
    if isinstance(value, int | float):
        return f"{short}{value:g}" if isinstance(value, float) else f"{short}{value}"
    if isinstance(value, list):
        value = "x".join(map(str, value))
    return f"{short}_{'none' if value is None else value}"
