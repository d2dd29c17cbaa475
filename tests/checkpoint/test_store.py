"""A run's checkpoints: what a save writes and removes, and what a load reads, keeps and refuses."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.checkpoint.one_process import ALONE, saved, trained
from tests.checkpoint.storage import started
from titanlab.checkpoint import (
    Contents,
    DamagedCheckpoint,
    Position,
    SavedPosition,
    Target,
    generator_states,
    load,
    on_all_ranks,
    read_contents,
    saving,
    set_generators,
)
from titanlab.checkpoint.loading import attempted, restore_generators
from titanlab.checkpoint.saving import Plans, SyncSaver, remove_old
from titanlab.distributed import World
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


def loaded(contents, made):
    contents = contents if isinstance(contents, Contents) else read_contents(contents, "run")
    return load(contents, *made, ALONE)


def tensors(made):
    """The tensors of model and optimizer, by name."""
    model, optimizer = made
    states = optimizer.state_dict()["state"]
    found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found | {f"{number}.{name}": value.clone() for number, of in states.items() for name, value in of.items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


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


def test_a_load_gives_back_everything_but_the_settings(tmp_path):
    made = trained()
    model, optimizer = made
    SyncSaver(Target(folder=tmp_path, model=model, optimizer=optimizer, world=ALONE, keep=0)).save(POSITION)
    checkpoint = tmp_path / "step-00000007"
    drawn = (torch.rand(2).tolist(), random.random())
    other = trained(seed=1)
    other[1].param_groups[0].update(lr=0.125, weight_decay=0.75)
    assert loaded(checkpoint, other) == POSITION
    assert equal(tensors(other), tensors(made))
    assert (other[1].param_groups[0]["lr"], other[1].param_groups[0]["weight_decay"]) == (0.125, 0.75)
    assert (torch.rand(2).tolist(), random.random()) == drawn


def test_the_generators_of_a_rank_that_the_checkpoint_had_not_stay(tmp_path):
    """They do not go on as those of another rank: two ranks would draw the same."""
    checkpoint = saved(tmp_path)
    model, optimizer = trained(seed=1)
    before = generator_states(ALONE)
    load(read_contents(checkpoint, "run"), model, optimizer, replace(ALONE, rank=1))
    assert generator_states(ALONE) == before


def test_another_optimizer_s_checkpoint_is_refused(tmp_path):
    model, _ = trained()
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint = saved(tmp_path, made=(model, plain))
    with pytest.raises(ConfigError, match=r"has no \w+ of weight: it was saved with another optimizer"):
        loaded(checkpoint, trained())


def test_damage_leaves_the_generators_as_they_were(tmp_path):
    checkpoint = saved(tmp_path)
    contents = read_contents(checkpoint, "run")
    broken = {"cpu": contents.saved.generators[0]["cpu"], "python": b"[3, [], null]"}
    planted = replace(contents, saved=structs.replace(contents.saved, generators={0: broken}))
    made = trained()
    torch.rand(5)
    before = generator_states(ALONE)
    with pytest.raises(DamagedCheckpoint, match="holds no state of a generator"):
        loaded(planted, made)
    # The first state is whole, and was not kept either.
    assert generator_states(ALONE) == before


def step(folder, number, *names):
    """A folder of a step, with these files."""
    path = folder / f"step-{number:08d}"
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text(name)
    return path


def whole(folder, number):
    return step(folder, number, "index.json", "position.json")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_save_replaces_a_checkpoint_of_the_same_step(tmp_path, monkeypatch):
    final = step(tmp_path, 1, "index.json", "old")
    saved(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]
    assert names(final) == ["index.json", "position.json", "rank-00000.safetensors"]
    real = saving.remove
    refused = OSError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(saving, "remove", lambda path: refused if path == final else real(path))
    with pytest.raises(PermissionError):
        saved(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (0, 0, [2, 4, 6, 8]),
        (1, 0, [8]),
        (4, 0, [2, 4, 6, 8]),
        (5, 0, [2, 4, 6, 8]),
        (1, 4, [4, 8]),
        (2, 2, [2, 4, 6, 8]),
    ],
)
def test_the_newest_are_kept_and_those_that_a_number_divides(tmp_path, keep, keep_every, left):
    for number in (2, 4, 6, 8):
        whole(tmp_path, number)
    # It is none.
    step(tmp_path, 1)
    remove_old(tmp_path, keep, keep_every, pytest.fail)
    assert names(tmp_path) == [f"step-{number:08d}" for number in [1, *left]]


class TwoArguments(Exception):
    """Pickled, it cannot be made again."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}\nwith more lines")


def fails(error):
    def action():
        raise error

    return action


