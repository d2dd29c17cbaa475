"""Writes a file of the group `cluster` where `cluster=NAME` finds it."""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path

from titanlab.cluster.schema import Cluster
from titanlab.errors import ConfigError
from titanlab.plan.calibration import cluster_file
from titanlab.recipe.composition.recipes import conf_folder
from titanlab.system.files import write_text

KEY = "--out"
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
        raise ConfigError(KEY, path, "is no name of a cluster file", f"try {Path(path.parent, 'mine.yaml')}")
    if path.absolute().parent.name != "cluster":
        rule = "must lie in a folder named cluster, so that --config-dir finds it"
        raise ConfigError(KEY, path, rule, f"try {example}")
    if (conf_folder() / "cluster" / path.name).exists():
        rule = f"has the name of a cluster that titanlab brings, and cluster={path.stem} would mean that one"
        raise ConfigError(KEY, path, rule, f"try {path.with_name('my_' + path.name)}")
    if path.exists() and not _is_ours(path):
        raise ConfigError(KEY, path, "is a file that titanlab has not written", "give another name")
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
    return ConfigError(KEY, path, f"cannot be written: {error.strerror}", "choose another folder, or make room")


def _is_ours(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(1000)
    except OSError:
        return False
    return any(f"\n# {word} " in head for word in (CALIBRATED, MEASURED))
