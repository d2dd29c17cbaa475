"""Wrong sweeps: one line with key, value, rule and cure, exit code 2, nothing submitted and nothing made."""

from __future__ import annotations

import os
import re

import pytest

from tests.sweep.files import BASE, sweep_text, write_sweep
from titanlab.cli import main
from titanlab.sweep import SweepFolder

LINE = re.compile(r"error: (?P<key>[^=\n]+)=(?P<value>[^\n]*?): (?P<rule>[^\n]+); (?P<cure>[^\n]+)\n")
GOOD = {"product": {"seed": [0, 1]}}
SLURM = "launch=slurm cluster=cpu launch.minutes=5"

# What the space is, what else the sweeper's node has, how the line begins, and what it has in it besides.
SPACES = [
    (None, {"spaces": GOOD}, "hydra.sweeper.spaces=: is not a key of the sweeper", "space, where, repeats and control"),
    ({"product": {"training.stepz": [5]}}, {}, "training.stepz=5: is not a key of this recipe", "did you mean training.steps?"),
    ({"product": {"paralelism": ["fsdp"]}}, {}, "paralelism=fsdp: is not a key of this recipe", "did you mean parallelism?"),
    ({"product": {"parallelism": ["fsdp", "fspd_tp"]}}, {}, "parallelism=fspd_tp: is not an option of this group", "try fsdp_tp"),
    ({"product": {"parallelism": ["schema"]}}, {}, "parallelism=schema: is not an option", "known: cp,"),
    ({"product": {"training.steps": [5, "many"]}}, {}, "training.steps=many: must be a whole number", "try 1000"),
    ({"product": {"tracker.wandb.project": ["a"]}}, {}, "tracker.wandb.project=a: is a key only if tracker is a list", "write tracker.project=a"),
    ({"product": {"tracker.wandb.finish_seconds": ["x"]}}, {}, "tracker.wandb.finish_seconds=x: must be a number", "try 10.0"),
    ({"product": {"hydra.job.name": ["a", "b"]}}, {}, "hydra.job.name=a,b: is Hydra's own", "one value"),
    ({"product": {"sweep": ["a", "b"]}}, {}, "sweep=a,b: must have one value for the whole sweep", ""),
    (GOOD, {"repeats": 0}, "repeats=0: must be a whole number", ""),
    ({"product": {"seed": list(range(1001))}}, {"repeats": 100}, "repeats=100: of 1001 points each are more runs", ""),
    ({"product": {"repeat": [0, 1]}}, {"repeats": 2}, "repeat=0,1: is counted by repeats", ""),
    (GOOD, {"control": 3}, "control=3: must be one mapping", "try control: {}"),
    (GOOD, {"control": {"training": {"steps": 5}}}, "control=training: {'steps': 5}: takes keys with dots", "training.KEY"),
    (GOOD, {"control": {"name": "x"}}, "control=name: x: is given by the control itself", "leave it out"),
    (GOOD, {"control": {"ac": "fulll"}}, "ac=fulll: is not an option of this group", "try full"),
    (GOOD, {"control": {"parallelism": "tp", "world": 3}}, "control={'parallelism': 'tp', 'world': 3}: cannot run", "give it values"),
    (GOOD, {"where": ["__import__('os').system('touch /tmp/x') == 0"]}, "where=__import__", "calls a function"),
    (GOOD, {"where": ["trainig.steps > 1"]}, "where=trainig.steps > 1: asks for trainig.steps", "did you mean training.steps?"),
    (GOOD, {"where": ["ac.budget > 1"]}, "where=ac.budget > 1: asks for ac.budget, which seed0 does not have", "ask first"),
    (GOOD, {"where": ["seed"]}, "where=seed: is 0 for seed0", "compare"),
    (GOOD, {"where": {"seed": 1}}, "where={'seed': 1}: must be a list of conditions", ""),
    (GOOD, {"where": ["seed > 5"]}, "where=seed > 5: is met by none of 2 points", ""),
    ({"product": {"parallelism": ["tp"], "world": [3, 5]}}, {}, "space=parallelism,world: none of 2 points can be run", "rule: parallelism.tensor"),
]  # fmt: skip
# What follows a good file on the command line.
ARGUMENTS = [
    ("seed=range(0,1000000000)", "seed=range(0,1000000000): has more than 100000 values", "some out"),
    ("seed=shuffle(range(0,1000000000))", "seed=shuffle(range(0,1000000000)): has more than 100000 values", "some out"),
    ("optimizer.lr=range(1.0,0,-1e-9)", "optimizer.lr=range(1.0,0,-1e-9): has more than 100000 values", ""),
    ("seed=range(0,10,0)", "seed=range(0,10,0): has infinitely many values", "list the values"),
    ("training.global_batch=-1", "training.global_batch=-1: must be at least 1", ""),
    ("model=debgu", "model=debgu: is not an option", "try debug"),
    ("hydra/launcher=mine", "hydra/launcher=mine: would run the points by itself", "launch=slurm"),
    ("hydra.launcher._target_=os.system", "hydra.launcher._target_=os.system: would run the points", ""),
    ("launch=slurm", "cluster.accelerator=auto: is whatever this host has", "cluster=h100"),
    (f"{SLURM} cluster=cpu cluster.accelerator=cuda", "cluster.accelerator=cuda: is what the recipe asks for", "cluster=h100"),
    (f"{SLURM} launch.partition=fast", "launch.partition=fast: Slurm knows no such partition", "known: large, normal"),
    (f"{SLURM} cluster.nodes=2 parallelism=fsdp world=32 training.global_batch=32", "world=32: is more than the cluster has, 2 nodes", ""),
    (f"{SLURM} cluster.per_node=4 cluster.nodes=4 parallelism=fsdp world=13 training.global_batch=13", "world=13: does not fill nodes of 4 evenly, and the cluster has 4 nodes", ""),
    ("sweep=taken", "sweep=taken: ", "belongs to another sweep"),
    ("sweep=a/b", "sweep=a/b: becomes a folder's name", ""),
    ("runs=/dev/null/runs", "runs=/dev/null/runs: cannot be written", ""),
    ("checkpoint.load_from=nowhere", "checkpoint.load_from=nowhere: there is no such folder", ""),
    ("--dry-run --wait", "--dry-run=true", "submits nothing to wait for"),
]  # fmt: skip


