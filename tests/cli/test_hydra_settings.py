"""Hydra's own settings: those that titanlab reads, and the others, which are refused instead of being ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

PRIMARY = (
    "defaults: [recipe_schema, {training: default}, {model: debug}, {parallelism: single}, {schedule: 1f1b}, "
    '{precision: fp32}, {ac: none}, {compile: "off"}, {optimizer: adamw}, {data: synthetic}, {checkpoint: default}, '
    "{cluster: local}, {tracker: jsonl}, {profiler: 'off'}, {launch: local}, _self_]\n"
)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    folder = tmp_path / "conf"
    (folder / "recipe").mkdir(parents=True)
    for name, said in {
        "recipe/moved": "# @package _global_\nhydra: {run: {dir: elsewhere}}",
        "recipe/called": "# @package _global_\nhydra: {job: {env_set: {A: b}}}",
        "recipe/plain": "# @package _global_\nseed: 3",
        "own": PRIMARY,
        "logging": PRIMARY + "hydra: {output_subdir: kept}",
    }.items():
        (folder / f"{name}.yaml").write_text(said + "\n")
    return folder


@pytest.mark.parametrize("verb", ["train", "sweep"])
@pytest.mark.parametrize(
    ("override", "key", "cure"),
    [
        ("hydra.run.dir=/tmp/x", "hydra.run.dir", "give runs=FOLDER"),
        ("++hydra.sweep.subdir=x", "hydra.sweep.subdir", "give runs=FOLDER"),
        ("~hydra.output_subdir", "hydra.output_subdir", "config.yaml of its folder"),
        ("hydra.mode=MULTIRUN", "hydra.mode", "add -m"),
        ("hydra.mode=RUN", "hydra.mode", "add -m"),
        ("hydra.job.chdir=true", "hydra.job.chdir", "give runs=FOLDER"),
        ("+hydra.job.env_set.A=b", "hydra.job.env_set.A", "launch.environment"),
        ("hydra.verbose=true", "hydra.verbose", "logs in its own folder"),
        ("hydra/job_logging=default", "hydra/job_logging", "logs in its own folder"),
        ("+hydra.callbacks.x.of=mine", "hydra.callbacks.x.of", "nothing calls them"),
        ("hydra.runtime.cwd=/x", "hydra.runtime.cwd", "leave it out"),
        ("'hydra={run:{dir:x}}'", "hydra", "--help has the keys"),
    ],
)
def test_what_is_not_read_is_refused(command, verb, override, key, cure):
    said = command(f"{verb} data=synthetic {override}")
    assert said.refusal["key"] == key
    assert said.refusal["rule"] == "is a setting of Hydra's that titanlab does not read"
    assert cure in said.refusal["cure"]


def test_what_is_read_is_taken(command, conf):
    (started,) = command(
        f"train data=synthetic hydra.searchpath=[file://{conf}] +recipe=plain hydra.job.name=mine 'name=${{hydra:job.name}}'"
    ).started
    assert (started.seed, started.name) == (3, "mine")


@pytest.mark.parametrize(
    ("recipe", "key", "value"),
    [("moved", "hydra.run.dir", "elsewhere"), ("called", "hydra.job.env_set", "{'A'")],
)
def test_a_file_that_sets_what_is_not_read_is_named(command, conf, recipe, key, value):
    for line in ("train", "sweep --dry-run seed=0,1"):
        said = command(f"{line} --config-dir {conf} +recipe={recipe} data=synthetic")
        assert said.refusal["key"] == key
        assert said.err.startswith(f"error: {key}={value}")
        assert said.refusal["rule"].endswith(f", and {conf}/recipe/{recipe}.yaml sets it")


def test_a_config_of_ones_own_has_hydras_defaults_and_leaves_nothing_behind(command, conf):
    assert command(f"train --config-dir {conf} --config-name own").started[0].model.dim == 64
    assert command(f"sweep --dry-run --config-dir {conf} --config-name own seed=0,1").code == 0
    assert command(f"train --config-dir {conf} --config-name logging").refusal["key"] == "hydra.output_subdir"
