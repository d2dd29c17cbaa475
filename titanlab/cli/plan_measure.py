"""`titanlab plan --measure`: one short job that measures the machine, and a cluster file of its rates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.compose import compose_one
from titanlab.cli.plan_runs import MEASURED, check_out, write_cluster
from titanlab.cli.sweep import SweepArguments, run_study
from titanlab.distributed.host import this_host
from titanlab.errors import ConfigError
from titanlab.plan.measured_machine import KEY, doubts, lines, measured_cluster
from titanlab.recipe.flags import read_flags
from titanlab.recipe.next_attempt import frozen_recipe
from titanlab.recipe.recipe import Recipe
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.measured_runs import with_host
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system.files import user_path
from titanlab.system.terminal import Console
from titanlab.system.text import counted
from titanlab.techniques.profiler.rates_schema import KIND

SWEEP = "measure"
# The job trains the smallest model for one step, before which its profiler measures.
_RECIPE = (
    *("model=debug", "data=synthetic", "parallelism=ddp", "checkpoint=off", "profiler=rates"),
    *(f"sweep={SWEEP}", f"name={SWEEP}", "training.steps=1", "training.unmeasured_steps=0"),
    *("training.seq_len=64", "optimizer.schedule.warmup_steps=1"),
)
# Sizes of products and messages that keep a GPU busy.
_ON_GPUS = ("profiler.largest=8192", "profiler.megabytes=256")
# What the measurement needs of its recipe; the rest is the user's.
_OWN = ("model", "data", "parallelism", "profiler", "sweep", "name", "recipe", "sweeps")


def measure(arguments: Sequence[str], *, out: Path | None) -> int:
    """Measure, print the figures, and write the cluster file. Returns the job's exit code.

    Args:
        arguments: overrides such as `launch=slurm`, `cluster=h100`, `world=16`, and Hydra's flags.
        out: of the file; None: `cluster/measured.yaml` in the folder of the measurement's sweep.

    Raises:
        ConfigError: an override is not for a measurement, or the file cannot be written there.
    """
    if out is not None:
        check_out(user_path(out))
    _check(arguments)
    all_arguments = [*_RECIPE, *arguments]
    composition = compose_one(read_flags(all_arguments))
    if composition is None:
        rule = "asks for several recipes, and a measurement is one job"
        raise ConfigError(KEY, " ".join(arguments), rule, "give one value of each key")
    composed = composition[1]
    world = composed.world or _processes(composed)
    sizes = [size for size in _ON_GPUS if _is_on_gpus(composed) and not _gives(arguments, size.partition("=")[0])]
    own = [] if composed.world else [f"world={world}"]
    rest = (*all_arguments, *own, *sizes, f"training.global_batch={world}")
    code = run_study(SweepArguments(rest=rest, wait=True, force=True, whole=True))
    if code:
        return code
    run = _newest(SweepFolder(user_path(composed.runs).absolute() / SWEEP))
    recipe, row = frozen_recipe(run), run.metrics(KIND)[-1]
    cluster = measured_cluster(recipe, row)
    env = run.env() or {}
    if cluster.accelerator == "cpu":
        cluster = with_host(cluster, env.get("host") or {})
    path = user_path(out or run.path.parent / "cluster" / "measured.yaml")
    processes = counted(recipe.layout.world, "process", "processes")
    with Console() as console:
        console.note("\n".join([*lines(row), ""]))
        for doubt in doubts(row, cluster):
            console.warn(doubt)
        machine = cluster.device if cluster.accelerator == "cuda" else (env.get("host") or {}).get("cpu")
        console.note("\n".join(write_cluster(path, cluster, f"{MEASURED} with {processes} on {machine}.")))
    return 0


def _processes(recipe: Recipe) -> int:
    """As many processes as a node takes.

    Raises:
        ConfigError: it is not known.
    """
    if recipe.cluster.per_node is not None and not recipe.launch.runs_here:
        return recipe.cluster.per_node
    if not recipe.launch.runs_here:
        rule = "is not known: the cluster does not say how many processes a node takes"
        raise ConfigError("world", None, rule, "give world=8, or a cluster such as cluster=h100")
    return this_host().count


def _is_on_gpus(recipe: Recipe) -> bool:
    if recipe.cluster.accelerator != "auto":
        return recipe.cluster.accelerator == "cuda"
    return bool(recipe.launch.runs_here) and this_host().accelerator == "cuda"


def _gives(arguments: Sequence[str], key: str) -> bool:
    return any(argument.partition("=")[0] == key for argument in arguments)


def _newest(sweep: SweepFolder) -> RunFolder:
    """The run that has measured last.

    Raises:
        ConfigError: no run has measured.
    """
    measured = [run for run in sweep.runs() if run.metrics(KIND)]
    if not measured:
        rule = "has measured nothing"
        raise ConfigError(
            KEY, sweep.path, rule, f"see its log: titanlab status {sweep.name} --runs {sweep.path.parent}"
        )
    return max(measured, key=lambda run: run.created() or 0.0)


def _check(arguments: Sequence[str]) -> None:
    for argument in arguments:
        key = argument.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]
        if not argument.startswith("-") and key in _OWN and not argument.startswith("profiler."):
            rule = "is the measurement's own: it trains no recipe"
            raise ConfigError(KEY, argument, rule, "give only cluster, launch, world and runs")
