"""`titanlab resume` runs where it is typed, wherever the run was born."""

from dataclasses import replace

from tests import tiny
from titanlab.cli import resume
from titanlab.launch.slurm_schema import Slurm
from titanlab.recipe.recipe import to_mapping
from titanlab.records.identity import identify
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import create_run


def test_a_run_of_a_queue_goes_on_here(tmp_path):
    made = replace(tiny.recipe(tmp_path, steps=2), launch=Slurm(threads=1, partition="far"))
    identity = identify(made, data="tiny", hardware="cpu")
    run = create_run(made.runs, sweep=made.sweep, name=made.name, identity=identity, config=to_mapping(made))
    assert resume.main([str(run.path)]) == 0
    assert (run.result().kind, run.result().step) == (OutcomeKind.DONE, 2)
    assert run.env()["launcher"] == "local"
    # It was born for the queue, and went on here with that many threads.
    assert run.config()["launch"]["kind"] == "slurm"
    assert run.config(1)["launch"] == {"kind": "local", "threads": 1, "at_once": None}
