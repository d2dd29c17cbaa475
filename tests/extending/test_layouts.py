"""The packages of docs/extending.md that change numbers train in each layout as in one process."""

import importlib
import os
import pickle
import sys
from dataclasses import replace

import pytest

from tests import tiny
from tests.extending.test_extending import install, sections
from titanlab.distributed import ALONE, joined
from titanlab.errors import ConfigError
from titanlab.prove import parity
from titanlab.techniques.model.llama_schema import Mixtral
from titanlab.techniques.schedule.published_schema import ZBV

BAR = 1e-5
COMMON = {"steps": 2, "global_batch": 8, "seq_len": 32, "at_end": False}
EXPERTS = {
    "model": Mixtral(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=64, vocab_size=256, experts=4, active_experts=2)
}
PACKAGES = {
    "A precision": ("precision", "rounded_weights.precision_schema", "RoundedWeights", {"bits": 2}),
    "An activation checkpointing policy": ("ac", "ac_offload.offload_schema", "Offload", {}),
    "An optimizer": ("optimizer", "lion.lion_schema", "Lion", {"lr": 1e-3}),
}
INSTALLED = ("rounded_weights", "ac_offload", "lion", "meanlm", "shallow_pipeline", "csvlog")
LAYOUTS = {
    "tensor": ({}, {"tensor": 2}),
    "fused": ({}, {"fused": True}),
    "fused, tensor, chunks": ({}, {"fused": True, "tensor": 2, "loss_chunk": 48}),
    "pipeline": ({}, {"pipeline": 2, "pipeline_schedule": ZBV()}),
    "pipeline, shard, compiled": ({}, {"pipeline": 2, "shard": 2, "pipeline_schedule": ZBV(), "backend": "aot_eager", "blocks": True}),
    "experts": (EXPERTS, {"shard": 2, "expert": 2}),
    "experts, tensor": (EXPERTS, {"tensor": 2}),
}  # fmt: skip
ALWAYS = [("A precision", layout) for layout in ("tensor", "fused", "pipeline", "experts")]
# The policy is for blocks that are not compiled.
EVERY = [
    (title, layout) for title in PACKAGES for layout in LAYOUTS if "activation" not in title or "comp" not in layout
]


def traced(site, pickled):
    """Trains with the packages in a folder."""
    sys.path.insert(0, site)
    try:
        made, run = pickle.loads(pickled)
        return parity.trace(made, run, joined(os.environ) or ALONE)
    finally:
        sys.path.remove(site)


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = (tmp_path / "site").resolve()
    for title in (*PACKAGES, "A model", "A schedule", "A tracker"):
        install(sections()[title].files, folder)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in INSTALLED]:
        del sys.modules[name]


def option_of(title):
    group, module, schema, given = PACKAGES[title]
    return {group: getattr(importlib.import_module(module), schema)(**given)}


@pytest.mark.parametrize(
    ("title", "layout"),
    [pytest.param(*row, marks=[] if row in ALWAYS else [pytest.mark.full], id=", ".join(row)) for row in EVERY],
)
def test_a_package_trains_as_in_one_process(pool, site, tmp_path, title, layout):
    common, given = LAYOUTS[layout]
    common = {**common, **({} if "model" in common else {"layers": 4})}
    common |= {} if title == "An optimizer" else {"eps": 1e-6}
    found = []
    for keys in ({}, given):
        made = tiny.recipe(tmp_path, **{**COMMON, **common, **option_of(title), **keys})
        pickled = pickle.dumps((made, tiny.begin(made)))
        found.append(pool.run(made.world, traced, str(site), pickled, limit_seconds=300.0)[0])
    difference = parity.compare(*found)
    # The sign of a gradient that is nothing but rounding differs, and the optimizer moves by it.
    numbers = (difference.loss, difference.grad_norm, difference.gradient[0])
    assert max(numbers) <= (BAR if title != "An optimizer" else 1e-4), difference
    if title == "A precision":
        plain = tiny.recipe(tmp_path, **{**COMMON, **common})
        exact = pool.run(1, traced, str(site), pickle.dumps((plain, tiny.begin(plain))))[0]
        # 2 bits change the gradients by more than a tenth: what is equal above is not fp32.
        assert parity.compare(exact, found[1]).gradient[0] > 0.1


def loaded(module, schema, **given):
    return getattr(importlib.import_module(module), schema)(**given)


def test_the_packages_of_a_model_and_a_schedule_train_in_a_pipeline(pool, site, tmp_path):
    model = loaded("meanlm.mean_schema", "Mean", width=64, depth=4, vocab_size=256)
    shallow = loaded("shallow_pipeline.shallow_schema", "Shallow")
    found = []
    for keys in ({}, {"pipeline": 2, "microbatch": 2, "pipeline_schedule": shallow}):
        made = tiny.recipe(tmp_path, **{**COMMON, "model": model, "eps": 1e-6, **keys})
        found.append(pool.run(made.world, traced, str(site), pickle.dumps((made, tiny.begin(made))))[0])
    difference = parity.compare(*found)
    assert max(difference.loss, difference.grad_norm, difference.gradient[0]) <= BAR, difference


@pytest.mark.parametrize(("axis", "what"), [("context", "attention"), ("tensor", "tensor")])
def test_a_model_that_names_neither_attention_nor_a_plan_is_not_cut(site, tmp_path, axis, what):
    model = loaded("meanlm.mean_schema", "Mean", width=64, depth=2, vocab_size=256)
    with pytest.raises(ConfigError, match=rf"^parallelism.{axis}=2: .*{what}"):
        tiny.recipe(tmp_path, model=model, **{axis: 2})


def trained(site, pickled):
    sys.path.insert(0, site)
    try:
        return tiny.as_rank(*pickle.loads(pickled)) and None
    finally:
        sys.path.remove(site)


def test_the_package_of_a_tracker_writes_each_row_once_in_two_ranks(pool, site, tmp_path):
    made = tiny.recipe(tmp_path, **{**COMMON, "log_every": 1, "shard": 2})
    made = replace(made, tracker=loaded("csvlog.csv_schema", "Csv"))
    run = tiny.begin(made)
    pool.run(2, trained, str(site), pickle.dumps((made, run)))
    assert [row.partition(",")[0] for row in (run.path / "rows.csv").read_text().splitlines()] == ["1", "2"]


def test_a_group_of_weights_is_not_cut(site, tmp_path):
    with pytest.raises(ConfigError, match=r"^parallelism.tensor=4: leaves each process 24 columns of .*w2"):
        tiny.recipe(tmp_path, tensor=4, kv_heads=4, ffn_dim=96, **option_of("A precision"))
