"""Every option of every group has a price: it changes the estimate, or says why not.

The recipe's own dataclasses are walked, so that a new field or kind is tried without an edit here. A field that changes
no estimate declares `NOT_PRICED`, of which a plan says a line, or `OUTSIDE_STEP`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.plan.recipes import LLAMA_8B, SMALL, planned
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.parallelism import Parallelism
from titanlab.plan import for_planning, machine_of, most_memory, reserved_bytes
from titanlab.plan.machine import LIMITS
from titanlab.plan.search import not_priced
from titanlab.plan.step_time import step_time
from titanlab.ranges import declared_fields
from titanlab.recipe import Cluster, Recipe, Training, check_all_but_data
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.llama_schema import Mixtral
from titanlab.techniques.schedule.csv_schema import write_actions
from titanlab.techniques.schedule.published_schema import GPipe, OneFOneB

SHAPE = {"dim": 256, "layers": 8, "heads": 8, "kv_heads": 4, "ffn_dim": 768, "vocab_size": 2048}
B200 = Cluster(accelerator="cuda", device="NVIDIA B200", per_node=8)
EXPERTS = {**SHAPE, "experts": 8, "active_experts": 2}
CPU = Cluster(accelerator="cpu", device="cpu", per_node=8)
# Values of fields whose type does not say what they can be.
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "cluster.attention_tflops": ({f"{kernel} forward": 1.0 for kernel in ("flash", "cudnn", "efficient")},),
    "cluster.device": ("NVIDIA H200",),
    "cluster.efficiencies": tuple({name: limits[0]} for name, limits in LIMITS.items()),
    "compile.backend": ("aot_eager",),
    "parallelism.split": (("layers.1",),),
    "precision.emulate": ("true",),
    "schedule.file": ("1f1b.csv",),
    "precision.fp32_parts": (("norm", "output"),),
    "precision.reduce": ("bf16", "fp16"),
    "precision.skip": (("output", "wk"),),
    "ac.saved": (("aten.mm.default",),),
    "training.freeze": (("layers.0",),),
}


# What options cannot be without.
NEEDED: dict[str, dict[str, Any]] = {
    "model=llama": SHAPE,
    "model=qwen3": SHAPE,
    "model=mixtral": EXPERTS,
    "model=qwen3_moe": EXPERTS,
    "schedule=csv": {"file": "gpipe.csv"},
    "data=files": {"files": "corpus.txt"},
    "data=hf": {"path": "corpus"},
    "data=tokens": {"folder": "corpus"},
}


def recipes() -> Iterator[Recipe]:
    """Recipes in whose steps options take part."""
    some = {"training": Training(seq_len=2048, global_batch=64, microbatch=2)}
    compiled = {"compile": Compile(blocks=True, loss=True)}
    layouts: tuple[dict[str, Any], ...] = (
        {"shard": 8},
        {"shard": 2, "tensor": 4},
        {"shard": 4, "context": 2},
        {"shard": 4, "pipeline": 2},
        {"replicate": 2, "shard": 8, "reduce_gradients": "each"},
        {"shard": 8, "expert": 4},
    )
    for layout in layouts:
        for more in ({}, compiled):
            model = Mixtral(**EXPERTS) if "expert" in layout else SMALL
            recipe = planned(**some, **more, model=model, parallelism=Parallelism(**layout))
            yield dataclasses.replace(recipe, world=None)
    yield planned(**some, cluster=CPU, parallelism=Parallelism(shard=-1))
    yield planned(**some, **compiled, model=LLAMA_8B, cluster=B200)
    # The host of the small model is slower than its device, so that the time of communication changes nothing.
    for layout in ({"shard": 2, "tensor": 4}, {"shard": 4, "context": 2}):
        yield planned(**some, **compiled, model=LLAMA_8B, parallelism=Parallelism(**layout))


RECIPES = tuple(recipes())
OPTIONS = {
    f"{group}={kind}" if kind else group: option
    for group, kinds in discover().items()
    for kind, option in kinds.items()
    # Other tests plant options that do nothing.
    if option.schema.__module__.startswith("titanlab.")
}
GROUPS = {field.name: declared for field, declared in declared_fields(Recipe)}


@functools.cache
def estimate(recipe: Recipe) -> tuple[float, int, float] | None:
    """Seconds of a step, reserved bytes, and bytes of a device; None: a rule forbids the recipe."""
    try:
        resolved = for_planning(recipe, stands=True)
        check_all_but_data(resolved)
        machine = machine_of(resolved)
        reserved = reserved_bytes(resolved, machine, most_memory(resolved))
        return step_time(resolved, machine).seconds, reserved, machine.memory_bytes
    except ConfigError:
        return None


def other_values(key: str, field: dataclasses.Field[Any], declared: Mapping[str, Any], value: Any) -> list[Any]:
    """Other values of a field: examples, choices, or numbers near its own; a field of another type has none."""
    if key in EXAMPLES:
        values = list(EXAMPLES[key])
    elif "choices" in declared:
        values = list(declared["choices"])
    elif isinstance(value, bool):
        values = [not value]
    elif re.match("int|float", str(field.type)):
        number = int if "int" in str(field.type) else float
        near = [] if value is None else [2 * value, value / 2, value + 1]
        cure = re.findall(r"\d+(?:\.\d+)?", declared.get("cure", ""))
        values = [number(each) for each in (*near, *map(float, cure), 1, 2, 4, 1024)]
        values += [None] if "None" in str(field.type) else []
    else:
        values = []
    return [other for other in values if other != value]


def chosen(recipe: Recipe, name: str) -> Recipe:
    """The recipe with an option, such as `precision=fp16`, unless it has that kind."""
    option = OPTIONS[name]
    if type(getattr(recipe, option.group)) is option.schema:
        return recipe
    return dataclasses.replace(recipe, **{option.group: option.schema(**NEEDED.get(name, {}))})


def effects(name: str, field: dataclasses.Field[Any], declared: Mapping[str, Any], bases: Sequence[Recipe]) -> set[str]:
    """What changes of a field do: `changes` or `keeps` the estimate, is `said`, or is `refused` by the option itself.

    Args:
        name: of an option; empty: the field is the recipe's own.
    """
    found, group = set(), OPTIONS[name].group if name else ""
    key = f"{group}.{field.name}".removeprefix(".")
    for base in bases:
        recipe = chosen(base, name) if name else base
        config: Any = getattr(recipe, group) if name else recipe
        for other in other_values(key, field, declared, getattr(config, field.name)):
            try:
                changed = dataclasses.replace(config, **{field.name: other})
            except ConfigError:
                found.add("refused")
                continue
            after = dataclasses.replace(recipe, **{group: changed}) if name else changed
            if estimate(recipe) is not None and estimate(after) is not None:
                found.add("keeps" if estimate(recipe) == estimate(after) else "changes")
                if any(line.startswith(f"{key}=") for line in not_priced(after)):
                    found.add("said")
        if found & {"changes", "said"}:
            break
    return found


@pytest.fixture(autouse=True)
def lists_of_actions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The files that `schedule=csv` names here."""
    for schedule in (GPipe(), OneFOneB()):
        write_actions(tmp_path / f"{schedule.kind}.csv", schedule.actions(ranks=2, microbatches=8))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["", *OPTIONS])
