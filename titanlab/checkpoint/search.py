"""Finding the run or the checkpoint that a user names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from titanlab.checkpoint.folders import is_checkpoint, of_step
from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.errors import ConfigError
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_search import find_run
from titanlab.system.files import user_path

_STEP = re.compile(r"step-([0-9]+)")
T = TypeVar("T")


def read_while_kept(choose: Callable[[], Place], read: Callable[[Place], T], warn: Callable[[str], None]) -> T:
    """Read the checkpoint that is chosen; if its run removes it meanwhile (checkpoint.keep), choose again.

    Raises:
        ConfigError: no checkpoint can be chosen any more, or one cannot be read that is still there.
    """
    while True:
        checkpoint = choose()
        try:
            return read(checkpoint)
        except (ConfigError, OSError):
            if is_checkpoint(checkpoint):
                raise
        warn(f"{checkpoint.name} was removed while it was read (checkpoint.keep of its run): the next one is read")


def find_run_or_checkpoint(text: str, runs: Path | str, key: str = "run") -> tuple[RunFolder, Place | None]:
    """Find the named run, and the checkpoint if a checkpoint is named.

    `RUN/checkpoints/step-00000008` is a checkpoint, `RUN/checkpoints/step-8` the same; `RUN/checkpoints` is the run.

    Raises:
        ConfigError: no run matches, several match, or the run has no such checkpoint.
    """
    for candidate in (user_path(text), user_path(runs) / text):
        # The unresolved path first: a checkpoint may be a symbolic link to a folder outside the run.
        for path in (Path(os.path.abspath(candidate)), candidate.resolve()):
            step = _STEP.fullmatch(path.name)
            folder = path.parent if step else path
            if folder.name != "checkpoints" or not (folder.parent / "config.yaml").is_file():
                continue
            run = RunFolder(folder.parent)
            return run, None if step is None else of_step(checkpoints_of(run), int(step[1]), key, text)
    return find_run(text, runs), None
