"""`titanlab plan`: what it prints, its JSON, what it says about impossible requests; and `--trace`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests import tiny
from titanlab.costs import TrafficRow
from titanlab.distributed import Host
from titanlab.plan import search
from titanlab.prove import TraceComparison
from titanlab.prove.declared import declared

VERB = "plan"
RECIPE = ["+recipe=llama3_1_8b_8gpus", "cluster=h100"]
TIED = ["+recipe=llama3_2_1b_8gpus", "cluster=h100"]


@pytest.fixture
def plan(tmp_path, monkeypatch, say):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return say


def test_the_table_has_a_row_for_each_recipe_and_the_arguments_of_the_first(plan):
    code, out, err = plan(*RECIPE, "world=8", "--top", "3")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    kept = "5 % of it left free for CUDA, NCCL and errors"
    whole = "7.591 PFLOP a step; the model takes 32.1 GB and its optimizer 64.2 GB"
    assert lines[0].startswith(f"8.03B parameters on 8 H100 SXMs (80 GB each, {kept}); ")
    assert whole in lines[0]
    assert whole in plan(*RECIPE, "--explain")[1].splitlines()
    assert lines[1].split()[:3] == ["layout", "mb", "AC"] or "schedule" in lines[1]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert lines[5].startswith("the first: parallelism.pipeline=")


def test_why_has_a_sentence_for_each_and_what_was_left_out(plan):
    _, out, _ = plan(*RECIPE, "world=16", "--top", "3", "--why")
    assert "1 is the fastest that fits: " in out
    words = ("slower", "faster", "as long")
    others = [line for line in out.splitlines() if line.startswith(("2 is ", "3 is ", "2 takes ", "3 takes "))]
    assert len(others) == 2
    assert all(any(word in line for word in words) for line in others)
    assert "layouts that no recipe can have, by rule:" in out


def test_json_has_the_same_in_bytes_and_seconds(plan):
    """Parameters and two averages in float32; 6 FLOPs a weight that multiplies, and attention."""
    code, out, _ = plan(*RECIPE, "world=8", "--top", "2", "--json")
    values = json.loads(out)
    assert code == 0
    assert (values["world"], len(values["best"])) == (8, 2)
    assert values["model_bytes"] == pytest.approx(4 * 8.03e9, rel=1e-3)
    assert values["optimizer_bytes"] == pytest.approx(8 * 8.03e9, rel=1e-3)
    weights, attention = 6 * (8.03e9 - 128256 * 4096), 12 * 32 * 4096 * 8192
    assert values["step_flops"] == pytest.approx(16 * 8192 * (weights + attention), rel=1e-3)
    first = values["best"][0]
    assert first["allocated_bytes"] == sum(first["memory"].values())
    assert first["step_seconds"] == pytest.approx(sum(first["parts"].values()))
    assert first["reserved_bytes"] <= values["limit_bytes"]
    # The arguments of the first make a recipe with the same estimate.
    account = json.loads(plan(*RECIPE, *first["overrides"], "--explain", "--json")[1])
    assert account["layout"] == first["layout"]
    # The ranking's pipeline is within 1 % of the simulation that --explain does.
    assert account["step_seconds"] == pytest.approx(first["step_seconds"], rel=0.01)
    assert max(rank["allocated_bytes"] for rank in account["ranks"]) == first["allocated_bytes"]


@pytest.mark.full
@pytest.mark.covering
def test_machines_are_compared_in_one_table_the_fastest_first(plan):
    code, out, err = plan(*RECIPE, "world=16", "training.deterministic=true", "--vary", "cluster=a100_40gb,h200")
    assert (code, err) == (0, "")
    assert out.startswith("a100_40gb: 8.03B parameters on 16 A100 SXM 40 GBs")
    assert out.count("training.deterministic=true: its effect on the time of a step is not known") == 1
    assert "the first on h200: parallelism.pipeline=" in out
    table = [line.split()[0] for line in out.splitlines() if line.split()[0] in ("a100_40gb", "h200")]
    assert table == ["h200", "a100_40gb"]
    machines = ["--vary", "cluster=a100_40gb,h100_25gbe,h100,h200"]
    values = json.loads(plan(*RECIPE, "world=16", *machines, "--json")[1])
    seconds = {name: machine["best"][0]["step_seconds"] for name, machine in values.items()}
    assert seconds["h200"] < seconds["h100"] < min(seconds["a100_40gb"], seconds["h100_25gbe"])
    alone = json.loads(plan(*RECIPE, "world=16", "--top", "1", "--json")[1])
    assert values["h100"] == alone
    assert values["a100_40gb"]["device"] == "A100 SXM 40 GB"


def test_some_options_of_a_group_vary_with_machines(plan):
    asked = "precision=float8_rowwise,cluster=a100_80gb,h100,compile"
    values = json.loads(plan(*TIED, "world=1", "--vary", asked, "--top", "30", "--json")[1])
    assert set(values) == {"a100_80gb", "h100"}
    for machine in values.values():
        assert {each["precision"] for each in machine["best"]} <= {"bf16", "float8_rowwise"}
        assert {each["compile"] for each in machine["best"]} <= {"off", "block", "block+loss"}
        assert len({each["compile"] for each in machine["best"]}) > 1
    # A model that no A100 has room for.
    large = ["+recipe=llama3_1_405b_512gpus", "cluster=h100", "world=8", "training.global_batch=8"]
    code, out, _ = plan(*large, "--vary", "cluster=a100_80gb")
    assert code == 2
    assert [line.split()[:4] for line in out.splitlines()][-1] == ["a100_80gb", "no", "layout", "fits"]


def test_explain_accounts_for_one_recipe(plan, tmp_path):
    code, out, _ = plan(
        *RECIPE, "parallelism.shard=4", "parallelism.pipeline=2", "schedule=1f1b", "--explain", "--plot", "line.svg"
    )
    assert code == 0
    for text in ("parameters", "optimizer", "activations", "allocated", "bubble", "reduce_scatter", "peak in flight"):
        assert text in out
    assert "rank 0 F0" in out
    assert (tmp_path / "line.svg").read_text().count("rank 1")


def test_what_varies_is_shown(plan):
    lines = plan(*TIED, "world=1", "--vary", "precision", "--top", "40")[1].splitlines()
    assert "precision" in lines[1].split()


def test_nothing_fits_and_what_would(plan):
    code, out, _ = plan(*TIED, "cluster.memory_gb=8", "world=1", "training.global_batch=8")
    assert code == 2
    assert "no layout works" in out
    assert "the smallest needs" in out
    assert "it fits on " in out


def test_no_layout_is_legal_and_the_nearest_that_is(plan):
    code, out, _ = plan(*TIED, "world=31")
    assert code == 2
    assert "the nearest smaller world that works: world=16" in out
    assert "or another batch: training.global_batch=31" in out


def test_local_is_this_host(plan, monkeypatch):
    monkeypatch.setattr(search, "this_host", lambda: Host(accelerator="cpu", device="cpu", count=4))
    code, out, err = plan("model=debug", "cluster=local", "world=2", "--top", "1")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert " on 2 CPUs (memory not known)" in lines[0]
    assert lines[1].startswith("no rates of these CPUs were measured")
    monkeypatch.setattr(search, "this_host", lambda: Host(accelerator="cuda", device="NVIDIA H200", count=8))
    assert " on 8 H200 SXMs" in plan("model=debug", "cluster=local", "world=8", "--top", "1")[1]
    code, _, err = plan("model=debug", "cluster=local", "world=2", "launch=slurm")
    assert code == 2
    assert "cluster.accelerator=auto: is whatever a node has" in err


@pytest.fixture
def trace(tmp_path, monkeypatch, plan):
    """`trace("--rank", "0", parameters=11)`: as `plan`, and what was asked for; the figures are planted."""
    made, asked = tiny.recipe(tmp_path, shard=2), []

    def call(*words: str, **changed):
        def planted(recipe, ranks):
            asked.append((recipe.name, ranks))
            one = declared(made, 0)
            rows = (TrafficRow(axis="shard", kind="all_reduce", count=1, bytes=420, wire_bytes=735),)
            traced = replace(one, update_traffic=rows, **changed)
            return TraceComparison(recipe=made, notes=("a note",), pairs=((one, traced),))

        monkeypatch.setattr("titanlab.prove.trace", planted)
        return *plan("--trace", *RECIPE, *words), asked

    return call


def test_equal_figures_are_success(trace):
    code, out, err, asked = trace()
    assert (code, err, asked) == (0, "", [("llama3_1_8b_8gpus", None)])
    lines = out.splitlines()
    assert lines[0].endswith("dp_s2, one step of 1 rank traced")
    assert lines[1] == "a note"
    assert lines[-2] == "the optimizer of rank 0, for which nothing is declared: shard: 1 all_reduce 420 B"
    assert lines[-1].startswith("all ")


def test_a_difference_is_named_and_fails(trace):
    code, out, _, _ = trace("--rank", "0,1", parameters=11)
    assert code == 1
    assert out.splitlines()[-1].startswith("1 of ")
    assert out.splitlines()[-1].endswith(" figures differ: rank 0: parameters of its stages")


def test_ranks_are_those_that_are_named(trace):
    assert trace("--rank", "0,1")[3] == [("llama3_1_8b_8gpus", [0, 1])]


def test_json_has_every_figure(trace):
    code, out, _, _ = trace("--json", parameter_bytes=1)
    values = json.loads(out)
    assert (code, values["equal"], values["notes"]) == (1, False, ["a note"])
    assert [item["name"] for item in values["items"] if item["difference"]] == ["parameter bytes"]
