"""`titanlab plan` with `--calibrate`: fits the planner to the user's own runs, and writes a cluster file."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.plan.calibration import calibrate, cluster_file, lines
from titanlab.recipe.compose import conf_folder
from titanlab.recipe.schema import Cluster
from titanlab.sweep.measured_runs import LeftOut, MeasuredSweep, measured_sweep
from titanlab.sweep.rows import look_at
from titanlab.sweep.sweep_folder import open_sweep
from titanlab.system.files import user_path, write_text
from titanlab.system.terminal import Console
from titanlab.system.text import counted

# Runs that are named for each reason.
_NAMED = 3


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
    console.note("\n".join([*_title(sweep.name, measured), *_reasons(measured.left_out), "", *lines(calibration), ""]))
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


OUT = "--out"
# How the first comment of a file begins that may be replaced.
CALIBRATED, MEASURED = "Calibrated", "Measured"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


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
