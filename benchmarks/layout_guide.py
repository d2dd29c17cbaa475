"""Writes the tables of docs/choosing-a-layout.md: the planner's best layout of each number of dimensions.

python benchmarks/layout_guide.py            estimates, keeps benchmarks/results/layout_guide.json and writes the tables
python benchmarks/layout_guide.py --check    estimates and changes nothing; exit code 1 if the kept results or the page
                                             differ from what it would write
python benchmarks/layout_guide.py --page     writes the tables from the kept results

All estimates take some minutes on one core; no GPU takes part.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layout_guide_page

from titanlab.cli.compose import compose
from titanlab.cli.verbs import call
from titanlab.costs import Layout
from titanlab.plan import estimate_of, for_planning, machine_of, plan
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.ranking import Ranked, RecipeRanking
from titanlab.plan.space import LayoutSpace, choices_of
from titanlab.plan.step_time import step_time
from titanlab.recipe import Recipe
from titanlab.system import significant

HERE = Path(__file__).parent
RESULT = HERE / "results" / "layout_guide.json"
PAGE = HERE.parent / "docs" / "choosing-a-layout.md"
# Share of a device's memory that layouts of the guide may reserve: estimates of memory are off by 3 % in the median.
USABLE = 0.9
# Layouts of one kind whose times differ by less than this are equal: the simplest of them is shown.
EQUAL = 0.02
# Of how many layouts the simplest is looked for at most.
MOST = 64
EXAMPLE = "titanlab plan +recipe=llama3_1_8b_8gpus cluster=h100 --top 5"

# The first table: recipes as they stand, by model.
RECIPES: Sequence[tuple[str, str]] = (
    ("1B", "llama3_2_1b_8gpus"),
    ("3B", "llama3_2_3b_8gpus"),
    ("8B", "llama3_1_8b_8gpus"),
    ("8B", "llama3_1_8b_8gpus_guide"),
    ("8B", "llama3_8b_64gpus"),
    ("8B", "llama3_1_8b_128gpus"),
    ("8B", "llama3_1_8b_128gpus_float8"),
    ("13B", "llama2_13b_96gpus"),
    ("30B-A3B", "qwen3_moe_30b_a3b_8gpus"),
    ("30B-A3B", "qwen3_moe_30b_a3b_32gpus"),
    ("30B-A3B", "qwen3_moe_30b_a3b_128gpus"),
    ("70B", "llama3_1_70b_32gpus"),
    ("70B", "llama3_70b_128gpus"),
    ("70B", "llama3_1_70b_256gpus"),
    ("70B", "llama3_1_70b_2048gpus"),
    ("235B-A22B", "qwen3_moe_235b_a22b_512gpus"),
    ("405B", "llama3_1_405b_512gpus"),
    ("405B", "llama3_1_405b_2048gpus"),
)
# What changes on other machines: the planner's first for each.
MACHINES = ("a100_40gb", "a100_80gb", "h100_25gbe", "h100_100gbe", "h100", "h200", "b200", "gb200")
ON_MACHINES: Mapping[str, tuple[str, ...]] = {
    "8B, 64 GPUs": ("+recipe=llama3_1_8b_128gpus", "world=64", "training.global_batch=128"),
    "70B, 128 GPUs": ("+recipe=llama3_1_70b_256gpus", "precision=bf16", "world=128", "training.global_batch=256"),
    "405B, 512 GPUs": ("+recipe=llama3_1_405b_512gpus", "precision=bf16"),
}

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model at a fixed number of tokens a step.

    Attributes:
        title: for the page.
        recipe: arguments of `titanlab plan`.
        tokens: of a step.
        gpus: worlds.
        lengths: tokens of a sequence.
    """

    title: str
    recipe: tuple[str, ...]
    tokens: int
    gpus: Sequence[int]
    lengths: Sequence[int] = (8192, 32768, 131072)

    def arguments(self, seq_len: int, gpus: int) -> list[str]:
        """What a person would type after `titanlab plan` for one row."""
        batch = self.tokens // seq_len
        return [*self.recipe, f"world={gpus}", f"training.seq_len={seq_len}", f"training.global_batch={batch}"]


