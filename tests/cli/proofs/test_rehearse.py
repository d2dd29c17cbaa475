"""`titanlab rehearse`: what it takes, prints, keeps and returns; a real one in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sweep.made import Made
from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind, RunFolder

TWO = ("parallelism=fsdp", "world=2")


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
    assert says("rehearse", "layouts", "--only", "tp3")[1].splitlines()[-1] == "1 of 1 recipe failed"


def test_equal_recipes_are_trained_once(says, ranks):
    code, out, _ = says("rehearse", "+recipe=quickstart", *TWO, "optimizer.lr=1e-3,2e-3")
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
        "data=files data.files=/nowhere data.tokenizer=/nowhere/tokenizer.json init_from=/nowhere/weights",
        pytest.param("data=tokens data.folder=/nowhere checkpoint.load_from=/nowhere", marks=pytest.mark.full),
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


def test_a_folder_of_the_home_is_kept_there(says, here, ranks, monkeypatch):
    monkeypatch.setenv("HOME", str(here / "home"))
    code, _, _ = says("rehearse", "+recipe=quickstart", "--keep=~/kept")
    assert (code, (here / "home" / "kept").is_dir(), (here / "~").exists()) == (0, True, False)


def test_folders_of_failures_stay_and_those_of_others_go(says, ranks, temporary):
    ranks[1].add("ddp")
    code, out, _ = says("rehearse", "+sweeps=quickstart_layouts", "--only", "dp-")
    assert code == 1
    (folder,) = temporary.iterdir()
    (run,) = (folder / "reduced").iterdir()
    assert f"log of the rank that failed: {run}/logs/rank-1.log" in out


def test_no_folder_stays_where_the_plan_is_refused(says, temporary, monkeypatch):
    def refuse(*candidates, **how):
        raise ConfigError("parallelism.pipeline", 3, "planted", "try 2")

    monkeypatch.setattr("titanlab.cli.proofs.reduce_all", refuse)
    assert says("rehearse", "+recipe=quickstart")[0] == 2
    assert list(temporary.iterdir()) == []


@pytest.mark.full
def test_with_keep_all_folders_stay(says, here, ranks):
    says("rehearse", "+sweeps=quickstart_layouts", "--only", "dp-", "--keep", "kept")
    assert len(list((here / "kept" / "reduced").iterdir())) == len(ranks[0]) == 2


def test_the_result_as_json(says, ranks):
    ranks[1].add("ddp")
    code, out, _ = says("rehearse", "+sweeps=quickstart_layouts", "--json", "--only", "dp-")
    values = json.loads(out)
    states = {row["run"].partition("-")[0]: (row["state"], row["outcome"]) for row in values["rehearsals"]}
    assert (code, values["planned"], states) == (1, 2, {"ddp": ("failed", "crash"), "fsdp": ("ok", "done")})


@pytest.mark.full
def test_real_ranks_are_rehearsed(call_for_real):
    (rehearsed,) = call_for_real("rehearse", "--keep", "kept")["rehearsals"]
    assert (rehearsed["outcome"], rehearsed["processes"]) == ("done", 2)
    (run,) = Path("kept/reduced").iterdir()
    assert RunFolder(run).result().kind is OutcomeKind.DONE
    assert (run / "logs" / "rank-1.log").is_file()
