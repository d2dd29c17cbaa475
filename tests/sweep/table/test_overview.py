"""All sweeps of a folder of runs, one line each."""

import time

import pytest

from tests.sweep.made import Made, begin, end, train
from titanlab.sweep import overview
from titanlab.sweep.listing import Overview


def row_of(sweep, **given):
    values = {"runs": 1, "states": {"done": 1}, "dropped": 0, "updated": None, "folder": f"runs/{sweep}"}
    return {"sweep": sweep, **values, **given}


@pytest.mark.parametrize("made_first", [False, True])
def test_a_folder_without_runs_says_what_to_do(tmp_path, made_first):
    if made_first:
        (tmp_path / "runs" / "empty").mkdir(parents=True)
    found = overview(tmp_path / "runs")
    assert found.rows == []
    assert found.lines() == [
        f"no runs under {tmp_path / 'runs'}: submit a sweep (titanlab sweep), or say where runs are (--runs FOLDER)"
    ]


def test_sweeps_are_counted_by_how_their_runs_ended(tmp_path):
    made = Made(tmp_path / "runs", "first")
    for place, kind in enumerate(["oom", "done", "done"]):
        begin(run := made.run(f"r{place}", seed=place))
        train(run)
        end(run, kind)
    begin(running := made.run("running", seed=10))
    train(running)
    made.run("waiting", seed=11)
    (broken := made.run("broken", seed=12)).path.joinpath("status.json").write_text("{")
    assert broken.path.is_dir()
    made.drop("rule", "no", parallelism="tp3")
    made.drop("where", "no", parallelism="tp5")
    (found,) = overview(tmp_path / "runs").rows
    assert {key: value for key, value in found.items() if key != "updated"} == {
        "sweep": "first",
        "runs": 6,
        "states": {"done": 2, "oom": 1, "prepared": 1, "running": 1, "unreadable": 1},
        "dropped": 2,
        "folder": str(tmp_path / "runs" / "first"),
    }
    # As one reads it: ends first, then what is under way.
    assert list(found["states"]) == ["done", "oom", "prepared", "running", "unreadable"]


def test_the_sweep_that_was_heard_of_last_is_first(tmp_path):
    times = {"new": time.time() - 1000, "middle": time.time() - 2000, "old": time.time() - 3000}
    for name, updated in times.items():
        begin(run := Made(tmp_path / "runs", name).run("a"))
        # This host sees no process of another one.
        train(run, updated=updated, host="elsewhere")
    unread = Made(tmp_path / "runs", "unread").run("a")
    (unread.path / "status.json").write_text("{")
    # Made just now.
    Made(tmp_path / "runs", "waits").run("a")
    found = overview(tmp_path / "runs")
    assert [row["sweep"] for row in found.rows] == ["waits", "new", "middle", "old", "unread"]
    assert [row["updated"] for row in found.rows[1:]] == [*times.values(), None]


def test_a_run_whose_processes_were_all_killed_gets_its_result_from_whoever_looks(tmp_path):
    made = Made(tmp_path / "runs", "first")
    direct, queued = made.run("direct"), made.run("queued", seed=1)
    for run in (direct, queued):
        begin(run)
        # A process that is no more.
        train(run, updated=time.time() - 60, pid=2**22 + 1)
    # What becomes of it, its job's scheduler knows.
    made.submit(queued)
    (found,) = overview(tmp_path / "runs").rows
    assert found["states"] == {"crash": 1, "running": 1}
    assert direct.result().cause.startswith("its processes left no result: they were killed")
    assert queued.result() is None


def test_lines_leave_out_what_no_sweep_has():
    rows = [row_of("a", updated=1000.0), row_of("bcd", runs=12, states={"done": 10, "oom": 2})]
    assert Overview("runs", rows).lines(now=1075.0) == [
        "sweep  runs  of which        last heard of",
        "a         1  1 done               1:15 ago",
        "bcd      12  10 done, 2 oom",
    ]
    assert Overview("runs", [row_of("a", dropped=3)]).lines(now=0.0) == [
        "sweep  runs  of which  dropped",
        "a         1  1 done          3",
    ]


def test_a_sweep_whose_plan_is_damaged_hides_no_other(tmp_path):
    for name in ("first", "second"):
        begin(run := Made(tmp_path / "runs", name).run("r", seed=1))
        train(run)
        end(run, "done")
    (tmp_path / "runs" / "first" / "points.jsonl").write_text('{"point": ')
    rows = {row["sweep"]: row["states"] for row in overview(tmp_path / "runs").rows}
    assert rows == {"first": {"done": 1, "unreadable": 1}, "second": {"done": 1}}
