"""`titanlab resume`: what may change, through which launcher a run goes on, and from which checkpoint."""

import json
import re
import shutil
from dataclasses import asdict, replace

import pytest

from tests import tiny
from tests.sweep.conftest import slurm, small_package  # noqa: F401
from titanlab.checkpoint.folders import step_folder
from titanlab.cli import resume
from titanlab.cli.verbs import call
from titanlab.data import source
from titanlab.data.new_tokenizer import train_sentencepiece
from titanlab.data.schema import Files
from titanlab.errors import ConfigError
from titanlab.launch.job import Job
from titanlab.launch.launchers_schema import Local, Slurm
from titanlab.recipe import Cluster, to_mapping
from titanlab.records import Outcome, OutcomeKind, RunFolder, create_run, identify
from titanlab.sweep import SweepFolder
from titanlab.system import sweep_argument

NODES = Cluster(accelerator="cpu", device="cpu", peak_tflops=1.0, per_node=4, nodes=4)


def ended(tmp_path, *, launch, cluster=NODES, **given):
    """A run that was cancelled in its first attempt."""
    made = replace(tiny.recipe(tmp_path / "runs", **given), launch=launch, cluster=cluster)
    identity = identify(made, data="tiny", hardware="cpu")
    run = create_run(made.runs, sweep=made.sweep, name=made.name, identity=identity, config=to_mapping(made))
    run.begin_attempt(to_mapping(made), {})
    run.write_result(Outcome(kind=OutcomeKind.CANCELLED, attempt=1))
    return run


@pytest.mark.full
@pytest.mark.covering
def test_a_run_of_a_queue_goes_on_here_if_one_says_so(tmp_path):
    run = ended(tmp_path, launch=Slurm(threads=1, partition="far"), steps=2)
    assert call(["resume", str(run.path), "launch=local", "launch.threads=1"]) == 0
    assert (run.result().kind, run.result().step) == (OutcomeKind.DONE, 2)
    assert run.env()["launcher"] == "local"
    # It was born for the queue, and went on here.
    assert run.config()["launch"]["kind"] == "slurm"
    assert run.config(2)["launch"]["kind"] == "local"


@pytest.mark.parametrize("launch", [Slurm(minutes=10), Local()], ids=["slurm", "local"])
def test_a_run_goes_on_through_its_launcher_at_another_layout(tmp_path, slurm, shown, launch):  # noqa: F811
    run = ended(tmp_path, launch=launch, shard=4)
    arguments = ["launch=slurm", "launch.minutes=20"] if launch.kind == "local" else ["launch.minutes=20"]
    assert "job 101: 1 run of 2 processes" in shown("resume", str(run.path), "parallelism=ddp", "world=2", *arguments)
    flags = slurm.jobs()[101]["flags"]
    assert (flags["nodes"], flags["ntasks-per-node"], flags["time"]) == ("1", "2", "20")
    (submission,) = SweepFolder(run.path.parent).submissions()
    changed = submission.changes[run.path.name]
    assert set(changed) == {"world", "parallelism", "training"}
    # What the job's ranks will read: the new layout, the launcher of this submission, and all else as it was.
    job = Job(run=run, place=None, submission=submission, index=0)
    assert job.config()["parallelism"]["replicate"] == job.config()["world"] == 2
    assert job.config()["training"]["microbatch"] == 3
    assert job.config()["model"] == run.config()["model"]
    assert run.config()["parallelism"]["shard"] == 4
    # It waits now, and is not submitted twice.
    named = re.escape(sweep_argument(run.path.parent))
    with pytest.raises(ConfigError, match=f"is queued already; wait for its end, or titanlab cancel {named}$"):
        call(["resume", str(run.path)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            "parallelism.shard=12 parallelism.context=2 cluster.nodes=1",
            "world=24: is more than the cluster has, 1 node",
        ),
        ("launch.partition=fast", "launch.partition=fast: Slurm knows no such part"),
    ],
)
def test_a_changed_layout_is_checked_before_anything_is_submitted(tmp_path, slurm, arguments, told):  # noqa: F811
    run = ended(tmp_path, launch=Slurm(minutes=10), shard=4)
    with pytest.raises(ConfigError, match=re.escape(told)):
        call(["resume", str(run.path), *arguments.split()])
    assert slurm.jobs() == {}


