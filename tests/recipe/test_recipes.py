"""The named recipes: each fits its world, and every twin for a CPU trains as one process does.

The page docs/recipes.md shows them; `TITANLAB_WRITE_RECIPES=1 python -m pytest tests/recipe/test_recipes.py -k page` writes it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import re
from pathlib import Path
from typing import NamedTuple

import hydra
import pytest
import yaml
from omegaconf import OmegaConf

from tests import tiny
from tests.cover import marks
from tests.model.published import PARAMETERS
from tests.prove.replayed_routing import Record, recorded, replayed
from titanlab.costs import SHORT, training_flops_per_token
from titanlab.data import source
from titanlab.options import discover
from titanlab.parallelism import Parallelism
from titanlab.plan import estimate_of, for_planning, machine_of
from titanlab.plan.step_time import step_time
from titanlab.recipe import VERSION_BASE, Recipe, check, conf_folder, from_mapping, register, resolve, to_mapping
from titanlab.records import config_text

GPU = "NVIDIA H100 80GB HBM3"
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
CPU = "_cpu"
NAMES = sorted(path.stem for path in (conf_folder() / "recipe").glob("*.yaml"))
TWINS = [name for name in NAMES if name.endswith(CPU)]
LARGE = [name.removesuffix(CPU) for name in TWINS]
# What runs in `make test` too.
QUICK = "llama3_2_1b_8gpus_cpu"
# What runs in `make test-full`: the slowest, whose axes and techniques other twins have too.
SLOWEST = (
    "llama2_13b_64gpus_32k_cpu",
    "llama2_70b_128gpus_16k_cpu",
    "llama3_1_405b_2048gpus_cpu",
    "llama3_1_405b_2048gpus_guide_cpu",
    "llama3_1_405b_512gpus_131k_cpu",
    "llama3_1_70b_2048gpus_cpu",
    "llama3_1_70b_32gpus_guide_cpu",
    "llama3_1_70b_256gpus_131k_cpu",
    "llama3_1_70b_256gpus_cpu",
    "llama3_1_8b_256gpus_3d_cpu",
    "llama3_1_8b_256gpus_4d_cpu",
    "llama3_70b_128gpus_cpu",
    "qwen3_moe_235b_a22b_512gpus_cpu",
    "qwen3_moe_30b_a3b_128gpus_cpu",
)

# Parameters of each model as published.
OF_MODELS = {**PARAMETERS, "qwen3_moe_30b_a3b": 30_532_122_624, "qwen3_moe_235b_a22b": 235_093_634_560}
# What the comments of recipes offer for shorter contexts.
SHORTER = {
    "llama3_1_8b_8gpus_262k": [
        "training.seq_len=131072 parallelism.shard=2 parallelism.context=4 training.global_batch=2",
        "training.seq_len=32768 parallelism.shard=8 parallelism.context=1 training.global_batch=8",
    ],
    "llama3_1_405b_512gpus_262k": [
        "training.seq_len=65536 parallelism.shard=4 parallelism.context=2 training.global_batch=32",
        "training.seq_len=32768 parallelism.shard=8 parallelism.context=1 training.global_batch=64",
    ],
}
# Losses of three steps, relative to one process of the same precision. Products and sums in bf16 are rounded by up to 2⁻⁹
# in another order in another layout, of which a mean over hundreds of tokens keeps little: 1.2e-5 at most is measured.
# Float8 rounds to 2⁻⁴, and a scale is that of a rank's part where tensor parallelism has cut a matrix: 1.2e-4.
BANDS = {"bf16": 5e-5, "float8_tensorwise": 5e-4}
# Tensor parallelism adds partial sums that bf16 has rounded: 8.6e-5 is measured, and 6e-8 with the same layouts in fp32.
BANDS_OF_TENSOR = {"bf16": 3e-4, "float8_tensorwise": 5e-4}


def some_by_default(names):
    """In `make test` every third; `plan` of a page and the sweeps compose others."""
    return [pytest.param(name, marks=[pytest.mark.full] if place % 3 else []) for place, name in enumerate(names)]


@pytest.fixture(scope="module")
def composed():
    """Recipes by name, and what is changed of them on the command line, as `titanlab train` composes them."""
    register()
    with hydra.initialize_config_dir(str(conf_folder()), **VERSION_BASE):

        @functools.cache
        def compose(name: str, *overrides: str) -> Recipe:
            recipe = OmegaConf.to_object(hydra.compose("config", overrides=[f"+recipe={name}", *overrides]))
            assert isinstance(recipe, Recipe)
            return recipe

        yield compose


def on_gpus(recipe: Recipe) -> Recipe:
    return resolve(recipe, world=None, accelerator="cuda", device=GPU)


def on_cpu(recipe: Recipe) -> Recipe:
    return resolve(recipe, world=None, accelerator="cpu", device="cpu")


@pytest.fixture
def gpu_host(monkeypatch):
    """Rules may ask whether a GPU's packages are installed; this host needs none of them."""
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: known("torch" if name == "triton" else name, *more)
    )


