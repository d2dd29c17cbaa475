"""What a run's panel suggests at its end."""

from __future__ import annotations

import shlex

from tests import tiny
from titanlab.records import Outcome, OutcomeKind
from titanlab.train.recording import next_steps


def test_text_is_only_suggested_where_there_is_a_checkpoint_to_write_it_with(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path))
    run.tokenizer.mkdir(exist_ok=True)
    done = Outcome(kind=OutcomeKind.DONE, cause="", step=2, steps=2, metrics={})
    assert [line.split()[0] for line in next_steps(done, run)] == ["less"]
    step = run.checkpoints / "step-00000002"
    step.mkdir(parents=True)
    (step / "index.json").write_text("{}")
    assert next_steps(done, run)[0].startswith("titanlab generate ")


def test_a_folder_with_a_space_is_one_argument(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path / "two words"))
    for kind in (OutcomeKind.DONE, OutcomeKind.CANCELLED, OutcomeKind.OOM):
        for line in next_steps(Outcome(kind=kind, cause="", step=2, steps=2, metrics={}), run):
            (folder,) = (word for word in shlex.split(line) if "two words" in word)
            assert folder.startswith(str(run.path))
