"""A run's checkpoints: what a save writes and removes, and what a load reads, keeps and refuses."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import nn

from tests.checkpoint.one_process import ALONE, saved, trained
from titanlab.checkpoint import (
    DamagedCheckpoint,
    OnlyModel,
    Position,
    Target,
    generator_states,
    read_contents,
    set_generators,
    store,
)
from titanlab.checkpoint.index import read_index
from titanlab.errors import ConfigError

# A run has a process group, also of one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")

POSITION = Position(
    step=7, tokens=50, data={"samples": 3}, tracker="id", layout={"shard": 2}, loss_scale={"scale": 8.0}
)


@pytest.fixture(autouse=True)
def kept():
    """The generators of the tests after these stand where they stood."""
    states = generator_states(ALONE)
    yield
    set_generators(states, ALONE)


def loaded(checkpoint, made, **given):
    model, optimizer = made
    return store.load(checkpoint, "run", model=model, optimizer=optimizer, world=ALONE, **given)


def tensors(made):
    """The tensors of model and optimizer, by name."""
    model, optimizer = made
    states = optimizer.state_dict()["state"]
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found | {f"{number}.{name}": value.clone() for number, of in states.items() for name, value in of.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_save_is_a_folder_of_its_step(tmp_path):
    checkpoint = saved(tmp_path / "checkpoints", 12, recipe="ab" * 32)
    assert checkpoint == tmp_path / "checkpoints" / "step-00000012"
    assert sorted(path.name for path in checkpoint.iterdir()) == [
        "index.json", "position.json", "rank-00000.safetensors",
    ]  # fmt: skip
    content = read_contents(checkpoint, "run").saved
    assert (content.position, content.recipe, content.contents) == (Position(step=12), "ab" * 32, None)
    assert content.parameters == {"weight": [2, 3], "bias": [2]}
    assert content.files == {"rank-00000.safetensors": (checkpoint / "rank-00000.safetensors").stat().st_size}
    assert list(content.generators) == [0]
    assert list(content.generators[0]) == ["cpu", "python", "numpy"]


def test_all_files_are_on_the_disk_before_a_checkpoint_has_its_name_and_the_name_after_them(tmp_path, monkeypatch):
    """So a power cut leaves a whole checkpoint or none."""
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    # Inodes that were synchronised before and after the checkpoint got its name.
    before, after, sync = set(), set(), os.fsync

    def noted(descriptor):
        (after if checkpoint.exists() else before).add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    saved(checkpoint.parent, 3)
    lost = [path.name for path in (*checkpoint.iterdir(), checkpoint) if path.stat().st_ino not in before]
    assert lost == []
    assert checkpoint.parent.stat().st_ino in after


def test_settings_of_the_optimizer_are_not_saved(tmp_path):
    index = read_index(saved(tmp_path))
    assert set(index.tensors) == {"model.weight", "model.bias"} | {
        f"optimizer.state.{name}.{state}" for name in ("weight", "bias") for state in ("step", "exp_avg", "exp_avg_sq")
    }
    assert index.objects == {}


def test_a_load_gives_back_everything_but_the_settings(tmp_path):
    made = trained()
    model, optimizer = made
    checkpoint = store.save(Target(folder=tmp_path, model=model, optimizer=optimizer, world=ALONE, keep=0), POSITION)
    drawn = (torch.rand(2).tolist(), random.random())
    other = trained(seed=1)
    other[1].param_groups[0].update(lr=0.125, weight_decay=0.75)
    assert loaded(checkpoint, other) == POSITION
    assert equal(tensors(other), tensors(made))
    assert (other[1].param_groups[0]["lr"], other[1].param_groups[0]["weight_decay"]) == (0.125, 0.75)
    assert (torch.rand(2).tolist(), random.random()) == drawn


def test_an_optimizer_that_has_made_no_step_takes_the_states(tmp_path):
    made = trained()
    checkpoint = saved(tmp_path, made=made)
    model = nn.Linear(3, 2)
    fresh = model, torch.optim.AdamW(model.parameters())
    loaded(checkpoint, fresh)
    assert equal(tensors(fresh), tensors(made))


def test_only_the_model_is_read_for_text(tmp_path):
    made = trained()
    checkpoint = saved(tmp_path, made=made)
    model = nn.Linear(3, 2)
    store.load_model(checkpoint, "run", model)
    assert equal(model.state_dict(), made[0].state_dict())
    with pytest.raises(ConfigError, match=r"^run=.*step-00000001: cannot be read \("):
        store.load_model(checkpoint, "run", nn.Linear(5, 2))


@pytest.mark.parametrize(("dtype", "expected"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_checkpoint_of_the_model_only_resumes_no_run(tmp_path, dtype, expected):
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    made = model, torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint = saved(tmp_path, made=made, only_model=OnlyModel(dtype=dtype))
    contents = read_contents(checkpoint, "run")
    assert contents.saved.contents == "model"
    assert set(contents.entries.tensors) == {f"model.{name}" for name in model.state_dict()}
    index = contents.entries.tensors
    assert index["model.0.weight"].dtype == str(expected).removeprefix("torch.")
    # A count is no weight.
    assert index["model.1.num_batches_tracked"].dtype == "int64"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with pytest.raises(ConfigError, match=r"has the model only \(checkpoint\.last=model\).*init_from="):
        loaded(checkpoint, made)
    store.load_model(checkpoint, "run", nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [(0, 0, [1, 2, 3, 4, 5]), (2, 0, [4, 5]), (1, 2, [2, 4, 5]), (9, 0, [1, 2, 3, 4, 5]), (1, 100, [5])],
)
def test_old_checkpoints_are_removed(tmp_path, keep, keep_every, left):
    made, told = trained(), []
    for step in range(1, 6):
        saved(tmp_path, step, made=made, keep=keep, keep_every=keep_every, saved=told.append)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-{step:08d}" for step in left]
    assert told == [1, 2, 3, 4, 5]


def test_a_step_that_is_saved_again_replaces_the_one_before(tmp_path):
    saved(tmp_path, made=trained(seed=0))
    again = trained(seed=1)
    checkpoint = saved(tmp_path, made=again)
    model = nn.Linear(3, 2)
    store.load_model(checkpoint, "run", model)
    assert equal(model.state_dict(), again[0].state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    saved(tmp_path)
    told = []

    def full(*given):
        raise OSError(28, "No space left on device")

    for place in ("os.fsync", "titanlab.checkpoint.store.stage"):
        with monkeypatch.context() as patch:
            patch.setattr(place, full)
            with pytest.raises(OSError, match="No space left") as caught:
                saved(tmp_path, 2, saved=told.append)
        assert caught.value.filename == str(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert told == []


def test_an_optimizer_with_a_state_that_is_no_json_leaves_nothing(tmp_path):
    made = trained()
    made[1].state[made[0].weight]["more"] = float("nan")
    with pytest.raises(TypeError, match=r"more is float: a checkpoint holds tensors and values of JSON only"):
        saved(tmp_path, made=made)
    assert list(tmp_path.iterdir()) == []


def test_an_old_checkpoint_that_stays_is_a_warning(tmp_path, monkeypatch):
    saved(tmp_path)
    lines = []
    monkeypatch.setattr(store, "remove", lambda path: OSError(13, "Permission denied") if path.exists() else None)
    saved(tmp_path, 2, keep=1, warn=lines.append)
    assert lines == [f"the old checkpoint {tmp_path / 'step-00000001'} cannot be removed: Permission denied"]


def test_a_save_begins_without_its_name(tmp_path):
    model, optimizer = trained()
    told = []
    target = Target(folder=tmp_path, model=model, optimizer=optimizer, world=ALONE, keep=0, saved=told.append)
    started = store.begin(target, POSITION)
    assert started.folder == tmp_path / "step-00000007.part"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007.part"]
    store.complete(started, started.stage, target)
    assert told == [7]
    assert loaded(tmp_path / "step-00000007", trained(seed=1)) == POSITION


def test_another_optimizer_s_checkpoint_is_refused(tmp_path):
    model, _ = trained()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint = saved(tmp_path, made=(model, plain))
    with pytest.raises(ConfigError, match=r"has no \w+ of weight: it was saved with another optimizer"):
        loaded(checkpoint, trained())


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    checkpoint = saved(tmp_path)
    with pytest.raises(ConfigError, match=r"^run=.*step-00000001: cannot be read \("):
        loaded(checkpoint, trained(size=4))


def test_damage_leaves_the_generators_as_they_were(tmp_path):
    checkpoint = saved(tmp_path)
    contents = read_contents(checkpoint, "run")
    broken = {"cpu": contents.saved.generators[0]["cpu"], "python": b"[3, [], null]"}
    planted = replace(contents, saved=structs.replace(contents.saved, generators={0: broken}))
    before = generator_states(ALONE)
    with pytest.raises(DamagedCheckpoint, match="holds no state of a generator"):
        loaded(checkpoint, trained(), read=lambda *named: planted)
    # The first state is whole, and was not kept either.
    assert generator_states(ALONE) == before


@pytest.mark.parametrize("rank", [0, 1])
def test_generators_without_a_state_in_the_checkpoint_stay(tmp_path, rank):
    """Of a rank or of a device that the checkpoint had not."""
    checkpoint = saved(tmp_path)
    contents = read_contents(checkpoint, "run")
    states = contents.saved.generators[0] if rank else {"cpu": b"", "cuda": b"12"}
    planted = replace(contents, saved=structs.replace(contents.saved, generators={rank: states}))
    made = trained()
    before = generator_states(ALONE)
    loaded(checkpoint, made, read=lambda *named: planted)
    assert generator_states(ALONE) == before


def test_a_changed_byte_of_a_tensor_is_damage(tmp_path):
    checkpoint = saved(tmp_path)
    path = checkpoint / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=r"rank-00000\.safetensors has other bytes than were saved"):
        loaded(checkpoint, trained())