# AsyncTP as in the recipes with tensor parallelism; layouts without it leave it out. Whole logits, as in the published
# runs to which the planner's errors are known.
_PLAIN = ("cluster=h100", "precision=bf16", "parallelism.async_tensor=true", "training.loss_chunk=0")
STUDIES = {
    "8b": Study(
        title="Llama 3.1 8B",
        recipe=("+recipe=llama3_1_8b_128gpus", *_PLAIN),
        tokens=4_194_304,
        gpus=(8, 64, 512, 4096),
    ),
    "70b": Study(
        title="Llama 3.1 70B",
        recipe=("+recipe=llama3_1_70b_256gpus", *_PLAIN),
        tokens=8_388_608,
        gpus=(32, 128, 512, 4096),
    ),
    "405b": Study(
        title="Llama 3.1 405B",
        recipe=("+recipe=llama3_1_405b_512gpus", *_PLAIN),
        tokens=16_777_216,
        gpus=(256, 512, 2048, 4096),
    ),
}
# Rows that are estimated again with one thing changed.
CHANGED = (("8b", 131072, 64), ("70b", 8192, 128), ("405b", 8192, 512))
CHANGES: Mapping[str, tuple[str, ...]] = {
    "without AsyncTP": ("parallelism.async_tensor=false",),
    "float8 (tensorwise)": ("precision=float8_tensorwise",),
    "H200 (141 GB)": ("cluster=h200",),
}
# Published runs with more than one dimension, which the fit of the planner does not know: recipe, what is changed,
# tokens a second of one GPU. pytorch/torchtitan@b5bcd76, benchmarks/llama3_h100_202412_torchtitan.md, tables 4 to 6.
# Pipelines had as many microbatches as ranks, torchtitan's default then: 8 of 4 sequences at 8,192 tokens. That they
# used torch's flash attention is an assumption, as in the fit: no source names the kernel.
MEASURED: Sequence[tuple[str, tuple[str, ...], int]] = (
    ("llama3_1_70b_256gpus", ("parallelism.async_tensor=false",), 829),
    ("llama3_1_70b_256gpus", (), 876),
    ("llama3_1_405b_512gpus", ("schedule=1f1b", "training.microbatch=4"), 100),
    ("llama3_1_405b_512gpus", ("training.microbatch=4",), 128),
    ("llama3_1_405b_512gpus_131k", (), 31),
    ("llama3_1_405b_512gpus_262k", (), 16),
)


def kind_of(layout: Layout) -> str:
    """One of `layout_guide_page.KINDS`; empty: one axis alone that is not data parallel.

    Data parallelism is one dimension: `replicate`, `shard` and also `context`, over which FSDP2 shards. Each of tensor,
    pipeline and context is one more.
    """
    others = sum(degree > 1 for degree in (layout.tensor, layout.pipeline, layout.context))
    dimensions = others + (layout.data * layout.context > 1)
    if layout.pipeline > 1 and dimensions in (2, 3):
        return f"{dimensions}D with PP"
    # A single axis: data parallelism, or none of the kinds.
    return "" if dimensions == 1 and others else f"{dimensions}D"


class SpaceOfKind(LayoutSpace):
    """The layouts of a space that are of one kind."""

    kind = ""

    def layouts(self) -> list[Layout]:
        """See `Space.layouts`."""
        return [layout for layout in super().layouts() if kind_of(layout) == self.kind]


def row(arguments: Sequence[str]) -> dict[str, Values]:
    """The best layout of each kind."""
    (recipe,) = compose(arguments)
    recipe = for_planning(recipe)
    machine = machine_of(recipe)
    limit = machine.memory_bytes * USABLE
    found = {}
    for kind in layout_guide_page.KINDS:
        space = SpaceOfKind(recipe, per_node=machine.per_node, choices=choices_of(recipe))
        space.kind = kind
        ranking = RecipeRanking(space=space, machine=machine, limit=limit)
        near = _near(ranking)
        found[kind] = _values(min(near, key=_simplicity)) if near else _nothing(ranking)
    return found


def _near(ranking: RecipeRanking) -> list[Ranked]:
    """The fastest layout and those that are as fast, at most `MOST`."""
    count = MOST // 8
    while True:
        best = ranking.best(count)
        near = [one for one in best if one.time.seconds <= (1 + EQUAL) * best[0].time.seconds]
        if len(near) < count or count >= MOST:
            return near
        count *= 8


def _simplicity(one: Ranked) -> tuple[int, int, int, str]:
    """Fewest processes that share a model, then fewest stages of a rank, then least memory."""
    layout = one.recipe.layout
    stages = one.point.schedule.value.stage_count(ranks=1) if layout.pipeline > 1 else 0
    return layout.tensor * layout.context * layout.pipeline, stages, one.reserved, one.point.schedule.name


def _values(one: Ranked) -> Values:
    shares = {name: round(seconds / one.time.seconds, 3) for name, seconds in one.time.parts.items()}
    return {
        "layout": one.recipe.layout.label,
        "schedule": one.point.schedule.name,
        "microbatch": one.point.microbatch,
        "ac": one.point.ac.name,
        "reserved_gb": round(one.reserved / 1e9, 1),
        "step_seconds": float(significant(one.time.seconds, 4)),
        "tokens_per_second": float(significant(one.time.tokens_per_second, 4)),
        "parts": {name: share for name, share in shares.items() if share},
    }


def _nothing(ranking: RecipeRanking) -> Values:
    """Why there is no layout of a kind."""
    if ranking.least is not None:
        return {"none": f"≥ {ranking.least[0] / 1e9:,.0f} GB"}
    batch, world = ranking.space.recipe.training.global_batch, ranking.space.world
    return {"none": "too few sequences" if batch < world else "no legal layout"}


