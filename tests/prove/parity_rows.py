"""The layouts that are compared with one process: rows of the matrix in docs/parity.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cover import cover
from tests.planted_schema import Planted
from titanlab.costs import AXES, Layout
from titanlab.techniques.schedule.csv_schema import CsvSchedule
from titanlab.techniques.schedule.published_schema import (
    ZBV,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    InterleavedZeroBubble,
    LoopedBFS,
)

# What a layout and its reference have in common. With Adam's usual eps of 1e-8 an element whose gradient is nothing
# but rounding moves as far as any other, the other way in another layout; 1e-6 is still a thousandth of the usual
# element's gradient here. Nothing is saved: what is compared is what ranks tell.
COMMON = {"layers": 4, "steps": 5, "global_batch": 8, "seq_len": 32, "eps": 1e-6, "at_end": False}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.3},
    "uneven vocabulary": {"vocab_size": 257},
    "tied embeddings": {"tied_embeddings": True},
    "4 key/value heads": {"kv_heads": 4},
    # With two ranks of tensor parallelism each holds two key/value heads, and each of these serves two query heads.
    "8 heads share 4": {"heads": 8, "kv_heads": 4},
    "8 layers": {"layers": 8},
    "gaps in the labels": {"data": Planted(gaps=True)},
    # With fused projections, and sequences that are long enough for tiles of attention.
    "fused, in tiles": {"fused": True, "seq_len": 192},
}
# What the reference of a kind has instead.
REFERENCES: dict[str, dict[str, Any]] = {"fused, in tiles": {"fused": False, "attention": "flash"}}
SCHEDULES = {
    "gpipe": GPipe(),
    "interleaved_1f1b": Interleaved1F1B(),
    "looped_bfs": LoopedBFS(),
    "interleaved_zero_bubble": InterleavedZeroBubble(),
    "zbv": ZBV(),
    "dualpipe_v": DualPipeV(),
    "csv": CsvSchedule(file=str(Path(__file__).parents[1] / "schedule" / "zero_bubble_2x4.csv")),
}


@dataclass(frozen=True, eq=False)
class OnLayout:
    """What the rows of both matrices have in common.

    Attributes:
        given: degrees and other keys of `tests.tiny.recipe`; a schedule by name.
    """

    given: Mapping[str, Any]

    @property
    def layout(self) -> Layout:
        return Layout(**{axis: self.given.get(axis, 1) for axis in AXES})

    @property
    def label(self) -> str:
        """The name in a table: the layout, then every option that is not the default."""
        rest = [
            str(value) if name == "schedule" else f"{name}={value}"
            for name, value in self.given.items()
            if name not in AXES
        ]
        return ", ".join([self.layout.label, *rest])

    def options(self) -> list[str]:
        """What the row combines: its axes, its schedule and every other option of `given`."""
        axes = [axis for axis, degree in self.layout.degrees().items() if degree > 1]
        others = {name: value for name, value in self.given.items() if name not in AXES}
        # Where it is not an option of its own, the size of a microbatch follows from the layout.
        others = {name: True if name == "microbatch" else value for name, value in others.items()}
        if self.layout.pipeline > 1:
            others.setdefault("schedule", "1f1b")
        return [*axes, *(f"{name}={value}" for name, value in others.items())]

    def keys(self, common: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of `tests.tiny.recipe`; those of the row replace the common ones."""
        keys = {**common, **self.given}
        if self.layout.pipeline > 1:
            keys.setdefault("microbatch", 8 // self.layout.data // 4 or 1)
        if "schedule" in keys:
            keys["pipeline_schedule"] = SCHEDULES[keys.pop("schedule")]
        return keys


@dataclass(frozen=True, eq=False)
class Row(OnLayout):
    """One layout, with its other options.

    Attributes:
        kind: key of KINDS.
        always: also in `make test`: for each axis one row that has other options too, or is the cheapest.
    """

    kind: str = "plain"
    always: bool = False

    def options(self) -> list[str]:
        return [*super().options(), self.kind]

    def recipe_keys(self) -> dict[str, Any]:
        return self.keys({**COMMON, **KINDS[self.kind]})

    def reference_keys(self) -> dict[str, Any]:
        return {**COMMON, **KINDS[self.kind], **REFERENCES.get(self.kind, {})}


def _row(kind: str = "plain", *, always: bool = False, **given: Any) -> Row:
    return Row(given, kind, always)


ROWS = [
    # One axis.
    _row(shard=2),
    _row(shard=4),
    _row(replicate=2),
    _row(tensor=2),
    _row(tensor=2, sequence_parallel=False),
    _row(tensor=2, loss_parallel=False),
    _row("4 key/value heads", tensor=4),
    _row("8 heads share 4", tensor=2, always=True),
    _row(context=2, always=True),
    _row(context=2, context_method="all_gather"),
    _row(context=4),
    # Every schedule.
    _row(pipeline=2, schedule="gpipe"),
    _row(pipeline=2),
    _row(pipeline=2, schedule="interleaved_1f1b"),
    _row(pipeline=2, schedule="looped_bfs"),
    _row(pipeline=2, schedule="interleaved_zero_bubble"),
    _row(pipeline=2, schedule="zbv"),
    _row(pipeline=2, schedule="dualpipe_v"),
    _row(pipeline=2, schedule="csv"),
    _row("8 layers", pipeline=4),
    _row("8 layers", pipeline=4, schedule="interleaved_1f1b"),
    _row("8 layers", pipeline=4, schedule="zbv"),
    # All pairs.
    _row(replicate=2, shard=2),
    _row(shard=2, tensor=2),
    _row(shard=2, context=2),
    _row(pipeline=2, shard=2),
    _row(replicate=2, tensor=2),
    _row(replicate=2, context=2),
    _row(pipeline=2, replicate=2),
    _row(context=2, tensor=2),
    _row(pipeline=2, tensor=2),
    _row(pipeline=2, context=2),
    # Split backwards and several stages a process, with what they could disturb.
    _row(pipeline=2, shard=2, schedule="zbv", always=True),
    _row(pipeline=2, shard=2, schedule="interleaved_zero_bubble"),
    _row(pipeline=2, shard=2, schedule="dualpipe_v"),
    _row(pipeline=2, shard=2, schedule="zbv", reshard_after_forward="always"),
    _row(pipeline=2, tensor=2, schedule="interleaved_1f1b"),
    _row(pipeline=2, tensor=2, schedule="zbv"),
    _row(pipeline=2, context=2, schedule="interleaved_zero_bubble"),
    _row(pipeline=2, shard=2, split=[1, 3]),
    # All triples.
    _row(replicate=2, shard=2, tensor=2),
    _row(replicate=2, shard=2, context=2),
    _row(pipeline=2, replicate=2, shard=2),
    _row(replicate=2, context=2, tensor=2),
    _row(pipeline=2, replicate=2, tensor=2),
    _row(pipeline=2, replicate=2, context=2),
    _row(shard=2, context=2, tensor=2),
    _row(pipeline=2, shard=2, tensor=2),
    _row(pipeline=2, shard=2, context=2),
    _row(pipeline=2, context=2, tensor=2),
    # All four dimensions.
    _row(pipeline=2, shard=2, context=2, tensor=2),
    _row(pipeline=2, replicate=2, context=2, tensor=2, schedule="interleaved_1f1b"),
    # Accumulation, uneven and tied tables, clipping, labels that do not count.
    _row(shard=2, microbatch=2),
    _row(shard=2, tensor=2, microbatch=2),
    _row(context=2, tensor=2, microbatch=4),
    _row("uneven vocabulary", tensor=2),
    _row("uneven vocabulary", shard=2, tensor=2),
    _row("uneven vocabulary", tensor=2, loss_parallel=False),
    _row("tied embeddings", tensor=2, always=True),
    _row("tied embeddings", shard=2, tensor=2),
    _row("tied embeddings", shard=2, context=2),
    # The factor of clipping comes from the norm over all ranks: over those of each axis that cuts parameters.
    _row("clipped", shard=2, tensor=2, always=True),
    _row("clipped", pipeline=2),
    _row("clipped", pipeline=2, shard=2, tensor=2),
    _row("gaps in the labels", context=2, tensor=2),
    _row("gaps in the labels", pipeline=2, shard=2),
    _row("gaps in the labels", shard=2, tensor=2, microbatch=2),
    # Gradients are reduced after each microbatch.
    _row(shard=2, microbatch=1, reduce_gradients="each", always=True),
    _row(shard=4, microbatch=1, reduce_gradients="each"),
    _row(replicate=2, microbatch=2, reduce_gradients="each"),
    _row(replicate=2, shard=2, microbatch=1, reduce_gradients="each"),
    _row("clipped", shard=2, tensor=2, microbatch=2, reduce_gradients="each"),
    _row("tied embeddings", shard=2, context=2, microbatch=2, reduce_gradients="each"),
    _row("gaps in the labels", replicate=2, shard=2, tensor=2, microbatch=1, reduce_gradients="each"),
    _row(replicate=2, shard=2, context=2, microbatch=1, reduce_gradients="each"),
    _row(pipeline=2, shard=2, reduce_gradients="each"),
    _row(pipeline=2, shard=2, schedule="gpipe", reduce_gradients="each", reshard_after_forward="always"),
    _row(pipeline=2, shard=2, schedule="interleaved_1f1b", reduce_gradients="each"),
    _row(pipeline=2, replicate=2, shard=2, reduce_gradients="each"),
    _row(pipeline=2, shard=2, tensor=2, reduce_gradients="each"),
    _row("fused, in tiles", shard=2, microbatch=1, reduce_gradients="each", cpu_offload=True),
    # Held to one process whose projections are not fused and whose attention is not in tiles.
    _row("fused, in tiles"),
    _row("fused, in tiles", tensor=2, always=True),
    _row("fused, in tiles", tensor=2, sequence_parallel=False),
    _row("fused, in tiles", shard=2),
    _row("fused, in tiles", replicate=2, microbatch=2),
    _row("fused, in tiles", context=2),
    _row("fused, in tiles", pipeline=2),
    _row("fused, in tiles", pipeline=2, schedule="zbv"),
    _row("fused, in tiles", shard=2, tensor=2),
    _row("fused, in tiles", shard=2, context=2),
    _row("fused, in tiles", pipeline=2, shard=2, schedule="interleaved_zero_bubble"),
    _row("fused, in tiles", pipeline=2, tensor=2, schedule="zbv"),
    _row("fused, in tiles", replicate=2, context=2, tensor=2),
    _row("fused, in tiles", pipeline=2, shard=2, tensor=2),
]
ALWAYS = [row for row in ROWS if row.always]
COVERING = cover(ROWS, Row.options, always=ALWAYS, cost=lambda row: row.layout.world)
