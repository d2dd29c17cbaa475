"""Damaged files of checkpoints: each is found before training, and the run goes on as if the checkpoint never was."""

import os
import re
import shutil

import pytest
import torch

from tests import tiny
from titanlab.checkpoint import DamagedCheckpoint, latest
from titanlab.checkpoint.folders import step_folder
from titanlab.distributed import ALONE, joined
from titanlab.launch import pass_over_damaged
from titanlab.prove.parity import trace
from titanlab.records import OutcomeKind, RunFolder

PAGE = 4096


def trained(made, run):
    found = trace(made, run, joined(os.environ) or ALONE)
    return found.losses, found.parameters


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """A run over two ranks that has saved steps 2 and 4, and its recipe with two more steps, for one rank."""
    made = tiny.recipe(tmp_path_factory.mktemp("saved"), steps=4, every=2, keep=0, shard=2)
    run = tiny.begin(made)
    pool.run(2, trained, made, run)
    (run.path / "result.json").unlink()
    return made, run


@pytest.fixture
def copied(saved, tmp_path):
    made, run = saved
    copies = []

    def copy():
        path = tmp_path / str(len(copies)) / run.path.name
        copies.append(shutil.copytree(run.path, path))
        return tiny.changed(made, steps=6, shard=1), RunFolder(path)

    return copy


def flipped(content, at):
    content = bytearray(content)
    content[at] ^= 0x10
    return bytes(content)


def damages(path, other):
    """Ways to damage a file; `other` is the same file of another checkpoint."""
    content = path.read_bytes()
    size = len(content)
    yield "missing", None
    yield "empty", b""
    for kept in (1, size // 2, size - 1):
        yield f"truncated to {kept}", content[:kept]
    yield "longer", content + b"\0"
    for at in (0, 2, 9, size // 7, size // 2, size - 2, size - 1):
        yield f"bit {at} flipped", flipped(content, at)
    for page in {0, size // 2 // PAGE * PAGE}:
        yield f"page {page} zeroed", content[:page] + bytes(min(PAGE, size - page)) + content[page + PAGE :]
    yield "of another step", other.read_bytes()


def planted(run, name):
    """Damage one file of the newest checkpoint in each way, and yield what was done."""
    newest, older = step_folder(run.checkpoints, 4), step_folder(run.checkpoints, 2)
    for what, content in list(damages(newest / name, older / name)):
        if not newest.exists():
            newest.with_name(newest.name + ".damaged").rename(newest)
        whole = (newest / name).read_bytes()
        (newest / name).unlink()
        if content is not None:
            (newest / name).write_bytes(content)
        yield what
        moved = newest if newest.exists() else newest.with_name(newest.name + ".damaged")
        (moved / name).unlink(missing_ok=True)
        (moved / name).write_bytes(whole)


def loaded(made, run):
    """Make an attempt that ends after it has loaded: what it warned of, and the step from which it goes on."""
    outcome = tiny.as_rank(tiny.changed(made, steps=2), run)
    return outcome.kind, outcome.step


def test_each_damage_of_a_file_of_tensors_is_found_and_the_run_falls_back(pool, copied):
    """Damage of the other files is found before ranks start."""
    made, run = copied()
    short = tiny.changed(made, steps=2)
    for what in planted(run, "rank-00001.safetensors"):
        # As many steps as the older checkpoint has: the attempt ends when it has loaded.
        (outcome,) = pool.run(1, loaded, short, tiny.begin(short, run))
        assert outcome == (OutcomeKind.DONE, 2), what
        assert latest(run.checkpoints) == step_folder(run.checkpoints, 2), what
        assert (run.checkpoints / "step-00000004.damaged").is_dir(), what


@pytest.mark.parametrize("name", ["index.json", "position.json"])
def test_what_needs_no_tensors_is_found_before_the_ranks_start(copied, name):
    made, run = copied()
    for what in planted(run, name):
        said = []
        pass_over_damaged(run, made, said.append)
        assert len(said) == 1, what
        assert re.match(r"goes on from step 2: step-00000004 is damaged: its file .*; it is kept as step-", said[0]), (
            what
        )
        # Where the index is another step's, it is the position that does not fit it.
        assert name in said[0] or what == "of another step"


def test_lost_bytes_of_tensors_are_found_before_the_ranks_start(copied):
    made, run = copied()
    for what in planted(run, "rank-00001.safetensors"):
        said = []
        pass_over_damaged(run, made, said.append)
        is_lost = what in ("missing", "empty", "longer") or what.startswith("truncated")
        assert len(said) == is_lost, what


def test_nothing_of_the_damaged_checkpoint_remains(pool, copied):
    made, run = copied()
    made = tiny.changed(made, shard=2)
    # A run that never had the checkpoint of step 4.
    _, other = copied()
    shutil.rmtree(step_folder(other.checkpoints, 4))
    expected = pool.run(2, trained, made, tiny.begin(made, other))[0]
    # The last bytes: everything before them has been read into the model by then.
    path = step_folder(run.checkpoints, 4) / "rank-00001.safetensors"
    path.write_bytes(flipped(path.read_bytes(), -1))
    losses, parameters = pool.run(2, trained, made, tiny.begin(made, run))[0]
    assert losses == expected[0]
    assert parameters.keys() == expected[1].keys()
    assert all(torch.equal(parameters[key], value) for key, value in expected[1].items())
    assert [row["step"] for row in run.metrics("attempt")] == [0, 2]
    # The damaged one does not count as one of those that are kept.
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == [
        "step-00000002", "step-00000004", "step-00000004.damaged", "step-00000006",
    ]  # fmt: skip


def test_a_whole_checkpoint_of_another_step_or_run_is_found(copied):
    made, run = copied()
    newest = step_folder(run.checkpoints, 4)
    shutil.rmtree(newest)
    shutil.copytree(step_folder(run.checkpoints, 2), newest)
    said = []
    pass_over_damaged(run, made, said.append)
    assert "its position.json is of step 2, and the folder's name says 4" in said[0]
    made, run = copied()
    identity = run.path / "identity.json"
    sha256 = run.identity().sha256
    identity.write_text(identity.read_text().replace(sha256, "f" * 64))
    with pytest.raises(DamagedCheckpoint, match=f"is of another run, whose identity begins with {sha256[:8]}"):
        pass_over_damaged(run, made, said.append)
