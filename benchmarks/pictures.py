"""Draws docs/images/ideas-*.svg, the pictures of docs/ideas-in-pictures.md, from the package's own accounts.

make pictures                          draws all of them
python benchmarks/pictures.py --check  changes nothing; exit code 1 if a picture differs from what would be drawn

Meshes, parts of parameters, schedules, bytes and seconds are those that the trainer and the planner compute with. Each
picture has its colours for light and dark pages; in all of them an axis has the same colour.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.sax.saxutils import escape

from omegaconf import OmegaConf

from titanlab.cli.compose import compose
from titanlab.costs import FSDP_AXES, Layout, add_tensor, gathered_part, kept_activations
from titanlab.distributed import Mesh, build_mesh
from titanlab.parallelism.context import owned
from titanlab.plan import for_planning, machine_of, most_memory, share_of
from titanlab.plan.block_time import _shaped, exposed, model_time, rows_of
from titanlab.plan.machine import Machine
from titanlab.plan.memory import as_compiled, block_bytes, edge_bytes, stored_pieces
from titanlab.plan.stages import Seen, block_operations
from titanlab.plan.step_time import step_time
from titanlab.prove.rank_trace import fake_world
from titanlab.recipe import Recipe, conf_folder
from titanlab.techniques.schedule.action import Kind
from titanlab.techniques.schedule.contract import PipelineSchedule, stages_of, timeline_of
from titanlab.techniques.schedule.plot import WORDS

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PUBLISHED = ROOT / "benchmarks" / "published" / "runs.csv"
GUIDE = ROOT / "benchmarks" / "results" / "layout_guide.json"
WIDTH = 880
HEAD, BODY, SMALL = 17, 14, 12.5
MARGIN = 24
# Name → colour on a light and on a dark page. The colours of Okabe and Ito, as in reports.
COLOURS = {
    "paper": ("#ffffff", "#14171b"),
    "ink": ("#22262b", "#e3e7ec"),
    "muted": ("#5c6570", "#a3adb8"),
    "line": ("#c3cad2", "#46515c"),
    "soft": ("#f1f3f5", "#20262c"),
    # Axes: FSDP2's shards, tensor, context, pipeline, expert.
    "shard": ("#0072b2", "#3d9ad6"),
    "shard-pale": ("#c6dff0", "#1f4a66"),
    "tensor": ("#e69f00", "#f0ad1f"),
    "tensor-pale": ("#fae3b0", "#5e4718"),
    "context": ("#009e73", "#1fbf92"),
    "context-2": ("#4fc0a0", "#117a5f"),
    "context-3": ("#93d9c4", "#0f5c49"),
    "context-4": ("#cdeee3", "#0e4538"),
    "pipeline": ("#b5578f", "#d98fb8"),
    "expert": ("#d55e00", "#ee7a2a"),
    "expert-pale": ("#f7cfb2", "#5f3414"),
    # Actions of a pipeline, as `titanlab schedule --plot` draws them.
    "forward": ("#a9cdee", "#8fbbe4"),
    "forward-2": ("#4a90d0", "#5590c9"),
    "backward": ("#b5dfae", "#9bd093"),
    "backward-2": ("#57a84f", "#66a95f"),
    "input": ("#c9bfe6", "#bfb2e4"),
    "input-2": ("#8d75c4", "#9480cc"),
    "weight": ("#fbd59a", "#ecc27f"),
    "weight-2": ("#ea9a2e", "#cf8f35"),
    # Items of memory, as in reports.
    "parameters": ("#0072b2", "#3d9ad6"),
    "gradients": ("#56b4e9", "#8accf2"),
    "optimizer": ("#009e73", "#1fbf92"),
    "activations": ("#e69f00", "#f0ad1f"),
    "logits": ("#cc79a7", "#d98fb8"),
    "none": ("#b3261e", "#ff938a"),
    # Text on a fill: on one that is light on both pages, and on one that is dark on a dark page.
    "on": ("#111111", "#111111"),
    "deep": ("#111111", "#ffffff"),
}


FONTS = (
    "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif}"
    ".code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}.empty{fill:none}"
)


def style_sheet(marks: str) -> str:
    """Rules for the classes of the marks: `f-NAME` fills, `s-NAME` strokes."""
    used = sorted(set(re.findall(r"\b([fs])-([\w-]+)", marks)))

    def rules(place: int) -> str:
        properties = {"f": "fill", "s": "stroke"}
        return "".join(f".{kind}-{name}{{{properties[kind]}:{COLOURS[name][place]}}}" for kind, name in used)

    return f"{FONTS}{rules(0)}@media screen and (prefers-color-scheme:dark){{{rules(1)}}}"


class Canvas:
    """The marks of one picture; sizes in pixels, y downwards."""

    def __init__(self, height: float) -> None:
        self.height = height
        self.marks: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = BODY,
        colour: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        at = f'x="{x:.5g}" y="{y:.5g}" font-size="{size:g}"'
        classes = f"f-{colour} code" if code else f"f-{colour}"
        end = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.marks.append(f'<text class="{classes}" {at}{end}{weight}>{escape(text)}</text>')

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "", *, edge: str = "", round_: float = 0
    ) -> None:
        classes = (f"f-{fill}" if fill else "empty") + (f" s-{edge}" if edge else "")
        corner = f' rx="{round_:g}"' if round_ else ""
        at = f'x="{x:.5g}" y="{y:.5g}" width="{max(0.0, width):.5g}" height="{height:.5g}"'
        self.marks.append(f'<rect class="{classes}" {at}{corner}/>')

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1, arrow: bool = False
    ) -> None:
        path = "M" + "L".join(f"{x:.5g} {y:.5g}" for x, y in points)
        head = ""
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            angle = math.atan2(y1 - y0, x1 - x0)
            ends = [(x1 - 8 * math.cos(angle + turn), y1 - 8 * math.sin(angle + turn)) for turn in (0.45, -0.45)]
            head = f"M{ends[0][0]:.5g} {ends[0][1]:.5g}L{x1:.5g} {y1:.5g}L{ends[1][0]:.5g} {ends[1][1]:.5g}"
        self.marks.append(f'<path class="empty s-{colour}" stroke-width="{width:g}" d="{path}{head}"/>')

    def heading(self, text: str, more: str = "") -> None:
        """The sentence of the picture, and the facts of what is drawn."""
        self.text(MARGIN, 36, text, size=HEAD, bold=True)
        if more:
            self.text(MARGIN, 58, more, size=SMALL, colour="muted")

    def legend(self, y: float, entries: Sequence[tuple[str, str]], *, x: float = MARGIN) -> None:
        """Squares with words, from left to right."""
        for fill, word in entries:
            self.box(x, y - 11, 13, 13, fill, round_=2)
            self.text(x + 19, y, word, size=SMALL)
            x += 19 + 7.4 * len(word) + 20


@dataclass(frozen=True)
class Picture:
    """A picture with what it says to those who do not see it."""

    name: str
    title: str
    description: str
    canvas: Canvas

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self.canvas.height:g}" viewBox="0 0 {WIDTH} {self.canvas.height:g}"'
        marks = f'<rect class="f-paper" width="{WIDTH}" height="{self.canvas.height:g}" rx="6"/>\n'
        marks += "\n".join(self.canvas.marks)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">\n'
            f'<title id="title">{escape(self.title)}</title>\n'
            f'<desc id="description">{escape(self.description)}</desc>\n'
            f"<style>{style_sheet(marks)}</style>\n{marks}\n</svg>\n"
        )


def planned(*arguments: str) -> tuple[Recipe, Machine]:
    """A recipe and its machine, as `titanlab plan --explain` takes them."""
    recipe = for_planning(compose(arguments)[0], stands=True)
    return recipe, machine_of(recipe)


# 1D to 4D

LAYOUTS = (
    ("1D", Layout(shard=16)),
    ("2D", Layout(shard=8, tensor=2)),
    ("2D", Layout(shard=8, context=2)),
    ("3D", Layout(shard=4, tensor=2, pipeline=2)),
    ("4D", Layout(shard=2, context=2, tensor=2, pipeline=2)),
    ("Experts", Layout(shard=16, expert=4)),
)


def mesh_of(layout: Layout) -> Mesh:
    with fake_world(0, layout.world, nccl=False):
        return build_mesh(layout, "cpu")


def coordinates(layout: Layout) -> Iterator[dict[str, int]]:
    """By rank, its number on every axis, read from the mesh that the trainer builds."""
    mesh = mesh_of(layout)
    names = mesh.root.mesh_dim_names or ()
    for rank in range(layout.world):
        (place,) = (mesh.root.mesh == rank).nonzero().tolist()
        own = dict(zip(names, place, strict=True))
        fsdp = own.pop(layout.fsdp_name)
        own |= {"fsdp": fsdp, FSDP_AXES[0]: fsdp // layout.context, FSDP_AXES[1]: fsdp % layout.context}
        if mesh.experts is not None:
            (place,) = (mesh.experts.mesh == rank).nonzero().tolist()
            own |= dict(zip(mesh.experts.mesh_dim_names or (), place, strict=True))
        yield {name: own.get(name, 0) for name in (*own, "expert", "expert_shard")}


def draw_device(canvas: Canvas, x: float, y: float, side: float, layout: Layout, own: dict[str, int]) -> None:
    """One GPU: the part of the model that it computes and the share that it stores, and below its tokens."""
    canvas.box(x, y, side, side, "soft", edge="line")
    width, height = side / layout.tensor, side / layout.pipeline
    left, top = x + own["tensor"] * width, y + own["pipeline"] * height
    if layout.expert > 1:
        height = side * 0.4
        share, part = side / layout.expert, side / layout.expert / layout.expert_shard
        canvas.box(x + own["expert"] * share, y + height, share, side - height, "expert-pale")
        begin = x + own["expert"] * share + own["expert_shard"] * part
        canvas.box(begin, y + height, part, side - height, "expert")
        canvas.line([(x, y + height), (x + side, y + height)], "line")
    canvas.box(left, top, width, height, "shard-pale")
    canvas.box(left + own["fsdp"] * width / layout.fsdp, top, width / layout.fsdp, height, "shard")
    if layout.tensor > 1:
        canvas.line([(x + side / 2, y), (x + side / 2, y + side)], "tensor", width=2.5)
    if layout.pipeline > 1:
        canvas.line([(x, y + side / 2), (x + side, y + side / 2)], "pipeline", width=2.5)
    canvas.box(x, y + side + 4, side, 8, "soft", edge="line")
    part = side / layout.context
    canvas.box(x + own["context"] * part, y + side + 4, part, 8, "context")
    canvas.text(x + side / 2, y + side + 25, f"{own['shard']}", size=SMALL, colour="muted", anchor="middle")


def axes() -> Picture:
    canvas = Canvas(784)
    canvas.heading(
        "Each axis divides something else: 16 GPUs under six layouts",
        "A square is one GPU with the model: layers from top to bottom, columns of each layer from left to right.",
    )
    side, pitch, panel = 36, 49, 436
    for number, (title, layout) in enumerate(LAYOUTS):
        x, y = MARGIN + number % 2 * panel, 92 + number // 2 * 208
        canvas.text(x, y, title, size=BODY, bold=True)
        begin = x + 9 * len(title) + 10
        canvas.text(begin, y, layout.label, size=SMALL, code=True)
        degrees = {"CP": layout.context, "TP": layout.tensor, "PP": layout.pipeline, "EP": layout.expert}
        words = " × ".join(["FSDP2", *(word for word, degree in degrees.items() if degree > 1)])
        canvas.text(x + pitch * 8 - pitch + side, y, words, size=SMALL, colour="muted", anchor="end")
        if layout.tensor > 1:
            for pair in range(8):
                begin, line = x + pair % 4 * 2 * pitch, y + 14 + pair // 4 * 82
                canvas.box(begin - 5, line - 4, pitch + side + 10, side + 34, edge="tensor", round_=5)
        for rank, own in enumerate(coordinates(layout)):
            draw_device(canvas, x + rank % 8 * pitch, y + 14 + rank // 8 * 82, side, layout, own)
    y = 716
    canvas.legend(y, [("shard-pale", "what a GPU computes with"), ("shard", "the share of it that it stores")])
    canvas.legend(y, [("context", "its part of a sequence, with the sequence's number")], x=468)
    canvas.legend(y + 24, [("expert-pale", "its experts"), ("expert", "the share that it stores")])
    for x, axis, words in ((356, "tensor", "tensor: columns are cut"), (588, "pipeline", "pipeline: layers are cut")):
        canvas.line([(x, y + 19), (x + 18, y + 19)], axis, width=3)
        canvas.text(x + 25, y + 24, words, size=SMALL)
    words = "A row of eight GPUs is a host: the tensor axis is innermost (framed), so that it stays inside a host."
    canvas.text(MARGIN, y + 50, words, size=SMALL, colour="muted")
    described = "; ".join(f"{title}: {layout.label}" for title, layout in LAYOUTS)
    return Picture(
        "ideas-axes",
        "The axes of parallelism, from 1D to 4D and with experts, on 16 GPUs",
        f"Six panels of 16 GPUs each. {described}. With FSDP2 every GPU computes with the whole model, stores a "
        "sixteenth of it and reads a sequence of its own. Tensor parallelism gives two neighbours one half of the "
        "columns of each layer and the same sequence. Context parallelism gives two neighbours one half of a sequence. "
        "A pipeline gives the first eight GPUs the first half of the layers. With experts each GPU has a quarter of "
        "the experts, of which it stores a quarter.",
        canvas,
    )


# FSDP2 against tensor parallelism


def linear_layer() -> Picture:
    recipe, _ = planned("+recipe=llama3_1_8b_8gpus", "cluster=h100")
    account, ranks, name = recipe.model.account(), 4, "layers.0.feed_forward.w1.weight"
    rows, columns = account.parameters[name]
    tokens = recipe.training.seq_len
    weight = math.prod(gathered_part(account, name, tensor=1, fsdp=ranks)) * 2
    part = math.prod(gathered_part(account, name, tensor=ranks, fsdp=1)) * 2
    hidden = tokens * account.dim * 2
    canvas = Canvas(474)
    canvas.heading(
        "FSDP2 moves weights to the tokens; tensor parallelism moves tokens to the weights",
        f"y = x·Wᵀ, feed_forward.w1 of 8B, {rows:,} × {columns:,}, bf16. "
        "Dark: stored on the GPU; pale: gathered for a moment.",
    )
    for number, (title, colour) in enumerate((("FSDP2", "shard"), ("Tensor parallelism", "tensor"))):
        x, is_tensor = MARGIN + number * 436, number == 1
        canvas.text(x, 96, title, size=BODY, bold=True)
        for place, word in ((56, "x: tokens"), (178, "W: weights"), (308, "y = x·Wᵀ")):
            canvas.text(x + place, 122, word, size=SMALL, colour="muted")
        for rank in range(ranks):
            y = 134 + rank * 62
            canvas.text(x, y + 29, f"GPU {rank}", size=SMALL)
            if not is_tensor:
                canvas.box(x + 56, y, 62, 48, "context")
                canvas.text(x + 87, y + 29, f"seq {rank}", size=SMALL, colour="on", anchor="middle")
            for piece in range(ranks):
                own = piece == rank
                # x: rows are tokens. W: columns of the picture are rows of the matrix.
                if is_tensor:
                    canvas.box(x + 56, y + piece * 12, 62, 12, "context" if own else "context-4", edge="paper")
                has = not is_tensor or own
                fill = (colour if own else f"{colour}-pale") if has else "soft"
                canvas.box(x + 178 + piece * 20, y, 20, 48, fill, edge="paper")
                canvas.box(x + 308 + piece * 20, y, 20, 48, "line" if has else "soft", edge="paper")
            canvas.text(x + 137, y + 30, "·", size=HEAD, anchor="middle")
            canvas.text(x + 283, y + 30, "=", size=HEAD, anchor="middle")
        lines = (
            (f"gathers W: {weight / 1e6:.0f} MB, however many tokens", "sends nothing of x; scatters W's gradient"),
            (
                f"gathers x: {hidden / 1e6:.0f} MB for {tokens:,} tokens",
                f"never has more of W than its {part / 1e6:.0f} MB; sums after the next layer",
            ),
        )[number]
        canvas.text(x, 404, lines[0], bold=True)
        canvas.text(x, 426, lines[1], size=SMALL)
    words = "The computation of many tokens hides FSDP2's gathers; tensor parallelism needs the fast links of a host."
    canvas.text(MARGIN, 456, words, size=SMALL, colour="muted")
    return Picture(
        "ideas-linear-layer",
        "One linear layer under FSDP2 and under tensor parallelism",
        "Left, FSDP2: each of four GPUs has a sequence of its own and stores a quarter of the weight; before the "
        f"product it gathers the whole weight, {weight / 1e6:.0f} MB. Right, tensor parallelism: each GPU has a "
        f"quarter of the tokens and of the weight; it gathers the tokens, {hidden / 1e6:.0f} MB, and computes a "
        "quarter of y.",
        canvas,
    )


# AsyncTP


@dataclass(frozen=True)
class Work:
    """Operations of a block that run one after another, and the collective before (`gather`) or after them (`sum`)."""

    label: str
    seconds: float
    collective: str = ""
    exchange: float = 0.0


def works(recipe: Recipe, machine: Machine) -> list[Work]:
    """The forward pass of a block under tensor parallelism."""
    shaped = _shaped(Seen(("picture",), recipe), machine)
    rows = rows_of(add_tensor, shaped.step, (shaped.facts.block,))
    counts = {row.kind: row.count for row in rows}
    each = {kind: seconds / counts[kind] for kind, seconds in shaped.tensor.items()}
    styles = {time.name: shaped.part.plan.style_of(f"{shaped.part.prefix}{time.name}") for time in shaped.times}
    sources = {operation.name: operation.keeps[0].name for operation in shaped.operations if operation.keeps}
    found: list[Work] = []
    read: dict[str, int] = {}
    for name, _, seconds, *_ in shaped.times:
        label = name.rpartition(".")[2]
        if styles[name] == "colwise" and sources[name] in read:
            # One gather serves all products that read it.
            first = found[read[sources[name]]]
            found[read[sources[name]]] = replace(first, label=f"{first.label} {label}", seconds=first.seconds + seconds)
        elif styles[name] == "colwise":
            read[sources[name]] = len(found)
            found.append(Work(label, seconds, "gather", each["all_gather"]))
        elif styles[name] == "rowwise":
            found.append(Work(label, seconds, "sum", each[shaped.step.scatter]))
        else:
            found.append(Work("attn" if label == "inner" else "", seconds))
    products = shaped.async_products
    for kind, times in (("gather", products.gathers), ("sum", products.sums)):
        assert math.isclose(sum(work.seconds for work in found if work.collective == kind), sum(times))
    return found


def async_tensor() -> Picture:
    recipe, machine = planned("+recipe=llama3_1_70b_256gpus", "cluster=h100", "precision=bf16")
    found, pieces = works(recipe, machine), recipe.layout.tensor
    together = [
        work.seconds + (exposed(work.seconds, work.exchange, machine) if work.exchange else 0) for work in found
    ]
    before, after = sum(work.seconds + work.exchange for work in found), sum(together)
    canvas = Canvas(344)
    canvas.heading(
        f"AsyncTP hides collectives behind products: {100 * (1 - after / before):.0f} % off a block's forward pass",
        f"Llama 3.1 70B, tensor parallelism over {pieces} H100, bf16, {recipe.microbatch} sequences of 8,192 tokens; "
        "estimated by the planner.",
    )
    left = MARGIN + 108
    scale = (WIDTH - MARGIN - 80 - left) / before
    for number, (title, total) in enumerate((("without", before), ("with AsyncTP", after))):
        y = 96 + number * 104
        canvas.text(MARGIN, y, title, bold=True)
        canvas.text(MARGIN, y + 27, "computes", size=SMALL, colour="muted")
        canvas.text(MARGIN, y + 57, "sends", size=SMALL, colour="muted")
        canvas.box(left, y + 12, total * scale, 22, "soft")
        canvas.box(left, y + 42, total * scale, 22, "soft")
        x = left
        for work, seconds in zip(found, together, strict=True):
            if number and work.exchange:
                width, sent = seconds * scale, x
                for piece in range(pieces):
                    canvas.box(x + piece * width / pieces, y + 12, width / pieces, 22, "forward", edge="paper")
                    canvas.box(x + piece * width / pieces, y + 42, width / pieces, 22, "tensor", edge="paper")
                x += width
            else:
                width, exchange = work.seconds * scale, work.exchange * scale
                sent = x if work.collective == "gather" else x + width
                x += exchange if work.collective == "gather" else 0
                if exchange:
                    canvas.box(sent, y + 42, exchange, 22, "tensor", edge="paper")
                canvas.box(x, y + 12, width, 22, "forward", edge="paper")
                if work.label and width > 8 * len(work.label):
                    canvas.text(x + width / 2, y + 27.5, work.label, size=SMALL, colour="on", anchor="middle")
                x += width + (exchange if work.collective == "sum" else 0)
        canvas.text(left + total * scale + 10, y + 43, f"{1e3 * total:.1f} ms", bold=True)
    canvas.legend(
        302,
        [
            ("forward", "products, attention, norms"),
            ("tensor", "all-gather before, reduce-scatter after a product"),
        ],
    )
    words = f"AsyncTP cuts both into {pieces} pieces: a product begins with the tokens that have arrived."
    canvas.text(MARGIN, 328, words, size=SMALL, colour="muted")
    return Picture(
        "ideas-async-tensor-parallel",
        "The forward pass of a block, without and with AsyncTP",
        f"Two timelines. Without AsyncTP four collectives and the products alternate: {1e3 * before:.1f} ms. With "
        f"AsyncTP products and collectives are cut into {pieces} pieces that run together: {1e3 * after:.1f} ms.",
        canvas,
    )


# Pipelines

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv")


def schedule_of(name: str) -> PipelineSchedule:
    arguments = ("parallelism=pp", "world=4", f"schedule={name}", "model.layers=8", "training.global_batch=8")
    schedule: PipelineSchedule = compose(arguments)[0].schedule
    return schedule


def schedules() -> Picture:
    ranks, microbatches = 4, 8
    canvas = Canvas(606)
    canvas.heading(
        "A schedule decides who waits, and how much a GPU keeps",
        "Four GPUs, each with a quarter of the layers; eight microbatches. A backward pass takes two forward passes.",
    )
    timelines = {name: timeline_of(schedule_of(name), ranks=ranks, microbatches=microbatches) for name in SCHEDULES}
    longest = max(timeline.duration for timeline in timelines.values())
    left = MARGIN + 62
    scale = (WIDTH - MARGIN - left) / longest
    facts = []
    for number, (name, timeline) in enumerate(timelines.items()):
        y = 92 + number * 118
        stages = len(timeline.placement) // ranks
        more = {1: ""}.get(stages, f" · {stages} stages a GPU")
        canvas.text(MARGIN, y, name, bold=True, code=True)
        peak = max(timeline.peak_in_flight)
        fact = f"idle {100 * timeline.bubble_share:.0f} % · keeps at most {peak:g} of {microbatches} microbatches{more}"
        facts.append(f"{name}: {fact}")
        canvas.text(MARGIN + 176, y, fact)
        for rank, events in enumerate(timeline.events):
            row = y + 9 + rank * 22
            canvas.text(MARGIN, row + 15, f"GPU {rank}", size=SMALL, colour="muted")
            canvas.box(left, row, longest * scale, 20, "soft")
            first = stages_of(timeline.placement, rank)[0]
            for action, begin, end in events:
                later = "" if action.stage == first else "-2"
                width = (end - begin) * scale
                canvas.box(left + begin * scale, row, width, 20, f"{WORD_OF[action.kind]}{later}", edge="paper")
                if width > 8:
                    middle = left + (begin + end) / 2 * scale
                    canvas.text(middle, row + 14.5, f"{action.microbatch}", size=SMALL, colour="on", anchor="middle")
    canvas.legend(588, [*((WORD_OF[kind], WORDS[kind]) for kind in Kind), ("soft", "idle")])
    canvas.text(WIDTH - MARGIN, 588, "darker: the GPU's later layers", size=SMALL, colour="muted", anchor="end")
    return Picture(
        "ideas-schedules",
        "Four schedules of a pipeline of four GPUs and eight microbatches",
        "Timelines with one row for each GPU. " + "; ".join(facts) + ".",
        canvas,
    )


WORD_OF = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.INPUT: "input", Kind.WEIGHT: "weight"}


# Ring attention


def ring() -> Picture:
    ranks = 4
    chunks, owner = 2 * ranks, {}
    for rank in range(ranks):
        for chunk in owned(rank, ranks):
            owner[chunk] = rank
    canvas = Canvas(470)
    canvas.heading(
        "Ring attention: queries stay, keys and values travel; every GPU has the same work",
        "Context parallelism over four GPUs: a sequence is cut into eight chunks; each GPU has one from each end.",
    )
    fills = ("context", "context-2", "context-3", "context-4")
    # The ring: a GPU passes its block to the GPU below it.
    cx, cy, radius = 186, 268, 98
    places = [(cx + radius * math.cos(angle), cy + radius * math.sin(angle)) for angle in
              (math.pi * (rank / 2 - 0.75) for rank in range(ranks))]  # fmt: skip
    for rank, (x, y) in enumerate(places):
        bx, by = places[rank - 1]
        length = math.hypot(bx - x, by - y)
        ux, uy = (bx - x) / length, (by - y) / length
        canvas.line([(x + 48 * ux, y + 34 * uy), (bx - 48 * ux, by - 34 * uy)], "context", width=2.5, arrow=True)
    for rank, (x, y) in enumerate(places):
        canvas.box(x - 44, y - 28, 88, 56, "paper", edge="context", round_=6)
        canvas.text(x, y - 9, f"GPU {rank}", bold=True, anchor="middle")
        for chunk in range(chunks):
            canvas.box(x - 36 + chunk * 9, y + 2, 9, 12, "context" if owner[chunk] == rank else "soft", edge="paper")
    canvas.text(cx, cy - 2, "keys and", size=SMALL, colour="muted", anchor="middle")
    canvas.text(cx, cy + 14, "values", size=SMALL, colour="muted", anchor="middle")
    side, left, top = 36, 500, 112
    canvas.text(left + side * chunks / 2, top - 12, "keys, by chunk", size=SMALL, colour="muted", anchor="middle")
    work = dict.fromkeys(range(ranks), 0)
    for row in range(chunks):
        canvas.text(left - 12, top + row * side + 23, f"GPU {owner[row]}", size=SMALL, anchor="end")
        for column in range(chunks):
            x, y = left + column * side, top + row * side
            if column > row:
                canvas.box(x, y, side, side, "soft", edge="paper")
                continue
            hop = (owner[column] - owner[row]) % ranks
            work[owner[row]] += 1
            canvas.box(x, y, side, side, fills[hop], edge="paper")
            canvas.text(x + side / 2, y + 23, f"{hop}", colour="deep" if hop else "on", anchor="middle")
    assert len(set(work.values())) == 1
    words = f"each GPU computes {work[0]} of the {sum(work.values())} squares"
    canvas.text(left + side * chunks / 2, top + side * chunks + 20, words, size=SMALL, anchor="middle")
    canvas.text(left - 62, top - 12, "queries", size=SMALL, colour="muted")
    canvas.legend(450, [(fill, "its own keys" if hop == 0 else f"after hop {hop}") for hop, fill in enumerate(fills)])
    canvas.legend(450, [("soft", "later tokens: never computed")], x=604)
    return Picture(
        "ideas-ring-attention",
        "Ring attention over four GPUs",
        "Left, a ring: each GPU passes keys and values to the GPU before it. Right, the causal matrix of queries and "
        "keys in eight chunks; a square says after how many hops it is computed. GPU 0 has the first and the last "
        f"chunk, GPU 3 the two in the middle, so that each computes {work[0]} squares.",
        canvas,
    )


# Activation checkpointing


def checkpointing() -> Picture:
    policies = ("none", "selective_op", "full")
    colours = {"none": "none", "selective_op": "muted", "full": "ink"}
    curves: dict[str, list[tuple[float, float]]] = {}
    for policy in policies:
        recipe, machine = planned("+recipe=llama3_1_8b_8gpus", "cluster=h100", f"ac={policy}", "training.microbatch=1")
        share = share_of(recipe)
        shape = (recipe.model, share, 1, recipe.training.seq_len)
        kinds, kind_of = block_bytes(recipe.ac, *shape, compiled=recipe.compile.fuses_blocks)
        times = model_time(recipe, machine)
        time, size, points = 0.0, 0.0, [(0.0, 0.0)]
        for number, kind in enumerate(kind_of):
            time += times.kinds[times.kind_of[number]].ahead
            size += kinds[kind].saved
            points.append((time, size))
        for number in reversed(range(len(kind_of))):
            block, kind = times.kinds[times.kind_of[number]], kinds[kind_of[number]]
            points.append((time + block.recomputed, size + kind.again))
            time += block.back
            size -= kind.saved
            points.append((time, size))
        curves[policy] = points
    canvas = Canvas(420)
    canvas.heading(
        "Checkpointing trades memory for time: what is not kept is computed again",
        "Activations of Llama 3.1 8B's blocks, one sequence of 8,192 tokens on an H100; estimated by the planner.",
    )
    left, top, width, height = MARGIN + 26, 98, 570, 254
    longest = max(points[-1][0] for points in curves.values()) * 1.02
    highest = math.ceil(max(size for points in curves.values() for _, size in points) / 5e9) * 5e9
    for tick in range(0, int(highest / 1e9) + 1, 5):
        y = top + height - tick * 1e9 / highest * height
        canvas.line([(left, y), (left + width, y)], "line")
        canvas.text(left - 8, y + 4, f"{tick}", size=SMALL, colour="muted", anchor="end")
    canvas.text(left + 4, top - 8, "GB of activations", size=SMALL, colour="muted")
    for tick in range(0, int(longest * 10) + 1, 2):
        x = left + tick / 10 / longest * width
        canvas.text(x, top + height + 18, f"{tick / 10:.1f}", size=SMALL, colour="muted", anchor="middle")
    words = "seconds: forward, then backward"
    canvas.text(left + width / 2, top + height + 40, words, size=SMALL, colour="muted", anchor="middle")
    base = curves["none"][-1][0]
    said = []
    for number, policy in enumerate(policies):
        points = curves[policy]
        peak, seconds = max(size for _, size in points), points[-1][0]
        spots = [(left + time / longest * width, top + height - size / highest * height) for time, size in points]
        canvas.line(spots, colours[policy], width=2.5)
        y = top + 26 + number * 76
        canvas.line([(left + width + 26, y - 5), (left + width + 46, y - 5)], colours[policy], width=3)
        canvas.text(left + width + 54, y, f"ac={policy}", bold=True, code=True)
        fact = (
            f"{peak / 1e9:.1f} GB · {100 * (seconds / base - 1):.0f} % more time" if number else f"{peak / 1e9:.1f} GB"
        )
        canvas.text(left + width + 54, y + 21, fact, size=SMALL)
        said.append(f"{policy}: {fact}")
    canvas.text(left + width + 54, top + 26 + 3 * 76, "The teeth of full: one block's", size=SMALL, colour="muted")
    canvas.text(left + width + 54, top + 26 + 3 * 76 + 17, "activations, made again", size=SMALL, colour="muted")
    return Picture(
        "ideas-checkpointing",
        "Memory of activations over a step, without and with checkpointing",
        "Three curves that rise in the forward pass and fall in the backward pass. " + "; ".join(said) + ".",
        canvas,
    )


# Memory by item

KEPT = {
    "hidden": "input of the block",
    "attention_norm": "norm before attention",
    "attention.rope_q": "queries",
    "attention.rope_k": "keys",
    "attention.wv": "values",
    "attention.inner": "output of attention",
    "attention.inner.lse": "denominators of attention",
    "attention_residual": "sum after attention",
    "ffn_norm": "norm before feed-forward",
    "feed_forward.w1": "output of w1",
    "feed_forward.w3": "output of w3",
    "feed_forward.mul": "silu(w1) · w3",
}


def memory() -> Picture:
    ranks = 8
    arguments = ("ac=none", "training.microbatch=1", "training.loss_chunk=0")
    recipe, _ = planned("+recipe=llama3_1_8b_8gpus", "cluster=h100", *arguments)
    share, seq_len = share_of(recipe), recipe.training.seq_len
    block = as_compiled(block_operations(recipe.model, 1, seq_len))
    kept = {each.name: share.bytes_of([each]) for each in kept_activations(block)}
    total = share.bytes_of(kept_activations(block))
    canvas = Canvas(470)
    canvas.heading(
        "Where a GPU's memory goes: inside one block, and over the whole model",
        f"Llama 3.1 8B, FSDP2 over {ranks} GPUs, one sequence of 8,192 tokens each, bf16, AdamW, ac=none, compiled.",
    )
    canvas.text(MARGIN, 96, f"One block: {total / 1e9:.2f} GB of activations", bold=True)
    # Statistics of norms, of less than a megabyte, are in the sum only.
    shown = sorted(((size, name) for name, size in kept.items() if size > 5e5), reverse=True)
    for number, (size, name) in enumerate(shown):
        y = 110 + number * 24
        canvas.text(MARGIN + 172, y + 14, KEPT[name], size=SMALL, anchor="end")
        width = size / shown[0][0] * 130
        canvas.box(MARGIN + 180, y, width, 18, "activations")
        canvas.text(MARGIN + 186 + width, y + 14, f"{size / 1e6:.0f} MB", size=SMALL)
    pieces = stored_pieces(recipe.model, recipe.precision, recipe.optimizer, 1, ranks)
    kinds, kind_of = block_bytes(recipe.ac, recipe.model, share, 1, seq_len, compiled=recipe.compile.fuses_blocks)
    edges, logits = edge_bytes(recipe.model, share, 1, seq_len), most_memory(recipe).items["logits and loss"]
    saved = iter(kinds[kind].saved for kind in kind_of)
    # Sharded gradients have the shapes and the precision of the stored parameters.
    columns = [
        {
            "parameters": piece.parameters,
            "gradients": piece.parameters,
            "optimizer": piece.optimizer,
            "activations": edges[name] if name in edges else next(saved),
            "logits": logits if name == recipe.model.account().head else 0,
        }
        for name, piece in pieces.items()
    ]
    left, bottom, height = 476, 386, 264
    whole = sum(sum(column.values()) for column in columns)
    canvas.text(left - 28, 96, f"{len(kind_of)} blocks, and the layers around them: {whole / 1e9:.0f} GB", bold=True)
    scale, pitch = height / 6e9, (WIDTH - MARGIN - left) / len(columns)
    for tick in range(7):
        canvas.line([(left, bottom - tick * 1e9 * scale), (WIDTH - MARGIN, bottom - tick * 1e9 * scale)], "line")
        canvas.text(left - 8, bottom - tick * 1e9 * scale + 4, f"{tick}", size=SMALL, colour="muted", anchor="end")
    for number, column in enumerate(columns):
        y = bottom
        for item, size in column.items():
            y -= size * scale
            canvas.box(left + number * pitch + 1, y, pitch - 2, size * scale, item)
    canvas.text(left, bottom + 18, "embedding", size=SMALL, colour="muted")
    canvas.text((left + WIDTH - MARGIN) / 2, bottom + 18, "blocks", size=SMALL, colour="muted", anchor="middle")
    canvas.text(WIDTH - MARGIN, bottom + 18, "norm, head", size=SMALL, colour="muted", anchor="end")
    canvas.text(left + 4, 116, "GB", size=SMALL, colour="muted")
    items = ("parameters", "gradients", "optimizer", "activations")
    canvas.legend(440, [*((item, item) for item in items), ("logits", "logits and loss")])
    words = "The states are a GPU's eighth. Gathered parameters and unreduced gradients come on top while they exist."
    canvas.text(MARGIN, 462, words, size=SMALL, colour="muted")
    return Picture(
        "ideas-memory",
        "Memory of one block by item, and of the whole model by layer",
        f"Left, what a block keeps for its backward pass, {total / 1e9:.2f} GB: "
        + ", ".join(f"{KEPT[name]} {size / 1e6:.0f} MB" for size, name in shown)
        + f". Right, {len(columns)} columns: embedding, blocks, last norm and head. In blocks activations are most; at "
        f"the head the logits and the loss, {logits / 1e9:.1f} GB.",
        canvas,
    )


# What each optimisation adds

STACKS = (
    ("stack_8b_128gpus", "Llama 3.1 8B on 128 GPUs", ("eager, bf16", "compiled", "float8 products", "float8 gathers")),
    ("stack_70b_256gpus", "Llama 3.1 70B on 256 GPUs", ("eager, bf16", "compiled", "float8 products", "AsyncTP")),
    ("stack_405b_512gpus", "Llama 3.1 405B on 512 GPUs", ("1F1B", "interleaved", "zero bubble")),
)


def steps_of(sweep: str) -> Iterator[tuple[Recipe, Machine]]:
    """The recipes of a sweep's stack, each with what the steps before it added."""
    config = OmegaConf.load(conf_folder() / "sweeps" / f"{sweep}.yaml")
    (recipe,) = (each["/recipe"] for each in config.defaults if "/recipe" in each)
    added: dict[str, str] = {}
    for step in config.hydra.sweeper.space.stack:
        added |= {str(key): str(value) for key, value in step.items()}
        yield planned(f"+recipe={recipe}", "cluster=h100", *(f"{key}={value}" for key, value in added.items()))


