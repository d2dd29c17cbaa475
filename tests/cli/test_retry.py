"""`titanlab retry`: which runs are chosen, what is said of them, and another layout."""

from __future__ import annotations

import pytest

from tests.cli.test_resume import ended
from tests.sweep.conftest import slurm, small_package  # noqa: F401
from tests.sweep.made import Made, begin, end
from titanlab.cli import main
from titanlab.cli.verbs import call
from titanlab.errors import ConfigError
from titanlab.launch.launchers_schema import Slurm
from titanlab.sweep import SweepFolder


@pytest.fixture
def says(here, capsys):
    """A sweep of a run that is done, one that has crashed and one that ran out of memory; what `retry` says of it."""
    made = Made(here / "runs")
    names = {}
    for name, kind in {"good": "done", "bad": "crash", "big": "oom"}.items():
        run = made.run(name)
        begin(run)
        end(run, kind)
        names[name] = run.path.name

    def call(*arguments):
        before = sorted(path for path in (here / "runs").rglob("*") if not path.name.startswith("."))
        code = main(["retry", "layouts", *arguments])
        assert sorted(path for path in (here / "runs").rglob("*") if not path.name.startswith(".")) == before
        out, err = capsys.readouterr()
        for name, folder in names.items():
            out, err = out.replace(folder, name), err.replace(folder, name)
        return code, out, err

    return call


@pytest.mark.parametrize(
    ("arguments", "out"),
    [
        ("--all-failed", "bad: crash\nbig: oom\n2 runs would be submitted\n"),
        ("--outcome oom", "big: oom\n1 run would be submitted\n"),
        ("--outcome oom,,hang", "big: oom\n1 run would be submitted\n"),
        ("--stale", "bad: crash, anew\nbig: oom, anew\ngood: done, anew\n3 runs would be submitted\n"),
        ("--stale --outcome crash", "bad: crash, anew\n1 run would be submitted\n"),
        ("bad bad", "bad: crash\n1 run would be submitted\n"),
        (
            "good --all-failed",
            "good is left alone: done\nnothing of layouts is to be done again; titanlab status layouts shows its runs\n",
        ),
    ],
)
def test_a_dry_run_names_the_runs_and_submits_none(says, arguments, out):
    assert says(*arguments.split(), "--dry-run") == (0, out, "")


def test_failed_points_are_retried_at_another_layout(tmp_path, slurm, shown):  # noqa: F811
    run = ended(tmp_path, launch=Slurm(minutes=10), shard=4)
    sweep = ["single", "--runs", str(run.path.parent.parent), "--all-failed"]
    with pytest.raises(
        ConfigError, match=rf"must be a multiple of the 5 data-parallel processes.*\(in {run.path.name}\)"
    ):
        call(["retry", *sweep, "parallelism.shard=5"])
    with pytest.raises(ConfigError, match="--stale=parallelism=fsdp_tp: starts runs from the beginning"):
        call(["retry", "single", "--runs", str(run.path.parent.parent), "--stale", "parallelism=fsdp_tp"])
    assert slurm.jobs() == {}
    assert "1 run submitted" in shown("retry", *sweep, "parallelism=fsdp_tp")
    (submission,) = SweepFolder(run.path.parent).submissions()
    assert submission.shape.processes == 4
    changed = submission.changes[run.path.name]["parallelism"]
    assert (changed["shard"], changed["tensor"]) == (2, 2)