def test_a_change_of_a_field_changes_the_estimate_or_is_said(name: str):
    group, wrong = OPTIONS[name].group if name else "", []
    for field, declared in declared_fields(OPTIONS[name].schema if name else Recipe):
        if field.name == "kind" or (not name and field.name in discover()):
            continue
        in_step = {**GROUPS.get(group, {}), **declared}.get("in_step", True)
        found = effects(name, field, declared, RECIPES if in_step else RECIPES[::4])
        if "not_priced" in declared:
            is_right = "said" in found
        elif in_step:
            # A field with one possible value cannot be changed.
            is_right = "changes" in found or found == {"refused"}
        else:
            is_right = not found & {"changes", "said"}
        wrong += [] if is_right else [f"{field.name}: {found or 'has no example here'}"]
    assert not wrong


KINDS = {name: option for name, option in OPTIONS.items() if option.kind is not None}


@pytest.mark.parametrize("name", KINDS)
def test_a_change_of_a_kind_changes_the_estimate(name: str):
    group, schema = KINDS[name].group, KINDS[name].schema
    found = set()
    for base in RECIPES:
        # The kind that the recipes have is compared with another one.
        others = [base, *(chosen(base, other) for other in KINDS if KINDS[other].group == group)]
        other = next(other for other in others if type(getattr(other, group)) is not schema)
        pair = estimate(chosen(base, name)), estimate(other)
        found |= set() if None in pair else {"changes" if pair[0] != pair[1] else "keeps"}
    assert "changes" in found if GROUPS[group].get("in_step", True) else found == {"keeps"}


@pytest.mark.parametrize("name", LIMITS)
def test_an_efficiency_changes_the_estimate(name: str):
    values = {"efficiencies": {name: sum(LIMITS[name]) / 2}}
    changed = [dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, **values)) for base in RECIPES]
    assert [estimate(recipe) for recipe in changed] != [estimate(recipe) for recipe in RECIPES]