def published_gains() -> dict[tuple[str, str], float]:
    """By sweep and step, the gain over the step before, as tokens/s that others have measured."""
    with PUBLISHED.open(encoding="utf-8", newline="") as file:
        rate = {row["id"]: float(row["tps_per_gpu"]) for row in csv.DictReader(file) if row["id"] in ("4", "5", "6")}
    rows = json.loads(GUIDE.read_text(encoding="utf-8"))["measured"]
    of_70b = {row["async_tensor"]: row["measured"] for row in rows if row["recipe"] == "llama3_1_70b_256gpus"}
    of_405b = {row["schedule"]: row["measured"] for row in rows if row["recipe"] == "llama3_1_405b_512gpus"}
    return {
        ("stack_8b_128gpus", "compiled"): rate["5"] / rate["4"],
        # Published: products and gathers together.
        ("stack_8b_128gpus", "float8 gathers"): rate["6"] / rate["5"],
        ("stack_70b_256gpus", "AsyncTP"): of_70b[True] / of_70b[False],
        ("stack_405b_512gpus", "interleaved"): of_405b["interleaved_1f1b"] / of_405b["1f1b"],
    }


def stack() -> Picture:
    canvas = Canvas(574)
    canvas.heading(
        "What each optimisation adds on top of those before it",
        "Tokens/s of one H100 by the planner, for three sweeps of conf/; beside them the gains that others measured.",
    )
    gains, left, room = published_gains(), MARGIN + 132, 330
    canvas.text(left + room + 182, 92, "gain, estimated", size=SMALL, colour="muted", anchor="end")
    canvas.text(WIDTH - MARGIN, 92, "published", size=SMALL, colour="muted", anchor="end")
    y, said = 92, []
    for sweep, title, labels in STACKS:
        canvas.text(MARGIN, y, title, bold=True)
        canvas.text(MARGIN + 8.8 * len(title) + 6, y, sweep, size=SMALL, colour="muted", code=True)
        recipes = list(steps_of(sweep))
        rates = [step_time(recipe, machine).tokens_per_second for recipe, machine in recipes]
        y += 12
        for number, (label, rate) in enumerate(zip(labels, rates, strict=True)):
            canvas.text(left - 10, y + 17, label, size=BODY, anchor="end")
            width = rate / max(rates) * room
            if number:
                before = rates[number - 1] / max(rates) * room
                canvas.box(left, y + 2, before, 22, "line")
                canvas.box(left + before, y + 2, width - before, 22, "ink")
            else:
                canvas.box(left, y + 2, width, 22, "line")
            canvas.text(left + width + 8, y + 17, f"{rate:,.0f}", size=SMALL)
            if number:
                gain = f"+{100 * (rate / rates[number - 1] - 1):.0f} %"
                canvas.text(left + room + 182, y + 18, gain, bold=True, anchor="end")
                said.append(f"{title}, {label}: {gain}")
            if (sweep, label) in gains:
                canvas.text(WIDTH - MARGIN, y + 18, f"+{100 * (gains[sweep, label] - 1):.0f} %", anchor="end")
            y += 29
        y += 34
    for words in (
        "Published: pytorch/torchtitan@b5bcd76, H100 of 96 GB, other batches; 8B's +29 % is both float8 steps.",
        "405B with zero bubble needs 171 GB a GPU here, so it runs on GB200 only.",
    ):
        canvas.text(MARGIN, y - 12, words, size=SMALL, colour="muted")
        y += 20
    return Picture(
        "ideas-stack",
        "What each optimisation adds on top of the others, for 8B, 70B and 405B",
        "Bars of tokens per second of one GPU, each with the gain over the bar above it. " + "; ".join(said) + ".",
        canvas,
    )


def main(arguments: Sequence[str]) -> int:
    wrong = []
    for draw in PICTURES:
        picture = draw()
        path, text = IMAGES / f"{picture.name}.svg", picture.svg()
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            wrong.append(path.name)
    if wrong:
        print(f"not as benchmarks/pictures.py draws them: {', '.join(wrong)}; make pictures")
    return 1 if wrong else 0


PICTURES: Sequence[Callable[[], Picture]] = (
    *(axes, linear_layer, async_tensor, schedules),
    *(ring, checkpointing, memory, stack),
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
