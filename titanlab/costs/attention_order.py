"""Attention kernels by device, from `attention_kernels.json`: which kernel to try first, and how fast each is."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("attention_kernels.json")
FUSED = ("flash", "cudnn", "efficient")
FLASH3 = "flash3"
"""FlashAttention 3: tried only if it was measured, because it is a separate package."""

Capability = tuple[int, int]


@dataclass(frozen=True)
class Rule:
    """The order in which to try the kernels for some inputs; the first rule that fits decides.

    Attributes:
        order: names of fused kernels, the fastest first.
        dtype: torch's name of the inputs' dtype; None: any.
        head_dim: width of a head; None: any.
        longest: tokens of the longest sequence; None: any.
    """

    order: tuple[str, ...]
    dtype: str | None = None
    head_dim: int | None = None
    longest: int | None = None
    source: str = ""

    def fits(self, dtype: str | None, head_dim: int | None, seq_len: int | None) -> bool:
        """Whether the rule applies to these inputs; a rule with a limit does not apply to an unknown value (None)."""
        is_alike = self.dtype in (None, dtype) and self.head_dim in (None, head_dim)
        return is_alike and (self.longest is None or (seq_len is not None and seq_len <= self.longest))


def order(
    name: str,
    capability: Capability | None,
    *,
    dtype: str | None = None,
    head_dim: int | None = None,
    seq_len: int | None = None,
    has_flash3: bool = False,
) -> tuple[str, ...]:
    """Names of fused kernels in the order in which to try them.

    Args:
        name: `auto`, or the requested kernel: `flash`, `flash3`, `cudnn`, `efficient`.
        dtype, head_dim, seq_len: those of the inputs; None: unknown.
        has_flash3: whether torch's flash kernel is FlashAttention 3 now, instead of 2.
    """
    if name != "auto":
        others = (other for other in FUSED if other != name and not (name == FLASH3 and other == "flash"))
        return (name, *others)
    rule = next(rule for rule in kernel_rules(capability) if rule.fits(dtype, head_dim, seq_len))
    return with_one_flash(rule.order, has_flash3=has_flash3)


def with_one_flash(names: Sequence[str], *, has_flash3: bool) -> tuple[str, ...]:
    """The order without the version of the flash kernel that is not active in torch."""
    if not has_flash3:
        return tuple(name for name in names if name != FLASH3)
    return tuple(dict.fromkeys(FLASH3 if name == "flash" else name for name in names))


def prefers_flash3(capability: Capability | None) -> bool:
    """Whether FlashAttention 3 was measured as the fastest for some inputs."""
    return any(rule.order[0] == FLASH3 for rule in kernel_rules(capability))


@dataclass(frozen=True)
class AttentionRates:
    """Rates of attention kernels of one kind of device.

    Attributes:
        shares: kernel → its causal FLOP/s, forward and backward, as shares of the device's peak in bfloat16.
        watts: the device's power limit while the rates were measured.
    """

    shares: Mapping[str, tuple[float, float]]
    watts: float


@functools.cache
def attention_rates(capability: Capability | None) -> AttentionRates:
    """The rates of devices with this major capability; if none are known, those of Hopper."""
    rows = json.loads(TABLE.read_text())["rates"]
    row = next((row for row in rows if capability is not None and row["capability"][0] == capability[0]), rows[0])
    shares = {name: (ahead / row["peak"], back / row["peak"]) for name, (ahead, back) in row["tflops"].items()}
    return AttentionRates(shares, row["watts"])


@functools.cache
def kernel_rules(capability: Capability | None) -> tuple[Rule, ...]:
    """The rules of a device; the last one fits all inputs."""
    return rules_of(json.loads(TABLE.read_text()), capability)


def rules_of(table: Mapping[str, Any], capability: Capability | None) -> tuple[Rule, ...]:
    """The rules for a device, made from a table.

    Args:
        table: `measured`: rows of `benchmarks/gpu_attention.py`; `published`: first kernel by major capability.
    """
    published = Rule(("flash", "cudnn", "efficient"), source="no measurement is known; torch's own first choice")
    for row in table["published"]:
        if capability is not None and row["capability"][0] == capability[0]:
            first = row["first"]
            published = Rule((first, *(name for name in FUSED if name != first)), source=row["source"])
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in table["measured"]:
        if capability is not None and row["capability"] is not None and tuple(row["capability"]) == capability:
            groups.setdefault((row["dtype"], row["head_dim"]), []).append(row)
    measured_rules = []
    for (dtype, head_dim), rows in groups.items():
        rows.sort(key=lambda row: int(row["seq_len"]))
        # Sequences up to the geometric mean of two measured lengths take the order of the shorter length.
        bounds = [math.isqrt(a["seq_len"] * b["seq_len"]) for a, b in zip(rows, rows[1:], strict=False)]
        for row, longest in zip(rows, [*bounds, None], strict=True):
            measured = {name: ms for name, ms in row["ms"].items() if ms is not None}
            fastest = sorted(measured, key=lambda name: float(measured[name]))
            names = (*fastest, *(name for name in published.order if name not in measured))
            measured_rules.append(Rule(names, dtype, head_dim, longest, row["source"]))
    return (*measured_rules, published)
