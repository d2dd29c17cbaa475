"""`titanlab cancel`: what is said of the runs, and which are meant; tests/sweep/test_retry.py ends their jobs."""

import pytest

from tests.sweep.conftest import names, slurm, small_package, sweep  # noqa: F401
from tests.sweep.made import Made, begin, end
from titanlab.cli import main


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A sweep of a run that is done, one that failed, and one that was never started."""
    monkeypatch.chdir(tmp_path)
    made = Made(tmp_path / "runs")
    for name, kind in {"good": "done", "bad": "crash", "new": None}.items():
        run = made.run(name)
        if kind is not None:
            begin(run)
            end(run, kind)
    return made


def test_running_waiting_and_ended_runs_are_counted(slurm, sweep, shown):  # noqa: F811
    runs = ["--runs", str(sweep.path.parent)]
    assert shown("cancel", "layouts", *runs) == (
        "layouts: 1 running, which save and end, 1 waiting, which will not start, 3 ended before\n"
    )
    # It has not ended yet, and what waited has.
    assert shown("cancel", str(sweep.path)) == "layouts: 1 running, which save and end, 4 ended before\n"


def test_of_a_sweep_that_has_ended_nothing_is_cancelled(made, capsys):
    good, bad = (point["run"] for point in made.points[:2])
    before = {path: path.read_bytes() for path in made.folder.path.rglob("result.json")}
    assert main(["cancel", "layouts", good, bad]) == 0
    assert capsys.readouterr() == ("layouts: 2 ended before\n", "")
    assert {path: path.read_bytes() for path in made.folder.path.rglob("result.json")} == before


def test_a_sweep_without_runs(tmp_path, monkeypatch, shown):
    monkeypatch.chdir(tmp_path)
    Made(tmp_path / "runs").drop("rule", "no", seed=1)
    assert shown("cancel", "layouts") == "layouts: no runs\n"