def test_a_run_is_told_where_its_corpus_is_now(command, saved_run, tmp_path, monkeypatch):
    monkeypatch.setenv("TITANLAB_CACHE", str(tmp_path / "cache"))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text("".join(f"{name} {number} of this corpus\n" for number in range(200)))

    def files(first, second):
        return f"{tmp_path / first}:{tmp_path / second}"

    # The run, as one that was trained on these files with a tokenizer that is there.
    train_sentencepiece(
        [f"one {chr(97 + number % 26)} {number * 7919:x}" for number in range(999)], vocab_size=320, file=tmp_path / "t"
    )
    data = Files(files=files("a", "b"), tokenizer=str(tmp_path / "t"), validation_fraction=0.0)
    made = tiny.recipe(tmp_path / "others", shard=2)
    made = replace(made, data=data, model=replace(made.model, vocab_size=320))
    identity = identify(made, data=source.fingerprint(data), hardware="cpu")
    run = create_run(made.runs, name="toy", identity=identity, config=to_mapping(made))
    shutil.copytree(saved_run / "checkpoints", run.checkpoints, dirs_exist_ok=True)
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "d")
    (tmp_path / "e").symlink_to(tmp_path / "c")
    assert "a: matches no file" in command(f"resume {run.path}").err
    # Half of it is another corpus, and so is its other order.
    for places in (files("c", "c"), files("e", "d")):
        said = command(f"resume {run.path} data.files={places}")
        assert "is other data than the run has begun with" in said.err
        assert said.started == []
    said = command(f"resume {run.path} data.files={files('c', 'd')}")
    assert said.err == ""
    (resumed,) = said.started
    assert resumed.data.files == files("c", "d")


def test_what_may_change_is_changed(command, saved_run):
    (resumed,) = command(
        f"resume {saved_run} parallelism.shard=4 training.microbatch=1 tracker.kind=tensorboard"
    ).started
    assert (resumed.world, resumed.layout.shard, resumed.microbatch, resumed.tracker.kind) == (4, 4, 1, "tensorboard")
    (resumed,) = command(f"resume {saved_run} tracker=[wandb,tensorboard] tracker.wandb.mode=offline").started
    assert (resumed.tracker.kind, resumed.tracker.wandb.mode) == ("wandb+tensorboard", "offline")
    (resumed,) = command(f"resume {saved_run.name} --runs {saved_run.parent.parent}").started
    assert (resumed.world, resumed.runs) == (2, str(saved_run.parent.parent))


@pytest.mark.parametrize("chosen", [["{}", "--step", "3"], ["{}/checkpoints/step-3", "parallelism.shard=1"]])
def test_a_done_run_does_not_go_back_and_the_refusal_names_the_command_for_a_new_run(command, saved_run, chosen):
    run = RunFolder(saved_run)
    run.begin_attempt(run.config(), {})
    run.write_result(Outcome(kind=OutcomeKind.DONE, attempt=1, step=10, steps=10))
    said = command(["resume", *(text.format(run.path) for text in chosen)])
    checkpoint = run.checkpoints / "step-00000003"
    assert said.refusal["rule"] == "is a checkpoint of a run that is done: 10 steps"
    # Of a long path, the beginning.
    assert str(checkpoint).startswith(said.refusal["value"].removesuffix("..."))
    assert said.refusal["cure"] == f"for a new run from there: titanlab train --from {checkpoint}"
    assert run.attempts() == [1]