@pytest.mark.parametrize("name", some_by_default(LARGE))
def test_a_recipe_fits_its_world(composed, gpu_host, name):
    given = composed(name)
    assert given.world is not None
    assert f"_{given.world}gpus" in name
    assert given.cluster.accelerator == "cuda"
    recipe = on_gpus(given)
    check(recipe)
    assert recipe.layout.world == given.world
    family = name.partition(f"_{given.world}gpus")[0]
    assert recipe.model.account().parameter_count == OF_MODELS[family]
    # A node that fails leaves a checkpoint behind.
    assert (recipe.checkpoint.kind, recipe.training.steps % recipe.checkpoint.every) == ("async", 0)
    assert recipe.checkpoint.keep >= 2
    assert 0 < recipe.checkpoint.every <= recipe.training.steps // 2
    for overrides in SHORTER.get(name, []):
        shorter = on_gpus(composed(name, *overrides.split()))
        check(shorter)
        assert shorter.layout.world == given.world


PLANNED = [
    name for name in LARGE if "\n# Planner (cluster=h100, " in (conf_folder() / "recipe" / f"{name}.yaml").read_text()
]
# Published on GPUs of 96 GB; and what their comments offer for 80 GB.
FOR_96_GB = {
    "llama3_1_405b_512gpus_131k": "parallelism.shard=1 parallelism.context=8",
    "llama3_1_405b_512gpus_262k": (
        "parallelism.shard=8 parallelism.context=32 parallelism.tensor=2 parallelism.pipeline=1"
    ),
}


@pytest.fixture(scope="module")
def estimated(composed):
    """Estimates of a recipe for nodes of eight GPUs: of one run, and the seconds of a step."""

    def estimates(recipe, cluster):
        # Every recipe with the same cluster: composing each of them again would take a second for three.
        known = composed("llama3_1_8b_8gpus", f"cluster={cluster}").cluster
        made = for_planning(dataclasses.replace(recipe, cluster=known), stands=True)
        return estimate_of(made), step_time(made, machine_of(made)).seconds

    return estimates


@pytest.mark.parametrize("name", [name for name in LARGE if name not in PLANNED])
def test_a_recipe_for_gpus_fits_by_the_planners_estimate(composed, estimated, name):
    recipe = composed(name)
    assert estimated(recipe, "h100")[0].fits is (name not in FOR_96_GB)
    if name in FOR_96_GB:
        assert estimated(recipe, "h100_96gb")[0].fits
        text = re.sub(r"\n# ", " ", text_of(name))
        assert "For GPUs of 96 GB" in text
        assert FOR_96_GB[name] in text
        smaller = composed(name, *FOR_96_GB[name].split())
        check(on_gpus(smaller))
        assert estimated(smaller, "h100")[0].fits


@pytest.mark.parametrize("name", some_by_default(PLANNED))
def test_what_a_recipe_says_of_the_planner_is_so(composed, estimated, name):
    """A layout that the planner chose or looked at leaves a tenth of the memory free."""
    text = re.sub(r"\n# ", " ", text_of(name))
    said = re.search(r"Planner \(cluster=h100, [0-9-]+\): ([0-9.]+) s a step, ([0-9]+) of 80 GB reserved[;,]", text)
    run, seconds = estimated(composed(name), "h100")
    assert float(said[1]) == pytest.approx(seconds, rel=0.05)
    assert float(said[2]) == pytest.approx(run.reserved_bytes / 1e9, rel=0.05)
    assert run.reserved_bytes <= 0.9 * 80e9


@pytest.mark.parametrize("name", LARGE)
def test_what_a_recipe_says_of_its_saves_is_so(composed, name):
    """They cost less than a hundredth of its time, and one is on the disks before the next one begins."""
    recipe = on_gpus(composed(name))
    account, world = recipe.model.account(), recipe.layout.world
    # Masters in fp32 and the optimizer's averages; of a step the least time: 60 % of the peak of an H100 in bf16.
    states = (6 if recipe.optimizer.kind == "adamw_8bit" else 12) * account.parameter_count
    flops = training_flops_per_token(account, seq_len=recipe.training.seq_len) * recipe.tokens_per_step
    between = recipe.checkpoint.every * flops / (world * 989e12 * 0.6)
    # Copied from each GPU at 2 GB/s, and written by each host of 8 at 1 GB/s.
    percent = 100 * states / world / 2e9 / between
    assert percent < 1
    assert states / (world / 8 * 1e9) < between / 2
    said = re.search(r": ([0-9.]+) % of at least ([0-9,]+) s between saves\.", text_of(name))
    assert float(said[1]) == pytest.approx(percent, rel=0.35)
    assert float(said[2].replace(",", "")) == pytest.approx(between, rel=0.05)


