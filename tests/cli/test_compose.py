"""From arguments to recipes: defaults, Hydra's own flags, multiruns, folders and packages of others, completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from titanlab import __version__
from titanlab.checkpoint.schema import Sync
from titanlab.cli.compose import compose
from titanlab.cli.verbs import VERBS
from titanlab.data.schema import Stdlib
from titanlab.launch.launchers_schema import Local
from titanlab.options import discover
from titanlab.parallelism import Parallelism
from titanlab.recipe import conf_folder, from_mapping, read_flags, to_mapping
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.optimizer.optimizers_schema import AdamW
from titanlab.techniques.precision.cast_schema import Fp32
from titanlab.techniques.tracker.trackers_schema import Jsonl

ROOT = Path(__file__).parents[2]


def options(group):
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


def the_recipe(*arguments):
    (recipe,) = compose(arguments)
    return recipe


def as_process(*command, **environ):
    done = subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_defaults_are_a_recipe():
    recipe = the_recipe()
    kinds = (Llama, Parallelism, Fp32, AdamW, Stdlib, Sync, Jsonl, Local)
    groups = ("model", "parallelism", "precision", "optimizer", "data", "checkpoint", "tracker", "launch")
    assert tuple(type(getattr(recipe, group)) for group in groups) == kinds
    assert (recipe.name, recipe.sweep, recipe.runs, recipe.seed, recipe.world) == ("run", "single", "runs", 0, None)
    assert (recipe.model.dim, recipe.training.steps, recipe.optimizer.schedule.decay) == (64, 1000, "cosine")


def test_a_recipe_of_the_group_sets_many_keys_and_arguments_come_after_it():
    recipe = the_recipe("+recipe=quickstart", "training.steps=50")
    assert (recipe.name, recipe.world, recipe.parallelism.shard, recipe.training.steps) == ("quickstart", 2, -1, 50)
    assert recipe.model == the_recipe("model=llama_2m").model


# Hydra's own answers


@pytest.mark.parametrize("arguments", ["", "+recipe=quickstart", "model=llama3_2_1b data=synthetic tracker=wandb"])
def test_cfg_job_is_what_would_run(capsys, command, arguments):
    said = command(f"train {arguments} --cfg job --resolve")
    assert (said.code, said.err, said.started) == (0, "", [])
    recipe = the_recipe(*arguments.split())
    assert yaml.safe_load(said.out) == to_mapping(recipe)
    assert from_mapping(yaml.safe_load(said.out)) == recipe


def test_cfg_job_without_resolve_shows_what_refers_to_what(command):
    said = command("train data=synthetic --cfg job --package data")
    assert (
        said.out
        == "# @package data\nkind: synthetic\nvocab_size: ${model.vocab_size}\ngaps: false\ndocument_mask: false\ndocument_tokens: 256\n"
    )


def test_info_says_where_values_come_from():
    # In a process of its own: Hydra leaves a log handler behind.
    said = as_process(sys.executable, "-m", "titanlab", "train", "model=llama3_8b", "--info", "defaults")
    assert re.search(r"\| model/llama3_8b +\| model +\|", said)
    said = as_process(sys.executable, "-m", "titanlab", "train", "--info", "searchpath")
    assert f"file://{conf_folder()}" in said


def test_the_help_lists_every_option_and_its_examples_run(command):
    said = command("train --help")
    assert (said.code, said.err, said.started) == (0, "", [])
    groups = dict(re.findall(r"^(\w+): (.+)$", said.out, re.MULTILINE))
    folders = {path.name: sorted(each.stem for each in path.glob("*.yaml")) for path in conf_folder().iterdir()}
    del folders["config.yaml"]
    assert {group: groups[group].split(", ") for group in folders} == folders
    examples = re.findall(r"^  titanlab (train \S.*?)  ", said.out, re.MULTILINE)
    assert len(examples) >= 4
    for example in examples:
        assert len(compose(example.split()[1:])) == (2 if "-m" in example else 1)
    flags = re.findall(r"^  (-.+?)  ", said.out, re.MULTILINE)
    for flag in flags:
        words = flag.replace("WHAT", "all").replace("[", "").replace("]", "").split(", ")[-1].split()
        # These are flags of titanlab, not of Hydra: tests/cli/test_train.py, tests/cli/test_train_from.py.
        assert words[0] in ("--from", "--dry-run") or read_flags(words).flags == words
    assert {flag.split()[0] for flag in flags} >= {"--cfg", "--info", "-m,", "--from", "--config-dir", "--hydra-help"}


def test_the_other_helps(command):
    said = command("--help")
    assert said.code == 0
    assert all(f"\n  {verb} " in said.out for verb in VERBS)
    assert command("") == command("help") == said
    assert command("--version").out == f"titanlab {__version__}\n"
    for verb in ("resume", "generate", "tokenize", "download-tokenizer"):
        said = command(f"{verb} --help")
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"usage: titanlab {verb} ")
    assert command("train --hydra-help").out.startswith("Hydra (")
    assert command("train --version").out.startswith("Hydra ")


# Multiruns


def test_all_points_of_a_multirun_start_in_their_order(command):
    said = command("train -m data=synthetic training.seq_len=64,128 'seed=range(0,3)' 'optimizer.betas=[0.9,0.99]'")
    assert said.code == 0
    points = [(recipe.training.seq_len, recipe.seed) for recipe in said.started]
    assert points == [(64, 0), (64, 1), (64, 2), (128, 0), (128, 1), (128, 2)]
    assert {recipe.data.vocab_size for recipe in said.started} == {2048}


def test_a_multirun_over_options_and_names_that_tell_its_points():
    recipes = compose(["-m", "model=debug,llama_5m", "parallelism=ddp,fsdp", "world=2", "name=p${hydra:job.num}"])
    assert [recipe.name for recipe in recipes] == ["p0", "p1", "p2", "p3"]
    assert [recipe.model.dim for recipe in recipes] == [64, 64, 256, 256]
    assert [recipe.parallelism.shard for recipe in recipes] == [1, -1, 1, -1]


# Options of others


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return folder


def test_a_folder_of_ones_own(tmp_path, shown):
    folder = write(
        tmp_path / "mine",
        {
            "model/tiny.yaml": "defaults: [debug, _self_]\nlayers: 1",
            "recipe/both.yaml": "# @package _global_\ndefaults:\n  - override /model: tiny\nname: both\ntraining: {seq_len: 64}",
            "sweeps/seeds.yaml": "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper: {params: {seed: '3,4,5'}}",
        },
    )
    recipe = the_recipe("--config-dir", str(folder), "+recipe=both")
    assert (recipe.name, recipe.model.layers, recipe.model.dim, recipe.training.seq_len) == ("both", 1, 64, 64)
    assert [recipe.seed for recipe in compose([f"--config-dir={folder}", "+sweeps=seeds", "model=tiny"])] == [3, 4, 5]
    assert ", tiny\n" in shown("train", "--config-dir", str(folder), "--help")


def test_every_yaml_is_an_option_that_composes():
    """And belongs to a group that some schema describes, but for recipes and sweeps."""
    groups = {path.name for path in conf_folder().iterdir() if path.is_dir()}
    assert groups - {"recipe", "sweeps"} == set(discover())
    for path in sorted(conf_folder().glob("*/*.yaml")):
        first = path.read_text().splitlines()[0]
        if (beginning := re.fullmatch(r"defaults: \[(\w+), _self_\]", first)) is not None:
            # A schema, or another option, which has one.
            name = beginning[1]
            assert name.endswith("schema") or path.with_name(f"{name}.yaml").is_file(), path
        else:
            assert first == "# @package _global_", path
        assert "_target_" not in path.read_text(), path
