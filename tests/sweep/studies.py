"""Studies of tiny recipes, without Hydra."""

import dataclasses

from tests import tiny
from titanlab.launch.launchers_schema import Local, Slurm
from titanlab.recipe import Cluster, Recipe
from titanlab.records import identify
from titanlab.sweep import Study
from titanlab.sweep.plan import Dropped, PlannedRun
from titanlab.sweep.space import SweepPoint

NODES = {"per_node": 4, "nodes": 4}


def study(runs, points, *, launch=None, cluster=NODES, name="layouts", origin="sweeps/layouts", dropped=(), **given):
    """A study with a run for each point, a mapping of `tiny.recipe`'s keys: `study(path, [{"shard": 2}])`."""
    planned = []
    for values in points:
        made = tiny.recipe(runs, **{**given, **values})
        made = dataclasses.replace(
            made,
            sweep=name,
            name=SweepPoint(values=values).label,
            launch=launch or Local(),
            cluster=Cluster(accelerator="cpu", device="cpu", peak_tflops=1.0, **cluster),
        )
        planned.append(_planned(made, values))
    return Study(
        name=name,
        origin=origin,
        definition={"overrides": [], "space": {"list": list(points)}, "where": [], "repeats": 1},
        planned=tuple(planned),
        dropped=tuple(Dropped(point=SweepPoint(values=values), stage="rule", reason="is wrong") for values in dropped),
    )


def _planned(made: Recipe, values) -> PlannedRun:
    identity = identify(made, data="tiny", hardware="cpu", repeat=made.repeat)
    return PlannedRun(point=SweepPoint(values=values), recipe=made, identity=identity)


def seeds(count: int, *, shard: int = 1):
    """Points that differ in their seed only, so that their jobs have one shape."""
    return [{"shard": shard, "seed": seed} for seed in range(count)]


SLURM = Slurm(minutes=10)