@pytest.fixture
def refused(slurm, tmp_path, monkeypatch, capsys):
    """`refused(*arguments)`: the line with which `titanlab sweep` refuses them."""
    here = tmp_path / "here"
    taken = SweepFolder(here / "runs" / "taken")
    taken.path.mkdir(parents=True)
    taken.write_manifest({"name": "taken", "origin": "sweeps/another"}, [])
    monkeypatch.chdir(here)

    def files():
        return sorted(os.path.join(folder, name) for folder, _, names in os.walk(here) for name in names)

    def call(*arguments):
        before = files()
        capsys.readouterr()
        code = main(["sweep", *arguments])
        said = capsys.readouterr()
        assert (code, said.out) == (2, ""), said
        assert LINE.fullmatch(said.err), said.err
        assert files() == before
        assert slurm.jobs() == {}
        return said.err

    return call


def some_by_default(cases, named_by):
    """In `make test` every third."""
    return [
        pytest.param(*case, id=case[named_by], marks=[pytest.mark.full] if place % 3 else [])
        for place, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("space", "node", "begins", "has"), some_by_default(SPACES, 2))
def test_a_wrong_file_is_refused(refused, tmp_path, space, node, begins, has):
    said = refused(*write_sweep(tmp_path, sweep_text(space, node=node)))
    assert said.startswith(f"error: {begins}")
    assert has in said


@pytest.mark.parametrize(("arguments", "begins", "has"), some_by_default(ARGUMENTS, 0))
def test_wrong_arguments_are_refused(refused, tmp_path, arguments, begins, has):
    launcher = tmp_path / "hydra" / "launcher" / "mine.yaml"
    launcher.parent.mkdir(parents=True)
    launcher.write_text("_target_: my.Launcher\n")
    said = refused(*write_sweep(tmp_path, sweep_text(GOOD)), *arguments.split())
    assert said.startswith(f"error: {begins}")
    assert has in said


@pytest.mark.parametrize(
    ("text", "begins", "has"),
    [
        ("# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {space: {}}}\n", "hydra.sweeper.space=: is not a key of the sweeper", "override /hydra/sweeper: space"),
        ("# @package _global_\ndefaults:\n  - override /model: debug\n  - /recipe: quickstart\n", "sweeps=mine: cannot be composed (Override 'model : debug' is defined before 'recipe: quickstart')", "mend sweep"),
        ("# @package _global_\ndefaults:\n  - /recipe: nope\n", "recipe=nope: is not an option", "known: "),
        ("# @package _global_\nhydra: [\n", "file=", "is not YAML"),
        ("# @package _global_\ntrainig: {steps: 3}\n", "trainig=: is not a key of this recipe, and sweeps/mine.yaml sets it", "did you mean training"),
        (sweep_text(GOOD).replace("# @package _global_\n", ""), "sweeps=mine: ", ""),
    ],
)  # fmt: skip
def test_a_file_that_does_not_compose_is_refused(refused, tmp_path, text, begins, has):
    said = refused(*write_sweep(tmp_path, text))
    assert said.startswith(f"error: {begins}")
    assert has in said


def test_a_sweep_of_nothing_is_refused(refused):
    assert "try +sweeps=quickstart_layouts" in refused()


def test_a_sweeps_file_is_added(refused):
    assert "try +sweeps=ac_memory" in refused("sweeps=ac_memory")


def test_a_sweep_is_submitted_once_and_not_by_every_process(refused, tmp_path, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert "start it without torchrun or srun" in refused(*write_sweep(tmp_path, sweep_text(GOOD, base=BASE)))


@pytest.mark.parametrize("argument", ["hydra.sweeper.repeats=2", "hydra.sweeper.where='seed > 1'"])
def test_without_a_file_its_keys_say_what_brings_them(refused, tmp_path, argument):
    small = [
        "data=synthetic",
        "optimizer.schedule.warmup_steps=0",
        f"runs={tmp_path / 'runs'}",
        "seed=1,2",
        "--dry-run",
    ]
    said = refused(*small, argument)
    key = argument.partition("=")[0]
    assert said.startswith(f"error: {key}=")
    assert said.endswith(f"is a key of a sweep's file; add hydra/sweeper=space to have {key}\n")
    assert main(["sweep", *small, "hydra/sweeper=space", argument]) == 0
