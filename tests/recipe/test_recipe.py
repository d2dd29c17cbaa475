"""Recipes: written and read back unchanged, resolved for where they run, and held to every rule."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import pickle
from dataclasses import replace

import hydra
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests import tiny
from tests.refusals import refusal
from titanlab.costs import AXES
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.ranges import plain
from titanlab.recipe import (
    VERSION_BASE,
    Recipe,
    check,
    conf_folder,
    from_mapping,
    register,
    resolve,
    schema_node,
    to_mapping,
)
from titanlab.records import config_text, identify

GROUPS = sorted(discover())
# What an option cannot do without, so that every one composes.
NEEDED = {
    "files": ["data.files=corpus.txt"],
    "tokens": ["data.folder=tokens"],
    "hf": ["data.path=some/data"],
    "csv": ["schedule.file=order.csv"],
}


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def composed(*overrides: str) -> Recipe:
    """As `titanlab train` composes it; quicker where there are many."""
    recipe = OmegaConf.to_object(hydra.compose("config", overrides=list(overrides)))
    assert isinstance(recipe, Recipe)
    return recipe


@pytest.fixture(scope="module")
def of_every_option() -> dict[str, Recipe]:
    """A recipe for every option of every group, the others as they are by default."""
    register()
    with hydra.initialize_config_dir(str(conf_folder()), **VERSION_BASE):
        # tests/recipe/test_recipes.py looks at the others.
        recipes = {"+recipe=quickstart": composed("+recipe=quickstart")}
        for group in GROUPS:
            for name in options(group):
                recipes[f"{group}={name}"] = composed(f"{group}={name}", *NEEDED.get(name, []))
    return recipes


@pytest.mark.full
def test_every_option_round_trips(of_every_option):
    for recipe in of_every_option.values():
        read = from_mapping(yaml.safe_load(config_text(to_mapping(recipe))))
        assert read == recipe
        # Equal also in what == does not see: 1 and 1.0, lists and tuples.
        assert repr(to_mapping(read)) == repr(to_mapping(recipe))
        assert identify(read, data="d", hardware="cpu") == identify(recipe, data="d", hardware="cpu")


@pytest.mark.full
def test_every_model_trains_in_every_layout(of_every_option):
    """But where the pipeline would cut a table that is shared, or a rank have no head of keys."""
    precisions = [of_every_option[f"precision={name}"].precision for name in options("precision")]
    of_models = itertools.product(options("model"), [of_every_option["precision=bf16"].precision])
    for (model, precision), name in itertools.product(
        [*of_models, *itertools.product(["debug"], precisions)], options("parallelism")
    ):
        base, parallelism = of_every_option[f"model={model}"], of_every_option[f"parallelism={name}"].parallelism
        degrees = [getattr(parallelism, axis) for axis in AXES]
        world = abs(math.prod(degrees)) * (2 if -1 in degrees else 1)
        data = replace(of_every_option["data=synthetic"].data, vocab_size=base.model.vocab_size)
        recipe = replace(base, world=world, parallelism=parallelism, precision=precision, data=data)
        # One that has every number format.
        made = resolve(recipe, world=None, accelerator="cuda", device="NVIDIA B200")
        shared = made.layout.pipeline > 1 and made.model.tied_embeddings
        narrow = made.model.kv_heads % made.layout.tensor
        narrow |= precision.kind == "mxfp8" and made.model.kv_heads * made.model.head_dim // made.layout.tensor % 32
        rule = "first and last stage" if shared else "key/value heads|multiples of 32"
        with pytest.raises(ConfigError, match=rule) if shared or narrow else contextlib.nullcontext():
            check(made)


# Texts that YAML or OmegaConf might take for something else.
TEXTS = st.one_of(
    st.sampled_from(["1e-5", "null", "~", "true", "no", "007", "0x1f", "${seed}", "\\${x}", "a: b", "- a", "#", "", " x ", "a\nb", "…", "2026-01-01"]),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20).filter(lambda text: text != "???"),
)  # fmt: skip
NUMBERS = st.floats(min_value=1e-30, max_value=1e30, allow_nan=False)


@settings(max_examples=25)
@given(text=TEXTS, lr=NUMBERS, decay=NUMBERS, seed=st.integers(0, 2**63 - 1), tags=st.lists(TEXTS, max_size=3))
def test_every_value_round_trips(text, lr, decay, seed, tags):
    made = tiny.recipe("runs")
    recipe = replace(
        made,
        name=text,
        seed=seed,
        optimizer=replace(made.optimizer, lr=lr, weight_decay=decay),
        checkpoint=replace(made.checkpoint, load_from=text),
        cluster=replace(made.cluster, device=text, peak_tflops=None),
        tracker=wandb_with([tag[:64] or "x" for tag in tags]),
    )
    read = from_mapping(yaml.safe_load(config_text(to_mapping(recipe))))
    assert read == recipe
    assert repr(read.optimizer.lr) == repr(lr)


def wandb_with(tags):
    return discover()["tracker"]["wandb"].schema(tags=tags)


@pytest.mark.parametrize(
    ("change", "key", "rule"),
    [
        ({"model": {"kind": "gpt"}}, "model.kind", "no installed package offers this option"),
        ({"model": {"dim": 64}}, "model.kind", "no installed package offers this option"),
        ({"data": "stdlib"}, "data", "must be a mapping"),
        ({"optimizer": None}, "optimizer", "must be a mapping"),
        ({"colour": "red"}, "colour", "Key 'colour' not in 'Recipe'"),
        ({"precision": {"kind": "fp32", "colour": "red"}}, "precision.colour", "Key 'colour' not in 'Fp32'"),
        ({"seed": "many"}, "seed", "could not be converted to Integer"),
        ({"training": {"steps": 1.5}}, "training.steps", "could not be converted to Integer"),
        ({"training": {"steps": 0}}, "training.steps", "must be at least 1"),
        ({"optimizer": {"kind": "adamw", "betas": 0.9}}, "optimizer.betas", " is not a "),
    ],
)
def test_a_frozen_recipe_is_checked_field_by_field(change, key, rule):
    with pytest.raises(ConfigError) as refused:
        from_mapping({**to_mapping(tiny.recipe("runs")), **change})
    assert refused.value.key == key
    assert rule in refused.value.rule


@pytest.mark.parametrize(
    ("group", "key", "line"),
    [
        ("precision", "", "precision=null: is missing: every config has this group; "),
        ("profiler", "", "profiler=null: is missing: every config has this group; "),
        ("checkpoint", "kind", "checkpoint.kind=null: no installed package offers this option; known: "),
        (
            "training",
            "loss_chunk",
            "training.loss_chunk=null: is not in this config, and the default of this version, -1, ",
        ),
    ],
)
def test_a_config_of_an_earlier_version_is_told(group, key, line):
    mapping = to_mapping(tiny.recipe("runs"))
    if key:
        del mapping[group][key]
    else:
        del mapping[group]
    assert refusal(from_mapping, mapping).startswith(line)


def test_a_key_that_is_missing_has_its_default_where_it_means_the_same():
    mapping = to_mapping(tiny.recipe("runs"))
    del mapping["model"]["fused"]
    assert from_mapping(mapping) == tiny.recipe("runs")


def test_a_run_that_began_before_gradients_could_be_reduced_more_often_goes_on_as_it_began():
    """Where whole gradients are large, `auto` would change the order of sums in the middle of the run."""
    mapping = to_mapping(tiny.recipe("runs", reduce_gradients="auto"))
    assert from_mapping(mapping).parallelism.reduce_gradients == "auto"
    del mapping["parallelism"]["reduce_gradients"]
    assert from_mapping(mapping).parallelism.reduce_gradients == "last"


# Resolving


def resolved(recipe: Recipe, *, world=None, accelerator="cpu", device="cpu") -> Recipe:
    return resolve(recipe, world=world, accelerator=accelerator, device=device)


def open_recipe(world=None, **degrees) -> Recipe:
    made = tiny.recipe("runs")
    cluster = replace(made.cluster, accelerator="auto", device=None)
    return replace(made, world=world, parallelism=replace(made.parallelism, **degrees), cluster=cluster)


@pytest.mark.parametrize(
    ("given_world", "started", "degrees", "layout"),
    [
        (None, None, {}, (1, 1)),
        (None, None, {"shard": 4}, (1, 4)),
        (4, None, {"shard": -1}, (1, 4)),
        (None, 4, {"shard": -1}, (1, 4)),
        (4, 4, {"replicate": 2, "shard": -1}, (2, 2)),
        (6, None, {"replicate": -1, "shard": 2}, (3, 2)),
        (1, None, {"shard": -1}, (1, 1)),
    ],
)
def test_degrees_and_world_become_one(given_world, started, degrees, layout):
    recipe = resolved(open_recipe(given_world, **degrees), world=started)
    assert (recipe.parallelism.replicate, recipe.parallelism.shard) == layout
    assert (recipe.layout.replicate, recipe.layout.shard) == layout
    assert recipe.world == math.prod(layout)
    assert resolved(recipe) == recipe


def test_the_cluster_is_what_was_found_unless_the_recipe_says_so():
    recipe = open_recipe()
    cluster = resolved(recipe, accelerator="cuda", device="NVIDIA H200").cluster
    assert (cluster.accelerator, cluster.device) == ("cuda", "NVIDIA H200")
    on_cpu = replace(recipe, cluster=replace(recipe.cluster, accelerator="cpu"))
    cluster = resolved(on_cpu, accelerator="cuda", device="NVIDIA H200").cluster
    assert (cluster.accelerator, cluster.device) == ("cpu", "cpu")
    named = replace(recipe, cluster=replace(recipe.cluster, device="NVIDIA B200"))
    assert resolved(named, accelerator="cuda", device="NVIDIA H200").cluster.device == "NVIDIA B200"


def test_labels_places_and_watching_are_no_part_of_the_identity():
    recipe = tiny.recipe("runs")

    def digest(changed):
        return identify(changed, data="d", hardware="cpu").sha256

    same = [
        replace(recipe, name="other", sweep="others", runs="/elsewhere"),
        replace(recipe, tracker=wandb_with(["a"])),
        replace(recipe, launch=replace(recipe.launch, threads=3)),
        replace(recipe, training=replace(recipe.training, log_every=7, validate_every=3)),
        replace(recipe, checkpoint=replace(recipe.checkpoint, every=5, keep=1)),
    ]
    assert {digest(each) for each in same} == {digest(recipe)}
    others = [
        replace(recipe, seed=1),
        replace(recipe, repeat=1),
        replace(recipe, training=replace(recipe.training, steps=11)),
        replace(recipe, optimizer=replace(recipe.optimizer, lr=2e-3)),
        replace(recipe, model=replace(recipe.model, layers=3)),
    ]
    assert len({digest(each) for each in [recipe, *others]}) == len(others) + 1


# Rules


def test_a_recipe_is_frozen_and_the_key_of_a_table(tmp_path):
    mapping = to_mapping(tiny.recipe(tmp_path))
    mapping["cluster"]["efficiencies"] = {"matmul": 0.5}
    one, other = from_mapping(mapping), from_mapping(copy.deepcopy(mapping))
    assert {one: 1}[other] == {pickle.loads(pickle.dumps(one)): 1}[other] == {copy.deepcopy(one): 1}[other] == 1
    assert {one: 1}.get(dataclasses.replace(other, seed=7)) is None
    for config, name in ((one, "seed"), (one.training, "steps"), (one.optimizer.schedule, "warmup_steps")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 77)
    with pytest.raises(TypeError, match=r"never changed: make another with dataclasses\.replace"):
        one.cluster.efficiencies["matmul"] = 0.7
    assert to_mapping(one) == mapping


@pytest.mark.parametrize("group", sorted(discover()))
def test_the_configs_of_every_group_are_hashable(group):
    made = []
    for option in discover()[group].values():
        # Some options need a value from a person; models need all of their sizes.
        with contextlib.suppress(ConfigError, TypeError):
            made.append(option.schema())
            assert hash(made[-1]) == hash(option.schema())
            assert plain(OmegaConf.to_container(schema_node(option.schema))) == plain(made[-1])
    assert made or group == "model"
