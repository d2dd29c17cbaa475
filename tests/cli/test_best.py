"""`titanlab best` in a process: the answer, its JSON, and mistakes as one line."""

import json

import pytest

from tests.sweep.made import SUMMARY, Made, begin, end
from titanlab.costs import meter


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = Made(tmp_path / "runs")
    for number, (name, speed) in enumerate({"fsdp": 1000.0, "tp": 700.0}.items()):
        for repeat in range(3):
            run = sweep.run(name, repeat=repeat, shard=1 + number)
            begin(run)
            end(run, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: speed + repeat})
    failed = sweep.run("cp", shard=4)
    begin(failed, cores=8)
    end(failed, "oom", cause="no memory left")
    sweep.drop("rule", "must divide 4", parallelism="tp3")
    return sweep


def test_the_answer_comes_first(made, shown):
    lines = shown("best", "layouts").splitlines()
    assert lines[0].startswith("layouts: single is the fastest: 1,001 tokens/s per device, 42.8% more than dp_s2")
    assert lines[2].split()[:2] == ["1", "single"]
    assert "left out: 1 recipe" in lines
    assert any(line.endswith("no run is done: 1 oom") for line in lines)
    assert "1 point dropped: 1 by rule" in lines


def test_the_ranking_as_json(made, shown):
    values = json.loads(shown("best", str(made.folder.path), "--by", "memory", "--max-memory", "76", "--json"))
    assert (values["sweep"], values["by"], values["max_memory_gib"]) == ("layouts", "memory", 76.0)
    assert values["winner"] is None
    assert [recipe["left_out"] is None for recipe in values["recipes"]] == [True, True, False]
