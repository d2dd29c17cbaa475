"""`titanlab plan` with runs: `--calibrate` fits the planner to a sweep's runs, `--measure` runs one short job.

Both write a file of the group `cluster` into a folder where `cluster=NAME` finds it.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from titanlab.cli.compose import compose_one
from titanlab.cli.sweep import run_study
from titanlab.distributed import this_host
from titanlab.errors import ConfigError
from titanlab.plan import KEY, calibrate, calibration_lines, cluster_file, doubts, measured_cluster, rate_lines
from titanlab.recipe import Cluster, conf_folder, frozen_recipe, read_flags
from titanlab.sweep import SweepFolder, look_at, measured_sweep, open_sweep, with_host
from titanlab.system import Console, counted, user_path, write_text
from titanlab.techniques.profiler.profilers_schema import KIND

OUT = "--out"
# Only a file whose first comment begins with one of these words may be replaced.
CALIBRATED, MEASURED = "Calibrated", "Measured"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# For each reason why runs are left out, the output names this many of them.
_NAMED = 3
SWEEP = "measure"
# The measuring job trains the smallest model for one step; its profiler measures before that step.
_RECIPE = (
    *("model=debug", "data=synthetic", "parallelism=ddp", "checkpoint=off", "profiler=rates"),
    *(f"sweep={SWEEP}", f"name={SWEEP}", "training.steps=1", "training.unmeasured_steps=0"),
    *("training.seq_len=64", "optimizer.schedule.warmup_steps=1"),
)
# Sizes of matrix products and messages that keep a GPU busy.
_ON_GPUS = ("profiler.largest=8192", "profiler.megabytes=256")
# Keys of the recipe that the measurement sets itself; the user sets the rest.
_OWN = ("model", "data", "parallelism", "profiler", "sweep", "name", "recipe", "sweeps")


def calibrate_sweep(name: str, *, runs: str, out: Path | None, console: Console) -> None:
    """Calibrate with a sweep, print the errors before and after, and write the cluster file.

    Args:
        out: path of the file; None: `cluster/SWEEP.yaml` in the sweep's folder.
    """
    sweep = open_sweep(name, runs)
    path = user_path(out or sweep.path / "cluster" / f"{sweep.name}.yaml")
    check_out(path)
    measured = measured_sweep(sweep, look_at(sweep, console.warn)())
    calibration = calibrate(measured.rows)
    recipes, runs_of_it = counted(len(measured.rows), "recipe"), counted(measured.runs, "run")
    lines = [f"{sweep.name}: {recipes} in {runs_of_it} on {measured.machine}"]
    if measured.stale:
        lines.append(f"{measured.stale} of the runs ran other code than the present")
    # One line for each reason, with the first runs that were left out for it.
    for reason, count in Counter(dropped.reason for dropped in measured.left_out).most_common():
        of_reason = [dropped.run for dropped in measured.left_out if dropped.reason == reason]
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        lines.append(f"left out {count}: {reason} ({', '.join(of_reason[:_NAMED])}{more})")
    console.note("\n".join([*lines, "", *calibration_lines(calibration), ""]))
    after = calibration.after["all"]
    comment = f"{CALIBRATED} with {counted(after.runs, 'recipe')} of the sweep {sweep.name}, on {measured.machine}."
    console.note("\n".join(write_cluster(path, calibration.cluster, comment)))


def measure(arguments: Sequence[str], *, out: Path | None) -> int:
    """Measure, print the figures, and write the cluster file. Returns the job's exit code.

    Args:
        arguments: overrides such as `launch=slurm`, `cluster=h100`, `world=16`, and Hydra's flags.
        out: path of the file; None: `cluster/measured.yaml` in the folder of the measurement's sweep.
    """
    if out is not None:
        check_out(user_path(out))
    for argument in arguments:
        key = argument.lstrip("+~").partition("=")[0].partition(".")[0].partition("@")[0]
        if not argument.startswith("-") and key in _OWN and not argument.startswith("profiler."):
            rule = "is set by the measurement, which trains no recipe"
            raise ConfigError(KEY, argument, rule, "give only cluster, launch, world and runs")
    all_arguments = [*_RECIPE, *arguments]
    composition = compose_one(read_flags(all_arguments))
    if composition is None:
        rule = "asks for several recipes, and a measurement is one job"
        raise ConfigError(KEY, " ".join(arguments), rule, "give one value of each key")
    composed = composition[1]
    is_here, host = bool(composed.launch.runs_here), this_host()
    world = composed.world or (host.count if is_here else composed.cluster.per_node)
    if world is None:
        rule = "is not known: the cluster does not say how many processes a node takes"
        raise ConfigError("world", None, rule, "give world=8, or a cluster such as cluster=h100")
    given = {argument.partition("=")[0] for argument in arguments}
    accelerator = composed.cluster.accelerator
    if accelerator == "auto" and is_here:
        accelerator = host.accelerator
    sizes = [size for size in _ON_GPUS if accelerator == "cuda" and size.partition("=")[0] not in given]
    own = [] if composed.world else [f"world={world}"]
    rest = (*all_arguments, *own, *sizes, f"training.global_batch={world}")
    code = run_study(rest, wait=True, force=True, whole=True)
    if code:
        return code
    sweep = SweepFolder(user_path(composed.runs).absolute() / SWEEP)
    measured = [run for run in sweep.runs() if run.metrics(KIND)]
    if not measured:
        cure = f"see its log: titanlab status {sweep.name} --runs {sweep.path.parent}"
        raise ConfigError(KEY, sweep.path, "has measured nothing", cure)
    run = max(measured, key=lambda run: run.created() or 0.0)
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


def check_out(path: Path) -> None:
    """Check that a cluster file can be written at this path, and that `cluster=NAME` then finds the file."""
    example = Path(path.parent, "cluster", f"{path.stem or 'mine'}.yaml")
    if path.suffix != ".yaml" or not _NAME.fullmatch(path.stem):
        raise ConfigError(OUT, path, "is not the name of a cluster file", f"try {Path(path.parent, 'mine.yaml')}")
    if path.absolute().parent.name != "cluster":
        rule = "must lie in a folder named cluster, so that --config-dir finds it"
        raise ConfigError(OUT, path, rule, f"try {example}")
    if (conf_folder() / "cluster" / path.name).exists():
        rule = f"has the name of a cluster that comes with titanlab, and cluster={path.stem} would choose that one"
        raise ConfigError(OUT, path, rule, f"try {path.with_name('my_' + path.name)}")
    head = ""
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(1000)
    if path.exists() and not any(f"\n# {word} " in head for word in (CALIBRATED, MEASURED)):
        raise ConfigError(OUT, path, "is a file that titanlab has not written", "give another name")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()


def write_cluster(path: Path, cluster: Cluster, comment: str) -> list[str]:
    """Write the file, with a comment that begins with CALIBRATED or MEASURED. Returns how to use it."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, cluster_file(cluster, comment))
    return [
        f"cluster file: {path}",
        f"use it: titanlab plan --config-dir {shlex.quote(str(path.parent.parent))} cluster={path.stem} …",
    ]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cure = "choose another folder, or make room"
        raise ConfigError(OUT, path, f"cannot be written: {error.strerror}", cure) from error
