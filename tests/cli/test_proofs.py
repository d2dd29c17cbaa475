"""The verbs that prove and rehearse: what they take, print and return; two real ones in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.sweep.made import Made, begin, end
from titanlab.cli import main
from titanlab.costs import meter
from titanlab.parity.forked import Ended, RunFailed
from titanlab.parity.parity import Trace
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder

TWO = "parallelism=fsdp world=2"


@pytest.fixture
def ranks(monkeypatch):
    """Stands in for ranks: every trace is the same, and recipes whose names have a word fail."""
    trained, failing = [], set()

    def ended(recipe):
        trained.append(recipe.name)
        bad = any(word in recipe.name for word in failing)
        outcome = Outcome(kind=OutcomeKind.CRASH, rank=1, cause="LookupError: a planted fault")
        run = RunFolder(Path(recipe.runs) / "reduced" / recipe.name)
        return Ended(run=run, attempt=1, outcome=outcome if bad else Outcome(kind=OutcomeKind.DONE), seconds=1.0)

    class Trainer:
        failed = False

        def __call__(self, recipe):
            found = ended(recipe)
            if found.outcome.kind is not OutcomeKind.DONE:
                self.failed = True
                raise RunFailed(found)
            tensors = {"a": torch.ones(2)}
            return [Trace(losses=[1.0], grad_norms=[1.0], gradients=tensors, parameters=tensors)]

    monkeypatch.setattr("titanlab.cli.proofs.parity._Trainer", Trainer)
    monkeypatch.setattr("titanlab.cli.proofs.rehearse.train_in_ranks", ended)
    for verb in ("parity", "rehearse"):
        monkeypatch.setattr(f"titanlab.cli.proofs.{verb}.prepare", lambda: None)
    return trained, failing


@pytest.fixture
def says(here, capsys):
    """Exit code and output of a call."""

    def call(*arguments):
        capsys.readouterr()
        code = main(arguments)
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("verb", ["parity", "rehearse"])
@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        ("", "arguments=: say nothing of what to"),
        ("--steps 0 +recipe=quickstart", "--steps=0: must lie in 1 to 100; try 3"),
        ("--steps x +recipe=quickstart", "--steps=x: must be a whole number; see `titanlab "),
        (
            "+recipe=quickstart --only",
            "arguments=+recipe=quickstart --only: argument --only: expected one argument; see",
        ),
        ("--processes 999 +recipe=quickstart", "--processes=999: must lie in 1 to 256; try 16"),
        ("nonesuch", "sweep=nonesuch: is no sweep under runs"),
        ("nonesuch seed=2", "recipe=nonesuch: is no recipe and no sweep of conf"),
        ("+recipe=quickstart --only nonesuch", "--only=nonesuch: is in no run's name of quickstart; try quickstart-"),
        ("+recipe=quickstart parallelism=fsdp_tp world=3", "world=3: the other degrees make 2"),
        ("+recipe=quickstart --json --bogus", "arguments="),
    ],
)
def test_bad_input_is_refused(command, verb, arguments, begins):
    said = command(f"{verb} {arguments}")
    assert said.code == 2
    assert said.err.startswith(f"error: {begins}")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("first", "second", "begins"),
    [
        ("quickstart", f"+recipe=quickstart {TWO} seed=1", "seed=1: cannot be compared with +recipe=quickstart, which"),
        ("quickstart", "+recipe=quickstart model=debug", "model.dim=64: cannot be compared"),
        ("quickstart", "+recipe=quickstart seed=1,2", "recipe=+recipe=quickstart seed=1,2: describes 2 recipes"),
        ("quickstart", "nonesuch", "recipe=nonesuch: is neither a run nor a recipe"),
        ("quickstart", "+recipe=quickstart 'world=2", "recipe=+recipe=quickstart 'world=2: cannot be read"),
    ],
)
def test_two_recipes_that_cannot_be_compared_are_refused(command, first, second, begins):
    said = command(["parity", first, second])
    assert said.code == 2
    assert said.err.startswith(f"error: {begins}")


def test_a_run_and_a_recipe_are_not_compared(says, here):
    Made(here / "runs").run("alone")
    code, _, err = says("parity", "alone", "+recipe=quickstart seed=1")
    assert code == 2
    assert "is no finished run, and alone is one" in err


def test_recipes_of_a_sweep_are_proved_and_kept_with_it(says, here, ranks):
    code, out, _ = says("parity", "+sweeps=quickstart_layouts", "--only", "fsdp_tp")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("quickstart_layouts (sweeps/quickstart_layouts): 2 recipes, each held to one process")
    assert lines[1].startswith("reduced to 4 layers of 64, 8 heads and 2 key/value heads, vocabulary 256, 8 sequences")
    assert [line.partition("-world")[0] for line in lines[2:4]] == ["[1/2] PASS  fsdp_tp", "[2/2] PASS  fsdp_tp_pp"]
    assert lines[-2:] == ["kept in runs/quickstart_layouts/parity.json", "PASS: 2 recipes"]
    kept = json.loads((here / "runs" / "quickstart_layouts" / "parity.json").read_text())
    assert [row["passed"] for row in kept["rows"]] == [True, True]
    says("parity", "+sweeps=quickstart_layouts", "--only", "ddp")
    kept = json.loads((here / "runs" / "quickstart_layouts" / "parity.json").read_text())
    assert len(kept["rows"]) == 3


def test_a_recipe_that_fails_does_not_stop_the_others(says, ranks):
    ranks[1].add("ddp")
    code, out, _ = says("parity", "+sweeps=quickstart_layouts", "--json")
    assert code == 1
    rows = json.loads(out)["rows"]
    assert [row["run"].partition("-")[0] for row in rows if not row["passed"]] == ["ddp"]
    assert len(rows) == 6
    assert "crash: LookupError: a planted fault; log: " in rows[1]["reason"]
    code, out, _ = says("rehearse", "+sweeps=quickstart_layouts")
    assert code == 1
    assert "[2/6] failed  ddp-world2-" in out
    assert out.splitlines()[-1] == "1 of 6 recipes failed"
    assert "ddp-world2" in out.splitlines()[-2]
    assert out.splitlines()[-2].endswith("logs/rank-1.log")


def test_recipes_of_a_submitted_sweep_are_taken_from_its_folder(says, here, ranks):
    made = Made(here / "runs")
    one, damaged = made.run("one", shard=2), made.run("two", tensor=2)
    (damaged.path / "config.yaml").write_text("model: {kind: nonesuch}\n")
    made.drop("rule", "parallelism.tensor=3: must divide 4 attention heads; try 2 or 4", parallelism="tp3")
    made.drop("where", "world <= 8", world=16)
    code, out, _ = says("rehearse", "layouts")
    assert code == 1
    assert f"ok  {one.path.name}  dp_s2  2 processes" in out
    assert "1 point left out by the sweep: world <= 8" in out
    assert f"failed  {damaged.path.name}  infeasible: model.kind=nonesuch" in out
    assert "failed  parallelism=tp3  infeasible: parallelism.tensor=3: must divide 4 attention heads" in out
    assert out.splitlines()[-1] == "2 of 3 recipes failed"
    code, out, _ = says("parity", "layouts", "--json")
    assert code == 1
    assert [row["passed"] for row in json.loads(out)["rows"]] == [True, False, False]


def test_equal_recipes_are_trained_once(says, ranks):
    code, out, _ = says("parity", "quickstart", "quickstart")
    assert code == 0
    assert out.startswith("one recipe, given twice: 1 recipe")
    ranks[0].clear()
    code, out, _ = says("rehearse", "+recipe=quickstart", TWO.split()[0], "world=2", "optimizer.lr=1e-3,2e-3")
    assert code == 0
    assert len(ranks[0]) == 1
    assert "the same as lr0.001-" in out


def test_a_large_layout_is_folded_and_what_does_not_fit_gets_a_second(says, ranks):
    layout = "parallelism.replicate=2 parallelism.shard=4 parallelism.context=2 parallelism.tensor=2"
    recipe = ["+recipe=llama3_1_8b_256gpus_4d", *layout.split(), "parallelism.pipeline=2", "world=64"]
    code, out, _ = says("rehearse", *recipe)
    assert code == 0
    assert (
        "dp_r did not fit into dp_s2·cp2·tp2·pp2 of dp_r2·dp_s4·cp2·tp2·pp2; another layout has what is missing" in out
    )
    assert "[2/2] ok" in out
    assert out.splitlines()[-1] == "ok: 1 recipe in 2 rehearsals"


@pytest.mark.parametrize(
    "keys",
    [
        "data=files data.files=/nowhere data.tokenizer=/nowhere/tokenizer.json",
        "init_from=/nowhere/weights",
        "checkpoint.load_from=/nowhere",
        *(
            pytest.param(keys, marks=pytest.mark.full)
            for keys in ("data=files data.files=/nowhere/*.jsonl", "data=tokens data.folder=/nowhere")
        ),
    ],
)
def test_files_of_the_cluster_need_not_be_here(says, ranks, keys):
    code, out, err = says("rehearse", "+recipe=llama3_1_8b_8gpus", "cluster=h100", *keys.split())
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "ok: 1 recipe in 1 rehearsal"


def test_rules_of_the_real_size_are_held_to(says, ranks):
    swept = ["parallelism=fsdp_tp", "parallelism.shard=1", "parallelism.tensor=2,16", "world=null"]
    code, out, _ = says("rehearse", "+recipe=llama3_1_8b_8gpus", *swept)
    assert code == 1
    assert "[1/2] failed  fsdp_tp" not in out
    assert "infeasible: parallelism.tensor=16: must divide 8 key/value heads" in out
    assert out.splitlines()[-1] == "1 of 2 recipes failed"


@pytest.mark.parametrize("verb", ["parity", "rehearse"])
def test_an_interruption_shows_what_is_known(says, ranks, monkeypatch, verb):
    def interrupted(self, *given):
        raise KeyboardInterrupt

    if verb == "parity":
        monkeypatch.setattr("titanlab.cli.proofs.parity._Trainer.__call__", interrupted)
    else:
        monkeypatch.setattr("titanlab.cli.proofs.rehearse.train_in_ranks", interrupted)
    code, out, err = says(verb, "+recipe=quickstart")
    assert code == 130
    assert err.startswith("error: interrupted; 0 ")
    assert "PASS" not in out


def test_a_result_that_cannot_be_kept_is_a_warning(says, here, ranks):
    (here / "runs").mkdir()
    (here / "runs" / "quickstart_layouts").write_text("")
    code, out, err = says("parity", "+sweeps=quickstart_layouts", "--only", "ddp")
    assert code == 0
    assert err.startswith("warning: the result is not kept with the sweep: ")
    assert "PASS: 1 recipe" in out


def test_folders_are_kept_where_they_are_wanted(says, here, ranks):
    (here / "full").mkdir()
    (here / "full" / "file").write_text("")
    code, _, err = says("rehearse", "+recipe=quickstart", "--keep", "full")
    assert (code, err.startswith("error: --keep=full: has files already")) == (2, True)
    code, out, _ = says("rehearse", "+recipe=quickstart", "--keep", "new")
    assert (code, out.splitlines()[-1]) == (0, "kept in new")


@pytest.mark.parametrize(
    "arguments", ["nonesuch", "+recipe=quickstart --only nonesuch", "+recipe=quickstart --steps 0"]
)
def test_a_mistake_makes_no_folder(says, here, arguments):
    code, _, _ = says("rehearse", *arguments.split(), "--keep", "new")
    assert (code, list(here.iterdir())) == (2, [])


def test_a_folder_of_the_home_is_kept_there(says, here, ranks, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "home"))
    code, _, _ = says("rehearse", "+recipe=quickstart", "--keep=~/kept")
    assert (code, (here / "home" / "kept").is_dir(), (here / "~").exists()) == (0, True, False)


def test_paths_may_have_spaces_and_equals_signs(says, here, ranks):
    made = Made(here / "my lr=3 runs")
    one, two = made.run("one"), made.run("two")
    for run in (one, two):
        begin(run)
        with run.open_metrics(1) as metrics:
            metrics.write("train", 1, {meter.LOSS: 5.5, meter.TOKENS_SEEN: 384, meter.GRAD_NORM: 1.0})
        end(run)
    code, out, err = says("parity", f"my lr=3 runs/layouts/{one.path.name}", str(two.path))
    assert (code, err) == (0, "")
    assert out.startswith(f"{two.path.name} against {one.path.name}, at equal tokens")
    code, out, err = says("rehearse", "my lr=3 runs/layouts")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "ok: 2 recipes in 2 rehearsals"


def call_for_real(*arguments):
    """In a process of its own, which imports torch once and forks."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "titanlab", *arguments, "+recipe=quickstart", *TWO.split(), "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_real_ranks_are_forked_and_compared(here):
    (row,) = call_for_real("parity")["rows"]
    assert row["passed"]
    assert 0 < row["gradient"][0] < 1e-5


@pytest.mark.full
def test_real_ranks_are_rehearsed(here):
    (rehearsed,) = call_for_real("rehearse", "--keep", "kept")["rehearsals"]
    assert (rehearsed["outcome"], rehearsed["processes"]) == ("done", 2)
    (run,) = Path("kept/reduced").iterdir()
    assert RunFolder(run).result().kind is OutcomeKind.DONE
    assert (run / "logs" / "rank-1.log").is_file()