@pytest.mark.parametrize(
    ("chosen", "step"), [(["{}"], None), (["{}", "--step", "3"], 3), (["{}/checkpoints/step-00000003"], 3)]
)
def test_a_checkpoint_that_is_chosen_is_the_one_to_resume_from(saved_run, monkeypatch, chosen, step):
    run, given = RunFolder(saved_run), []

    def continue_run(run, recipe, ranks, console, *, checkpoint):
        given.append((run.path, checkpoint))
        return Outcome(kind=OutcomeKind.OOM)

    monkeypatch.setattr(resume, "continue_run", continue_run)
    # The exit code is that of the attempt's end.
    assert call(["resume", *(text.format(run.path) for text in chosen)]) == OutcomeKind.OOM.exit_code
    assert given == [(run.path, None if step is None else step_folder(run.checkpoints, step))]


def test_a_run_whose_folder_has_moved_goes_on_where_it_is(command, saved_run, tmp_path):
    moved = tmp_path / "archive" / "single" / saved_run.name
    moved.parent.mkdir(parents=True)
    saved_run.rename(moved)
    (resumed,) = command(f"resume {moved}").started
    assert resumed.runs == str(tmp_path / "archive")


def test_a_run_of_a_queue_goes_on_here_as_the_ranks_of_torchrun(command, tmp_path):
    run = ended(tmp_path, launch=Slurm(threads=3), shard=2)
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}
    (resumed,) = command(f"resume {run.path}", **ranks).started
    assert (resumed.world, resumed.launch) == (2, Local(threads=3))
    assert SweepFolder(run.path.parent).submissions() == []


def test_a_run_goes_on_with_the_settings_of_its_latest_submission(tmp_path, slurm):  # noqa: F811
    run = ended(tmp_path, launch=Slurm(minutes=10), shard=2)
    assert call(["resume", str(run.path), "launch.minutes=20", "launch.partition=large"]) == 0
    slurm.put(101, "CANCELLED")
    assert call(["resume", str(run.path), "launch.partition=normal"]) == 0
    flags = slurm.jobs()[102]["flags"]
    assert (flags["time"], flags["partition"]) == ("20", "normal")
    # What the run was made with.
    assert run.config()["launch"]["minutes"] == 10


def test_the_weights_that_a_run_first_started_with_may_be_gone_once_it_has_saved(command, saved_run):
    config = saved_run / "config.yaml"
    config.write_text(config.read_text().replace("init_from: null", "init_from: /nowhere/weights"))
    (resumed,) = command(f"resume {saved_run}").started
    assert resumed.init_from == "/nowhere/weights"
    (saved_run / "checkpoints" / "step-00000003").rename(saved_run / "checkpoints" / "step-00000003.part")
    assert command(f"resume {saved_run}").refusal["key"] == "init_from"


@pytest.mark.parametrize(
    "arguments",
    [
        "resume <run>",
        "train --from <run> optimizer.lr=0.1",
        "export <run> --into out",
        "parity <run> <run>-2",
        "repro <run> --dry-run",
    ],
)
def test_a_config_that_was_edited_by_hand_is_no_longer_the_runs(command, saved_run, arguments):
    """Its folder, its metrics and its result would have the name and the hash of a recipe that they are not of."""
    file = saved_run / "config.yaml"
    text = file.read_text()
    assert "  lr: 0.001\n" in text
    file.write_text(text.replace("  lr: 0.001\n", "  lr: 0.1\n"))
    (saved_run / "result.json").write_text(
        json.dumps(asdict(Outcome(kind=OutcomeKind.DONE, attempt=1, step=3, steps=3)))
    )
    row = {"kind": "train", "attempt": 1, "step": 3, "tokens_seen": 5, "time": 1.0, "loss": 1.0, "grad_norm": 1.0}
    (saved_run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copytree(saved_run, f"{saved_run}-2")
    said = command(arguments.replace("<run>", str(saved_run)))
    assert said.err == (
        f"error: optimizer.lr=0.1: the run was made with 0.001, by its identity.json; set it back in {file}; "
        "another value needs a run of its own: titanlab train --from\n"
    )
