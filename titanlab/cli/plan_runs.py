"""What `titanlab plan` learns from runs: `--calibrate` fits the planner to them, `--measure` runs one short job.

Both write a file of the group `cluster` where `cluster=NAME` finds it.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.compose import compose_one
from titanlab.cli.sweep import SweepArguments, run_study
from titanlab.distributed.host import this_host
from titanlab.errors import ConfigError
from titanlab.plan.calibration import calibrate, cluster_file
from titanlab.plan.calibration import lines as calibration_lines
from titanlab.plan.measured_machine import KEY, doubts, measured_cluster
from titanlab.plan.measured_machine import lines as rate_lines
from titanlab.recipe.compose import conf_folder
from titanlab.recipe.flags import read_flags
from titanlab.recipe.next_attempt import frozen_recipe
from titanlab.recipe.recipe import Recipe
from titanlab.recipe.schema import Cluster
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.measured_runs import LeftOut, MeasuredSweep, measured_sweep, with_host
from titanlab.sweep.rows import look_at
from titanlab.sweep.sweep_folder import SweepFolder, open_sweep
from titanlab.system.files import user_path, write_text
from titanlab.system.terminal import Console
from titanlab.system.text import counted
from titanlab.techniques.profiler.profilers_schema import KIND

OUT = "--out"
# How the first comment of a file begins that may be replaced.
CALIBRATED, MEASURED = "Calibrated", "Measured"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# Runs that are named for each reason.
_NAMED = 3
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


def calibrate_sweep(name: str, *, runs: str, out: Path | None, console: Console) -> None:
    """Calibrate with a sweep, print the errors before and after, and write the cluster file.

    Args:
        out: of the file; None: `cluster/SWEEP.yaml` in the sweep's folder.

    Raises:
        ConfigError: there is no such sweep, too few of its runs can be used, or the file cannot be written there.
    """
    sweep = open_sweep(name, runs)
    path = user_path(out or sweep.path / "cluster" / f"{sweep.name}.yaml")
    check_out(path)
    measured = measured_sweep(sweep, look_at(sweep, console.warn)())
    calibration = calibrate(measured.rows)
    console.note(
        "\n".join(
            [*_title(sweep.name, measured), *_reasons(measured.left_out), "", *calibration_lines(calibration), ""]
        )
    )
    after = calibration.after["all"]
    comment = f"{CALIBRATED} with {counted(after.runs, 'recipe')} of the sweep {sweep.name}, on {measured.machine}."
    console.note("\n".join(write_cluster(path, calibration.cluster, comment)))


def _title(name: str, measured: MeasuredSweep) -> list[str]:
    recipes = counted(len(measured.rows), "recipe")
    text = [f"{name}: {recipes} in {counted(measured.runs, 'run')} on {measured.machine}"]
    if measured.stale:
        text.append(f"{measured.stale} of them made by other code than is here now")
    return text


def _reasons(left_out: Sequence[LeftOut]) -> list[str]:
    """One line for each reason, with the first runs that it holds for."""
    counts = Counter(dropped.reason for dropped in left_out)
    text = []
    for reason, count in counts.most_common():
        of_reason = [dropped.run for dropped in left_out if dropped.reason == reason]
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        text.append(f"left out {count}: {reason} ({', '.join(of_reason[:_NAMED])}{more})")
    return text


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
    given = {argument.partition("=")[0] for argument in arguments}
    sizes = [size for size in _ON_GPUS if _is_on_gpus(composed) and size.partition("=")[0] not in given]
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
        console.note("\n".join([*rate_lines(row), ""]))
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


def check_out(path: Path) -> None:
    """Check that a cluster file can be written there, and that `cluster=NAME` then means it.

    Raises:
        ConfigError: its name or folder is no place of a cluster file, another file is there, or nobody may write there.
    """
    example = Path(path.parent, "cluster", f"{path.stem or 'mine'}.yaml")
    if path.suffix != ".yaml" or not _NAME.fullmatch(path.stem):
        raise ConfigError(OUT, path, "is no name of a cluster file", f"try {Path(path.parent, 'mine.yaml')}")
    if path.absolute().parent.name != "cluster":
        rule = "must lie in a folder named cluster, so that --config-dir finds it"
        raise ConfigError(OUT, path, rule, f"try {example}")
    if (conf_folder() / "cluster" / path.name).exists():
        rule = f"has the name of a cluster that titanlab brings, and cluster={path.stem} would mean that one"
        raise ConfigError(OUT, path, rule, f"try {path.with_name('my_' + path.name)}")
    if path.exists() and not _is_ours(path):
        raise ConfigError(OUT, path, "is a file that titanlab has not written", "give another name")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    if not os.access(path.parent, os.W_OK):
        raise _unwritable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def write_cluster(path: Path, cluster: Cluster, comment: str) -> list[str]:
    """Write the file. Returns the lines that say how to use it.

    Args:
        comment: begins with CALIBRATED or MEASURED.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, cluster_file(cluster, comment))
    except OSError as error:
        raise _unwritable(path, error) from error
    return [
        f"cluster file: {path}",
        f"use it: titanlab plan --config-dir {shlex.quote(str(path.parent.parent))} cluster={path.stem} …",
    ]


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(OUT, path, f"cannot be written: {error.strerror}", "choose another folder, or make room")


def _is_ours(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(1000)
    except OSError:
        return False
    return any(f"\n# {word} " in head for word in (CALIBRATED, MEASURED))
