"""`titanlab train --from RUN`: a new run from another one's checkpoint, which says where it comes from."""

import re

import pytest
import yaml

from tests import tiny
from titanlab.cli.verbs import call
from titanlab.errors import ConfigError
from titanlab.recipe import from_mapping
from titanlab.records import Outcome, OutcomeKind, list_runs
from titanlab.sweep import SweepFolder, look_at, row_details


@pytest.fixture(scope="module")
def parent(pool, tmp_path_factory):
    """A run of six steps that is done, with checkpoints of steps 4 and 6."""
    made = tiny.recipe(tmp_path_factory.mktemp("parent") / "runs", steps=6, every=4)
    run = tiny.begin(made)
    pool.run(1, tiny.as_rank, made, run)
    assert run.result().kind is OutcomeKind.DONE
    return run


def losses(run):
    return [(row["step"], row["loss_metrics/global_avg_loss"]) for row in run.metrics("train")]


def test_the_refusal_to_train_longer_names_the_command_that_does(parent, capsys):
    with pytest.raises(ConfigError) as refused:
        call(["resume", str(parent.path), "training.steps=8"])
    command = re.search(r"titanlab train --from (\S+) (\S+);", str(refused.value))
    assert command[2] == "training.steps=8"
    assert call(["train", "--from", command[1], command[2]]) == 0
    said = capsys.readouterr().out
    assert f"new run from step 6 of single/{parent.path.name}" in said
    # The rate is ten per cent of the peak at its last step; a longer cosine has more there.
    assert "the schedule spans steps 1 to 8 (before: 1 to 6); step 6 had 0.0001, step 7 gets 0.00" in said
    (child,) = [run for run in list_runs(parent.path.parent.parent) if run.path != parent.path]
    assert child.parent() == (f"single/{parent.path.name}", 6)
    assert (child.result().kind, child.result().step, child.config()["training"]["steps"]) == (OutcomeKind.DONE, 8, 8)
    assert [step for step, _ in losses(child)] == [7, 8]
    assert parent.parent() is None
    # The same command again is the same run, and there is nothing left to do.
    assert call(["train", "--from", command[1], command[2]]) == 0
    assert child.attempts() == [1]
    rows = {row["run"]: row for row in look_at(SweepFolder(parent.path.parent))()}
    assert (rows[child.path.name]["parent_run"], rows[child.path.name]["parent_step"]) == child.parent()
    assert rows[parent.path.name]["parent_run"] is None
    assert ("began from", f"step 6 of single/{parent.path.name}") in row_details(rows[child.path.name])


def test_the_recipe_of_a_new_run_is_shown_and_nothing_is_started(command, parent):
    said = command(f"train --from {parent.path} training.steps=8 --cfg job")
    assert (said.code, said.err, said.started) == (0, "", [])
    recipe = from_mapping(yaml.safe_load(said.out))
    assert (recipe.training.steps, recipe.model) == (8, from_mapping(parent.config()).model)
    assert recipe.checkpoint.load_from.endswith("step-00000006")


def test_another_precision_from_an_earlier_checkpoint_and_on_another_layout(command, parent, monkeypatch):
    started = []
    done = Outcome(kind=OutcomeKind.DONE)
    monkeypatch.setattr("titanlab.cli.resume.execute", lambda ready, console: started.append(ready.recipe) or done)
    said = command(f"train --from {parent.path}/checkpoints/step-4 precision=bf16 parallelism=fsdp world=2 name=half")
    assert said.code == 0, said.err
    (recipe,) = started
    assert (recipe.precision.kind, recipe.layout.label, recipe.name) == ("bf16", "dp_s2", "half")
    assert recipe.checkpoint.load_from.endswith(f"{parent.path.name}/checkpoints/step-00000004")
    assert recipe.optimizer.schedule.warmup_steps == 2