def text_of(name):
    return (conf_folder() / "recipe" / f"{name}.yaml").read_text()


def test_sweeps_that_measure_gpus_save_nothing():
    sweeps = [yaml.safe_load(path.read_text()) for path in (conf_folder() / "sweeps").glob("*.yaml")]
    begins = {each["sweep"]: [given["/recipe"] for given in each["defaults"] if "/recipe" in given] for each in sweeps}
    measuring = [each for each in sweeps if set(begins[each["sweep"]]) & set(LARGE)]
    assert len(measuring) == 10
    assert {each["sweep"]: each["checkpoint"] for each in measuring} == {
        each["sweep"]: {"every": 0, "at_end": False} for each in measuring
    }


# Twins have values of the same types.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in TWINS else []) for name in NAMES]
)
def test_a_recipe_is_read_as_it_was_written(composed, name):
    recipe = composed(name)
    assert recipe.name == name
    assert repr(from_mapping(yaml.safe_load(config_text(to_mapping(recipe))))) == repr(recipe)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_a_group_goes_with_a_recipe(name):
    """A value that only some options of a group have would refuse the others on the command line."""
    given = yaml.safe_load((conf_folder() / "recipe" / f"{name}.yaml").read_text())
    # The sizes of a model are its own.
    for group, kinds in discover().items():
        if group != "model" and None not in kinds:
            shared = set.intersection(
                *({each.name for each in dataclasses.fields(kind.schema)} for kind in kinds.values())
            )
            assert set(given.get(group, {})) <= shared


def test_another_corpus_goes_with_a_recipe(composed):
    assert composed("llama3_1_8b_128gpus", "data=tokens", "data.folder=tokens").data.folder.endswith("tokens")


def test_tables_have_every_recipe():
    assert set(NAMES) == {"quickstart", *LARGE, *TWINS}


@pytest.mark.parametrize("name", some_by_default(TWINS))
def test_a_twin_has_the_shape_of_its_recipe(composed, gpu_host, name):
    large, twin = on_gpus(composed(name.removesuffix(CPU))), on_cpu(composed(name))
    check(twin)
    assert twin.cluster.accelerator == "cpu"
    assert twin.layout.world <= 16
    degrees = [{**each.layout.degrees(), "expert": each.layout.expert} for each in (large, twin)]
    axes = [{axis for axis, degree in of_one.items() if degree > 1} for of_one in degrees]
    assert axes[0] == axes[1]
    assert set(degrees[1].values()) <= {1, 2, 4}
    for group in ("precision", "ac", "schedule"):
        assert getattr(twin, group) == getattr(large, group)
    assert twin.optimizer.kind == large.optimizer.kind
    assert (twin.compile.blocks, twin.compile.loss) == (large.compile.blocks, large.compile.loss)
    assert (
        dataclasses.replace(
            twin.parallelism, async_tensor=large.parallelism.async_tensor, expert=large.parallelism.expert
        ).with_degrees(large.layout.degrees())
        == large.parallelism
    )
    own = ["dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size"]
    own += ["head_dim", "experts", "active_experts"] if large.model.account().experts is not None else []
    assert dataclasses.replace(twin.model, **{key: getattr(large.model, key) for key in own}) == large.model
    # The pipeline has at least as many microbatches as stages, like the large one.
    if twin.layout.pipeline > 1:
        assert min(twin.microbatches // twin.layout.pipeline, large.microbatches // large.layout.pipeline) >= 1


def short(recipe: Recipe, folder: Path) -> Recipe:
    """Three steps of a twin."""
    schedule = dataclasses.replace(recipe.optimizer.schedule, warmup_steps=1)
    return dataclasses.replace(
        recipe,
        runs=str(folder),
        training=dataclasses.replace(recipe.training, steps=3, log_every=1),
        optimizer=dataclasses.replace(recipe.optimizer, schedule=schedule),
        checkpoint=dataclasses.replace(recipe.checkpoint, at_end=False),
        # A peak that is given need not be measured.
        cluster=dataclasses.replace(recipe.cluster, device="cpu", peak_tflops=1.0),
    )


class Alone(NamedTuple):
    """Losses of one process; with experts, what its routers have chosen."""

    losses: list[float]
    record: Record | None


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """Losses of one process and its routing; twins that differ in their layout only share them."""
    known = {}

    def trained(recipe):
        single = dataclasses.replace(
            recipe,
            name="alone",
            world=1,
            parallelism=Parallelism(),
            training=dataclasses.replace(recipe.training, microbatch=None),
            # Compiled blocks are held to eager ones elsewhere (tests/compile).
            compile=dataclasses.replace(recipe.compile, blocks=False, loss=False),
        )
        key = repr(dataclasses.replace(single, runs="", schedule=None))
        if key not in known:
            made = on_cpu(dataclasses.replace(single, runs=str(tmp_path_factory.mktemp("alone"))))
            if made.model.account().experts is None:
                known[key] = Alone(pool.run(1, tiny.traced, made, tiny.begin(made))[0].losses, None)
            else:
                trace, record = pool.run(1, recorded, made, tiny.begin(made))[0]
                known[key] = Alone(trace.losses, record)
        return known[key]

    return trained


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=marks(name, always=[], covering={*TWINS} - {*SLOWEST})) for name in TWINS],
)
def test_a_twin_trains_as_one_process(pool, composed, alone, tmp_path, name):
    made = on_cpu(short(composed(name), tmp_path))
    source.prepare(made.data, report=lambda line: None)
    reference = alone(made)
    # With experts the routing of one process is replayed: rounding in another order chooses others for some tokens.
    run = (tiny.traced, made, tiny.begin(made)) if reference.record is None else (
        replayed, made, tiny.begin(made), reference.record
    )  # fmt: skip
    every = pool.run(made.world, *run, limit_seconds=300.0)
    losses = every[0].losses
    assert len(losses) == 3
    assert all(each.losses == losses for each in every)
    assert losses[2] < losses[0]
    bands = BANDS_OF_TENSOR if made.layout.tensor > 1 else BANDS
    assert losses == pytest.approx(reference.losses, rel=bands[made.precision.kind])


