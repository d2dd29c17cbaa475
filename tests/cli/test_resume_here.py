"""`titanlab resume` goes through the launcher that submitted the run, or runs where it is typed."""

import re
from dataclasses import replace

import pytest

from tests import tiny
from tests.sweep.conftest import slurm, small_package  # noqa: F401
from titanlab.cli import resume, retry
from titanlab.cluster.schema import Cluster
from titanlab.errors import ConfigError
from titanlab.launch.job.job import Job
from titanlab.launch.local_schema import Local
from titanlab.launch.slurm_schema import Slurm
from titanlab.recipe.recipe import to_mapping
from titanlab.records.identity import identify
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import create_run
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.terminal.paths import sweep_argument

NODES = Cluster(accelerator="cpu", device="cpu", peak_tflops=1.0, per_node=4, nodes=4)


def ended(tmp_path, *, launch, cluster=NODES, **given):
    """A run that was cancelled in its first attempt."""
    made = replace(tiny.recipe(tmp_path / "runs", **given), launch=launch, cluster=cluster)
    identity = identify(made, data="tiny", hardware="cpu")
    run = create_run(made.runs, sweep=made.sweep, name=made.name, identity=identity, config=to_mapping(made))
    run.begin_attempt(to_mapping(made), {})
    run.write_result(Outcome(kind=OutcomeKind.CANCELLED, attempt=1))
    return run


def test_a_run_of_a_queue_goes_on_here_if_one_says_so(tmp_path):
    run = ended(tmp_path, launch=Slurm(threads=1, partition="far"), steps=2)
    assert resume.main([str(run.path), "launch=local", "launch.threads=1"]) == 0
    assert (run.result().kind, run.result().step) == (OutcomeKind.DONE, 2)
    assert run.env()["launcher"] == "local"
    # It was born for the queue, and went on here.
    assert run.config()["launch"]["kind"] == "slurm"
    assert run.config(2)["launch"]["kind"] == "local"


@pytest.mark.parametrize("launch", [Slurm(minutes=10), Local()], ids=["slurm", "local"])
def test_a_run_goes_on_through_its_launcher_at_another_layout(tmp_path, slurm, capsys, launch):  # noqa: F811
    run = ended(tmp_path, launch=launch, shard=4)
    arguments = ["launch=slurm", "launch.minutes=20"] if launch.kind == "local" else ["launch.minutes=20"]
    assert resume.main([str(run.path), "parallelism=ddp", "world=2", *arguments]) == 0
    assert "job 101: 1 run of 2 processes" in capsys.readouterr().out
    flags = slurm.jobs()[101]["flags"]
    assert (flags["nodes"], flags["ntasks-per-node"], flags["time"]) == ("1", "2", "20")
    (submission,) = SweepFolder(run.path.parent).submissions()
    changed = submission.changes[run.path.name]
    assert set(changed) == {"world", "parallelism", "training"}
    # What the job's ranks will read: the new layout, the launcher of this submission, and all else as it was.
    job = Job(run=run, place=None, token="", index=0, launch=submission.launch, changes=changed)
    assert job.config()["parallelism"]["replicate"] == job.config()["world"] == 2
    assert job.config()["training"]["microbatch"] == 3
    assert job.config()["model"] == run.config()["model"]
    assert run.config()["parallelism"]["shard"] == 4
    # It waits now, and is not submitted twice.
    named = re.escape(sweep_argument(run.path.parent))
    with pytest.raises(ConfigError, match=f"is queued already; wait for its end, or titanlab cancel {named}$"):
        resume.main([str(run.path)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("parallelism.shard=5", "training.global_batch=12: a run keeps it, and it must be a multiple of the 5"),
        ("parallelism.tensor=3", "parallelism.tensor=3: "),
        ("parallelism.shard=12 parallelism.context=2 cluster.nodes=1", "world=24: is more than the cluster's 1 nodes"),
        ("launch.partition=fast", "launch.partition=fast: Slurm knows no such part"),
        ("cluster=local", "cluster.accelerator=auto: is whatever this host has"),
    ],
)
def test_a_changed_layout_is_checked_before_anything_is_submitted(tmp_path, slurm, arguments, told):  # noqa: F811
    run = ended(tmp_path, launch=Slurm(minutes=10), shard=4)
    with pytest.raises(ConfigError, match=re.escape(told)):
        resume.main([str(run.path), *arguments.split()])
    assert slurm.jobs() == {}


def test_failed_points_are_retried_at_another_layout(tmp_path, slurm, capsys):  # noqa: F811
    run = ended(tmp_path, launch=Slurm(minutes=10), shard=4)
    sweep = ["single", "--runs", str(run.path.parent.parent), "--all-failed"]
    with pytest.raises(
        ConfigError, match=rf"must be a multiple of the 5 data-parallel processes.*\(in {run.path.name}\)"
    ):
        retry.main([*sweep, "parallelism.shard=5"])
    with pytest.raises(ConfigError, match="--stale=parallelism=fsdp_tp: starts runs from the beginning"):
        retry.main(["single", "--runs", str(run.path.parent.parent), "--stale", "parallelism=fsdp_tp"])
    assert slurm.jobs() == {}
    assert retry.main([*sweep, "parallelism=fsdp_tp"]) == 0
    assert "1 run submitted" in capsys.readouterr().out
    (submission,) = SweepFolder(run.path.parent).submissions()
    assert submission.shape.processes == 4
    changed = submission.changes[run.path.name]["parallelism"]
    assert (changed["shard"], changed["tensor"]) == (2, 2)
