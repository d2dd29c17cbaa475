"""A position that no run saves is damage of its checkpoint: the run goes on from the checkpoint before it."""

import json

import pytest

from tests import tiny
from titanlab.checkpoint import DamagedCheckpoint
from titanlab.checkpoint.blocks import checksum
from titanlab.checkpoint.folders import step_folder
from titanlab.checkpoint.index import signed
from titanlab.launch import pass_over_damaged
from titanlab.records import OutcomeKind


@pytest.fixture
def saved(tmp_path):
    """A recipe of four steps, and its run, which has saved steps 1 and 2."""
    made = tiny.recipe(tmp_path, steps=2, every=1, keep=0)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    (run.path / "result.json").unlink()
    return tiny.changed(made, steps=4, every=0), run


def spoil(run, step, change):
    """Change the position in a checkpoint, with checksums that fit."""
    folder = step_folder(run.checkpoints, step)
    position = json.loads((folder / "position.json").read_bytes())
    change(position)
    content = json.dumps(position).encode()
    (folder / "position.json").write_bytes(content)
    index = json.loads((folder / "index.json").read_bytes())
    del index["checksum"]
    index["position"] = {"bytes": len(content), "checksum": f"{checksum(content):016x}"}
    (folder / "index.json").write_bytes(signed(json.dumps(index, separators=(",", ":")).encode()))


@pytest.mark.parametrize("samples", ["x", -1, None, [], {}, 10**30, 2.0, True])
def test_samples_that_are_no_number_are_found_before_the_ranks_start(saved, samples):
    made, run = saved
    spoil(run, 2, lambda position: position["data"].update(samples=samples))
    lines = []
    pass_over_damaged(run, made, lines.append)
    (line,) = lines
    assert line.startswith("goes on from step 1: step-00000002 its position.json has data=")
    assert "its samples must be a whole number from 0; it is kept as step-00000002.damaged" in line


@pytest.mark.parametrize("name", ["samples", "seed", "fingerprint"])
def test_what_only_the_data_can_judge_is_found_by_the_ranks(saved, name):
    made, run = saved
    spoil(run, 2, lambda position: position["data"].pop(name))
    assert tiny.as_rank(made, tiny.begin(made, run)).kind is OutcomeKind.DONE
    assert [row["step"] for row in run.metrics("train")][-3:] == [2, 3, 4]
    log = (run.logs / "rank-0.log").read_text()
    assert f"goes on from step 1: step-00000002 its position.json has data.{name}=null: must be" in log
    assert "Traceback" not in log


def test_without_an_older_checkpoint_it_is_one_line(saved):
    made, run = saved
    for step in (1, 2):
        spoil(run, step, lambda position: position["data"].pop("samples"))
    with pytest.raises(DamagedCheckpoint, match=r"its position\.json has data\.samples=null: must be"):
        tiny.as_rank(made, tiny.begin(made, run))
