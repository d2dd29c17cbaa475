"""What sweeps ask of any launcher: ours on this host, and one of another package in its place."""

import importlib
import sys

import pytest

from tests.launch.third import install_third
from tests.sweep.conftest import quiet
from tests.sweep.stub_package import stub_package
from tests.sweep.studies import seeds, study
from tests.until import until
from titanlab import options
from titanlab.launch import launcher_named
from titanlab.launch.launchers_schema import Local
from titanlab.records import OutcomeKind
from titanlab.sweep import cancel, decide, look_at, sweep_folder, write_table
from titanlab.sweep.reconcile import reconcile
from titanlab.sweep.retry import retry
from titanlab.sweep.submit import submit


# tests/launch/local has jobs of `local` that run, are cancelled, and come later.
@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.full), "nohup"])
def launch(request, tmp_path, monkeypatch):
    """The config of a launcher that runs one job at a time."""
    if request.param == "local":
        yield Local(at_once=1)
        return
    installed = install_third(tmp_path)
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", str(installed))
    caches = (options._schema_modules, launcher_named)
    for cache in caches:
        cache.cache_clear()
    yield importlib.import_module("nohup_jobs.launch_schema").Nohup()
    for name in [name for name in sys.modules if name.startswith("nohup_jobs")]:
        del sys.modules[name]
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Jobs that train nothing: `stub(seconds)` says how long they take."""
    taken = sweep_folder.take_snapshot

    def of(seconds):
        package = stub_package(tmp_path / f"stub-{seconds}", seconds=seconds)
        monkeypatch.setattr(sweep_folder, "take_snapshot", lambda code: taken(code, package=package))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return of


def ran(folder):
    path = folder.path / "ran.txt"
    return sorted(line.split()[:3] for line in path.read_text().splitlines()) if path.exists() else []


def over(folder):
    # A retried job is noted as ended by its launcher a moment after its run has a result.
    return all(state.state == "ended" for state in reconcile(folder).values())


def test_jobs_are_submitted_once_run_and_collected(launch, stub, tmp_path):
    stub(0.1)
    wanted = study(tmp_path / "runs", [*seeds(2), {"shard": 2}], launch=launch)
    assert [each.action for each in decide(wanted)] == ["submit"] * 3
    submitted = submit(wanted, quiet)
    folder, names = submitted.folder, [each.run for each in submitted.decisions]
    assert [(new.shape.processes, len(new.runs)) for new in submitted.submissions] == [(1, 2), (2, 1)]
    assert submit(wanted, quiet).submissions == ()
    until(lambda: over(folder))
    # The other package's launcher starts a task for each rank, ours one for all.
    large = [["0", "1"]] if launch.kind == "local" else [["0", "2"], ["1", "2"]]
    tasks = {names[0]: [["0", "1"]], names[1]: [["0", "1"]], names[2]: large}
    assert ran(folder) == sorted([name, *place] for name, places in tasks.items() for place in places)
    rows = look_at(folder)()
    assert [(row["state"], row["outcome"], row["launcher"]) for row in rows] == [("ended", "done", launch.kind)] * 3
    assert {row["job_id"] for row in rows} == {new.job_id for new in submitted.submissions}
    assert {row["scheduler_state"] for row in rows} == {None}
    assert all(path.is_file() for path in write_table(rows, folder.name, tmp_path / "table"))
    assert [each.action for each in decide(wanted)] == ["done"] * 3


def test_what_runs_is_told_what_waits_does_not_start_and_both_can_be_done_again(launch, stub, tmp_path):
    stub(60.0)
    wanted = study(tmp_path / "runs", seeds(2), launch=launch)
    submitted = submit(wanted, quiet)
    folder, (first, second) = submitted.folder, [each.run for each in submitted.decisions]
    until(lambda: ran(folder))
    assert [each.action for each in decide(wanted)] == ["running", "queued"]
    done = cancel(folder, quiet)
    assert (done.stopping, done.withdrawn) == ([first], [second])
    until(lambda: over(folder))
    assert [folder.run(name).result().kind for name in (first, second)] == [OutcomeKind.CANCELLED] * 2
    assert [row[0] for row in ran(folder)] == [first]
    assert [each.action for each in submit(wanted, quiet).decisions] == ["ended"] * 2
    stub(0.1)
    assert len(retry(folder, quiet, outcomes=["cancelled"])) == 2
    until(lambda: over(folder) and len(ran(folder)) == 3)
    assert [folder.run(name).result().kind for name in (first, second)] == [OutcomeKind.DONE] * 2