# The page


def test_the_page_shows_these_recipes(composed, gpu_host):
    text = page(composed)
    if os.environ.get("TITANLAB_WRITE_RECIPES") == "1":
        PAGE.write_text(text)
    assert PAGE.read_text() == text


def page(composed) -> str:
    """docs/recipes.md with its two tables as the recipes are; the words around them stay."""
    before, _, rest = PAGE.read_text().partition("<!-- large -->\n")
    between, _, after = rest.partition("<!-- large end -->\n")[2].partition("<!-- twins -->\n")
    after = after.partition("<!-- twins end -->\n")[2]
    large = [
        "| `+recipe=` | GPUs | layout | sequence | sequences a step | tokens a step | precision | ac | schedule | AsyncTP | source |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(row(name, on_gpus(composed(name))) for name in sorted(LARGE, key=order)),
    ]
    twins = [
        "| `+recipe=` | processes | layout | precision | ac | schedule |",
        "|---|---|---|---|---|---|",
        *(twin_row(name + CPU, on_cpu(composed(name + CPU))) for name in sorted(LARGE, key=order)),
    ]
    return (
        f"{before}<!-- large -->\n" + "\n".join(large) + "\n<!-- large end -->\n"
        f"{between}<!-- twins -->\n" + "\n".join(twins) + f"\n<!-- twins end -->\n{after}"
    )


def order(name: str) -> tuple[bool, bool, int, int, str]:
    family = next(each for each in OF_MODELS if name.startswith(each))
    return (
        name.startswith(("llama2", "qwen3")),
        name.startswith("qwen3"),
        OF_MODELS[family],
        int(name.partition("gpus")[0].rpartition("_")[2]),
        name,
    )


def row(name: str, recipe: Recipe) -> str:
    cells = [
        f"`{name}`",
        f"{recipe.world:,}",
        label(recipe),
        f"{recipe.training.seq_len:,}",
        f"{recipe.training.global_batch:,}",
        f"{recipe.tokens_per_step:,}",
        recipe.precision.kind,
        recipe.ac.kind,
        recipe.schedule.kind if recipe.layout.pipeline > 1 else "",
        "yes" if recipe.parallelism.async_tensor else "",
        origin(name),
    ]
    return "| " + " | ".join(cells) + " |"


def twin_row(name: str, recipe: Recipe) -> str:
    schedule = recipe.schedule.kind if recipe.layout.pipeline > 1 else ""
    cells = [f"`{name}`", str(recipe.world), label(recipe), recipe.precision.kind, recipe.ac.kind, schedule]
    return "| " + " | ".join(cells) + " |"


def label(recipe: Recipe) -> str:
    degrees = recipe.layout.degrees()
    experts = [f"ep {recipe.layout.expert}"] if recipe.layout.expert > 1 else []
    return " ".join([*(f"{short} {degrees[axis]}" for axis, short in SHORT.items() if degrees[axis] > 1), *experts])


def origin(name: str) -> str:
    """What the recipe's comments name as its source."""
    lines = (conf_folder() / "recipe" / f"{name}.yaml").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("# Source: "))
    end = next(number for number in range(start, len(lines)) if not lines[number].startswith("#"))
    return " ".join(line.removeprefix("#").strip() for line in lines[start:end]).removeprefix("Source: ")