@pytest.mark.parametrize("error", [TwoArguments("one", "two"), type("Local", (Exception,), {})("one and two")])
def test_an_error_that_cannot_be_pickled_travels_as_its_first_line(error):
    value, portable = attempted(fails(error))
    assert (value, type(portable)) == (None, RuntimeError)
    assert str(portable) == f"{type(error).__name__}: one and two"
    assert portable.__cause__ is error
    assert str(pickle.loads(pickle.dumps(portable))) == str(portable)


def of_rank(failing):
    """As one of two ranks: an action that fails on some of them. Returns its value, or what was raised."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = World(rank=rank, world=2, local_rank=rank, device=torch.device("cpu"))

    def action():
        if rank in failing:
            raise failing[rank]
        return rank

    try:
        return on_all_ranks(world, action)
    except (OSError, ConfigError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ({}, [0, 1]),
        ({1: OSError("of rank 1")}, ["of rank 1"] * 2),
        ({0: OSError("of rank 0"), 1: OSError("of rank 1")}, ["of rank 0", "of rank 1"]),
        ({0: OSError("of rank 0"), 1: ConfigError("a", 1, "is wrong", "try 2")}, ["a=1: is wrong; try 2"] * 2),
    ],
)
def test_all_ranks_fail_if_one_fails(pool, failing, expected):
    assert pool.run(2, of_rank, failing) == expected


HERE = Path("here")


def drawn():
    return random.random(), np.random.random_sample(), torch.rand(3).tolist()  # noqa: NPY002


def packed(state):
    return json.dumps(state).encode()


def test_each_generator_goes_on_where_its_state_was_taken():
    random.gauss(0, 1)
    np.random.standard_normal()  # noqa: NPY002
    states = generator_states(ALONE)
    assert list(states) == ["cpu", "python", "numpy"]
    first = (drawn(), random.gauss(0, 1), np.random.standard_normal())  # noqa: NPY002
    set_generators(states, ALONE)
    assert (drawn(), random.gauss(0, 1), np.random.standard_normal()) == first  # noqa: NPY002


BAD = {
    "no bytes of a generator": {"cpu": bytes(7)},
    "no JSON": {"python": b"\x01\x02\x03"},
    "too few values": {"python": packed([3, []])},
    "another version": {"python": packed([9, [0] * 625, None])},
    "a word too few": {"numpy": packed(["MT19937", [0] * 623, 0, 0, 0.0])},
    "a position behind the words": {"numpy": packed(["MT19937", [0] * 624, 625, 0, 0.0])},
    "a negative position": {"numpy": packed(["MT19937", [0] * 624, -1, 0, 0.0])},
    "another generator": {"numpy": packed(["PCG64", [0] * 624, 0, 0, 0.0])},
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_state_is_damage(name):
    contents = Contents(checkpoint=HERE, key="run", saved=SavedPosition(step=0, parameters={}), tensors={}, objects={})
    with pytest.raises(DamagedCheckpoint, match=r"^run=here: holds no state of a generator \(\w+Error\)"):
        restore_generators(BAD[name], ALONE, contents)


def hashes(plans, state, folder, world=ALONE):
    """Save, and return a hash of each file."""
    folder.mkdir(exist_ok=True)
    save = started(state, folder, plans=plans, world=world)
    save.complete(save.stage, world)
    world.share(None)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


def state(value=0.0, **other):
    return {"model.x": torch.full((3, 4), value), "optimizer.step": 1.0, **other}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model.x": torch.ones(4, 3)},
        {"model.x": torch.ones(3, 4, dtype=torch.bfloat16)},
        {"model.y": torch.ones(3, 4)},
        {"model.x": 5},
        {"optimizer.step": torch.ones(())},
    ],
)
def test_a_plan_serves_the_next_save_and_one_of_another_form_is_planned_anew(tmp_path, changed):
    plans = Plans()
    hashes(plans, state(1.0), tmp_path / "first")
    again = hashes(plans, state(2.0, **changed), tmp_path / "second")
    assert again == hashes(Plans(), state(2.0, **changed), tmp_path / "fresh")


def of_two_ranks(folder):
    """Saves under three cuts, with one plan for all and with a new one each; one rank's state changes last."""
    dist.init_process_group("gloo")
    world = World(rank=dist.get_rank(), world=2, local_rank=dist.get_rank(), device=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    plans, found = Plans(), []
    for number, cut in enumerate([Shard(0), Shard(0), Shard(1), Replicate(), None]):
        tensor = distribute_tensor(torch.arange(16.0).view(4, 4) + number, mesh, [cut or Replicate()])
        own = {"x": tensor, **({"y": torch.ones(3)} if cut is None and world.rank else {})}
        found += [
            hashes(each, own, folder / f"{number}-{name}", world)
            for name, each in {"again": plans, "new": Plans()}.items()
        ]
    return found


def test_all_ranks_plan_anew_if_one_of_them_must(pool, tmp_path):
    for found in pool.run(2, of_two_ranks, tmp_path):
        assert found[::2] == found[1::2]
