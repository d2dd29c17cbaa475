"""Plans of saves: made once, and again as soon as the state of any rank is another one."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from titanlab.checkpoint import store
from titanlab.checkpoint.store import Plans, write_and_publish
from titanlab.checkpoint.writer import SavePlannerOfJson
from titanlab.distributed import World

ALONE = World(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


class Counted:
    """Counts the plans that a process makes."""

    def __init__(self, monkeypatch):
        self.local = 0
        real = SavePlannerOfJson.create_local_plan

        def create_local_plan(planner):
            self.local += 1
            return real(planner)

        monkeypatch.setattr(SavePlannerOfJson, "create_local_plan", create_local_plan)


def saved(plans, state, folder, world=ALONE):
    """Save, and return a hash of each file."""
    planned = plans.plan(state, folder, world)
    write_and_publish(planned.stage, planned, world)
    world.share(None)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


def state(value=0.0, **other):
    return {"model": {"x": torch.full((3, 4), value)}, "optimizer": {"step": 1.0}, **other}


def test_a_plan_serves_the_next_save_with_other_values(tmp_path, monkeypatch):
    counted, plans = Counted(monkeypatch), Plans()
    saved(plans, state(1.0), tmp_path / "first")
    again = saved(plans, state(2.0), tmp_path / "second")
    assert counted.local == 1
    assert again == saved(Plans(), state(2.0), tmp_path / "fresh")
    assert counted.local == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"x": torch.ones(4, 3)}},
        {"model": {"x": torch.ones(3, 4, dtype=torch.bfloat16)}},
        {"model": {"y": torch.ones(3, 4)}},
        {"model": {"x": torch.ones(3, 4), "y": torch.ones(1)}},
        {"model": {"x": 5}},
        {"optimizer": {"step": torch.ones(())}},
    ],
)
def test_a_state_of_another_form_is_planned_anew(tmp_path, monkeypatch, changed):
    counted, plans = Counted(monkeypatch), Plans()
    saved(plans, state(), tmp_path / "first")
    again = saved(plans, state(**changed), tmp_path / "second")
    assert counted.local == 2
    assert again == saved(Plans(), state(**changed), tmp_path / "fresh")


def test_a_plan_that_failed_is_not_kept(tmp_path):
    plans = Plans()
    with pytest.raises(TypeError, match="a checkpoint holds tensors"):
        saved(plans, state(bad=object()), tmp_path / "first")
    assert saved(plans, state(), tmp_path / "second") == saved(Plans(), state(), tmp_path / "fresh")


def of_two_ranks(folder):
    """Saves under three cuts; one rank's state changes last. Returns the number of local plans after each save."""
    dist.init_process_group("gloo")
    world = World(rank=dist.get_rank(), world=2, local_rank=dist.get_rank(), device=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (2,))
    made = []

    class Planner(SavePlannerOfJson):
        def create_local_plan(self):
            made.append(1)
            return super().create_local_plan()

    store.SavePlannerOfJson, before = Planner, store.SavePlannerOfJson
    try:
        plans, counts = Plans(), []
        for number, cut in enumerate([Shard(0), Shard(0), Shard(1), Replicate()]):
            tensor = distribute_tensor(torch.arange(16.0).view(4, 4) + number, mesh, [cut])
            saved(plans, {"x": tensor}, folder / f"{number}", world)
            counts.append(len(made))
        own = {"x": tensor, **({"y": torch.ones(3)} if world.rank else {})}
        first = saved(plans, own, folder / "y", world)
        counts.append(len(made))
        assert first == saved(Plans(), own, folder / "fresh", world)
    finally:
        store.SavePlannerOfJson = before
    return counts


def test_all_ranks_plan_anew_if_one_of_them_must(pool, tmp_path):
    assert pool.run(2, of_two_ranks, tmp_path) == [[1, 1, 2, 3, 4]] * 2