def results(report: Callable[[str], None]) -> Values:
    """All rows of all studies, what is changed of some, and the runs that were measured."""
    found: Values = {"studies": {}, "changes": []}
    for name, study in STUDIES.items():
        rows = found["studies"][name] = []
        for seq_len in study.lengths:
            for gpus in study.gpus:
                report(f"{study.title}, {seq_len:,} tokens, {gpus:,} GPUs")
                best = row(study.arguments(seq_len, gpus))
                rows.append({"seq_len": seq_len, "sequences": study.tokens // seq_len, "gpus": gpus, "best": best})
    for name, seq_len, gpus in CHANGED:
        study = STUDIES[name]
        arguments, place = study.arguments(seq_len, gpus), f"{study.title}, {seq_len:,} tokens, {gpus:,} GPUs"
        own = next(one for one in found["studies"][name] if (one["seq_len"], one["gpus"]) == (seq_len, gpus))
        found["changes"].append({"row": place, "change": "", "best": own["best"]})
        for change, values in CHANGES.items():
            report(f"{place}, {change}")
            found["changes"].append({"row": place, "change": change, "best": row(changed(arguments, values))})
    found["measured"] = [estimated(*run) for run in MEASURED]
    report("recipes as they stand, and other machines")
    found["recipes"] = [as_it_stands(*each) for each in RECIPES]
    found["machines"] = {
        case: {cluster: on_machine(arguments, cluster) for cluster in MACHINES}
        for case, arguments in ON_MACHINES.items()
    }
    found["command"] = EXAMPLE
    found["example"] = example()
    return found


def changed(arguments: Sequence[str], values: Sequence[str]) -> list[str]:
    """Arguments with some of them replaced."""
    keys = {value.partition("=")[0] for value in values}
    return [*(given for given in arguments if given.partition("=")[0] not in keys), *values]


def estimated(recipe: str, values: Sequence[str], measured: int) -> Values:
    """A recipe as it stands, on the GPUs of the published runs."""
    (composed,) = compose([f"+recipe={recipe}", "cluster=h100_96gb", "model.attention=flash", *values])
    composed = for_planning(composed, stands=True)
    time = step_time(composed, machine_of(composed), pipeline=simulated_time)
    return {
        "recipe": recipe,
        "layout": composed.layout.label,
        "schedule": composed.schedule.kind if composed.layout.pipeline > 1 else "",
        "async_tensor": composed.parallelism.async_tensor,
        "seq_len": composed.training.seq_len,
        "measured": measured,
        "tokens_per_second": float(significant(time.tokens_per_second, 3)),
    }


def as_it_stands(model: str, name: str) -> Values:
    """A recipe with its estimates, and the planner's first for its GPUs and batch."""
    (composed,) = compose([f"+recipe={name}", "cluster=h100"])
    own = for_planning(composed, stands=True)
    machine = machine_of(own)
    time, run = step_time(own, machine, pipeline=simulated_time), estimate_of(own)
    assert run is not None
    return {
        "model": model,
        "recipe": name,
        "gpus": own.layout.world,
        "precision": own.precision.kind,
        "layout": own.layout.label,
        "tokens_per_second": float(significant(time.tokens_per_second, 4)),
        "mfu": round(time.mfu, 3),
        "reserved_gb": round(run.reserved_bytes / 1e9, 1),
        "first": first_of(composed),
    }


def first_of(recipe: Recipe) -> Values:
    """The planner's first for the GPUs and the batch of a recipe; empty: nothing fits."""
    best = plan(for_planning(recipe), top=1).best
    return {**_values(best[0]), "mfu": round(best[0].time.mfu, 3)} if best else {}


def on_machine(arguments: Sequence[str], cluster: str) -> Values:
    (recipe,) = compose([*arguments, f"cluster={cluster}"])
    return first_of(recipe)


def example() -> str:
    """What the page's command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        call(EXAMPLE.split()[1:])
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def differences(kept: object, found: object, path: str = "") -> Iterator[str]:
    """Where two results differ, a line each."""
    if isinstance(kept, dict) and isinstance(found, dict) and kept.keys() == found.keys():
        for key in kept:
            yield from differences(kept[key], found[key], f"{path}/{key}")
    elif isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        for number, (one, other) in enumerate(zip(kept, found, strict=True)):
            yield from differences(one, other, f"{path}/{number}")
    elif kept != found:
        yield f"{path}: kept {kept}, estimated {found}"


def main() -> int:
    """Estimate, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--page", action="store_true", help="only write the tables, from the kept results")
    choice.add_argument("--check", action="store_true", help="estimate, compare, and change nothing")
    given = parser.parse_args()
    found = json.loads(RESULT.read_text()) if given.page else results(lambda line: print(line, flush=True))
    text = PAGE.read_text()
    written = layout_guide_page.page(text, found)
    if given.check:
        lines = list(differences(json.loads(RESULT.read_text()), found))
        if written != text:
            lines.append(f"{os.path.relpath(PAGE)} is not what these results make of it")
        print("\n".join(lines) or "nothing differs")
        return 1 if lines else 0
    RESULT.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
