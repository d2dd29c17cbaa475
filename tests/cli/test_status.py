"""`titanlab status` as a person types it."""

import json

import pytest

from tests.sweep.made import Made, begin, end, train


@pytest.fixture
def made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = Made(tmp_path / "runs")
    done = sweep.run("fsdp", shard=2)
    begin(done)
    end(done)
    failed = sweep.run("tp", tensor=2)
    begin(failed)
    train(failed)
    trace = "Traceback (most recent call last):\n  File …\nValueError: boom"
    end(failed, "crash", rank=1, cause="ValueError: boom", traceback=trace, exit_code=1)
    killed = sweep.run("cp", context=2)
    begin(killed)
    (killed.logs / "rank-1.log").write_text("".join(f"line {number}\n" for number in range(100)))
    end(killed, "oom", rank=1, cause="killed by SIGKILL", exit_code=-9, step=0)
    sweep.drop("rule", "must divide 4 heads", parallelism="tp3")
    return sweep


def test_all_sweeps(made, shown):
    other = Made(made.folder.path.parent, "other")
    other.run("a")
    lines = shown("status").splitlines()
    assert lines[0].split() == ["sweep", "runs", "of", "which", "dropped", "last", "heard", "of"]
    words = {line.split()[0]: line for line in lines[1:]}
    assert "1 done, 1 oom, 1 crash" in " ".join(words["layouts"].split())
    assert "1 prepared" in words["other"]
    rows = json.loads(shown("status", "--json"))
    assert {row["sweep"]: row["states"] for row in rows} == {
        "layouts": {"done": 1, "crash": 1, "oom": 1},
        "other": {"prepared": 1},
    }


def test_without_runs(tmp_path, monkeypatch, shown):
    monkeypatch.chdir(tmp_path)
    assert shown("status").startswith("no runs under runs: ")


def test_one_sweep(made, shown):
    lines = shown("status", "layouts").splitlines()
    assert lines[0] == "layouts"
    assert "3 runs: 1 done, 1 oom, 1 crash" in lines
    assert any(line.endswith("crash, rank 1, step 4: ValueError: boom") for line in lines)
    # By its folder too, and watching what has ended ends.
    assert shown("status", str(made.folder.path)).splitlines() == lines
    assert "3 runs: 1 done" in shown("status", "layouts", "--watch")


def test_rows_as_json(made, shown):
    rows = json.loads(shown("status", "layouts", "--json"))
    assert [row["outcome"] for row in rows] == ["done", "crash", "oom", "infeasible"]
    assert [row["point.parallelism"] for row in rows] == ["fsdp", "tp", "cp", "tp3"]


def test_a_failed_run_shows_its_ranks_own_traceback(made, shown):
    said = shown("status", "layouts", "tp")
    assert "traceback of rank 1:\nTraceback (most recent call last):" in said
    assert said.rstrip().endswith("ValueError: boom")
    assert "  cause       ValueError: boom\n" in said
    (row,) = json.loads(shown("status", "layouts", "tp", "--json"))
    assert row["traceback"].endswith("ValueError: boom")


def test_one_that_was_killed_shows_the_end_of_its_log(made, shown):
    said = shown("status", "layouts", "cp")
    assert said.rstrip().endswith("line 98\nline 99")
    assert "line 70\n" in said
    assert "line 69\n" not in said


def test_one_that_is_done_shows_no_traceback(made, shown):
    said = shown("status", "layouts", "fsdp")
    assert "traceback" not in said
    assert "  speed       1,000 tokens/s per device, MFU 41.5%\n" in said
