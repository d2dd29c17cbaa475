"""`titanlab plan --trace`: its table, its JSON and its exit code."""

from __future__ import annotations

import json

import pytest

from tests import tiny
from titanlab.cli import main
from titanlab.costs import TrafficRow
from titanlab.prove import TraceComparison
from titanlab.prove.declared import declared

RECIPE = ["+recipe=llama3_1_8b_8gpus", "cluster=h100"]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """`call("--rank", "0", parameters=11)`: exit code, standard output, standard error; the figures are planted."""
    monkeypatch.chdir(tmp_path)
    made = tiny.recipe(tmp_path, shard=2)
    asked = []

    def run(*arguments: str, **changed):
        def planted(recipe, ranks):
            import dataclasses

            asked.append((recipe.name, ranks))
            one = declared(made, 0)
            rows = (TrafficRow(axis="shard", kind="all_reduce", count=1, bytes=420, wire_bytes=735),)
            traced = dataclasses.replace(one, update_traffic=rows, **changed)
            return TraceComparison(recipe=made, notes=("a note",), pairs=((one, traced),))

        monkeypatch.setattr("titanlab.prove.trace", planted)
        code = main(["plan", "--trace", *RECIPE, *arguments])
        return (code, *capsys.readouterr(), asked)

    return run


def test_equal_figures_are_success(call):
    code, out, err, asked = call()
    assert (code, err, asked) == (0, "", [("llama3_1_8b_8gpus", None)])
    lines = out.splitlines()
    assert lines[0].endswith("dp_s2, one step of 1 rank traced")
    assert lines[1] == "a note"
    assert lines[-2] == "the optimizer of rank 0, for which nothing is declared: shard: 1 all_reduce 420 B"
    assert lines[-1].startswith("all ")


def test_a_difference_is_named_and_fails(call):
    code, out, _, _ = call("--rank", "0,1", parameters=11)
    assert code == 1
    assert out.splitlines()[-1].startswith("1 of ")
    assert out.splitlines()[-1].endswith(" figures differ: rank 0: parameters of its stages")


def test_ranks_are_those_that_are_named(call):
    assert call("--rank", "0,1")[3] == [("llama3_1_8b_8gpus", [0, 1])]


def test_json_has_every_figure(call):
    code, out, _, _ = call("--json", parameter_bytes=1)
    values = json.loads(out)
    assert (code, values["equal"], values["notes"]) == (1, False, ["a note"])
    assert [item["name"] for item in values["items"] if item["difference"]] == ["parameter bytes"]
