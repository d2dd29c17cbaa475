"""Finding the checkpoint of a run that a person means."""

from __future__ import annotations

import os
import re
from pathlib import Path

from titanlab.checkpoint.folders import of_step
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_search import find_run

_STEP = re.compile(r"step-([0-9]+)")


def find_run_or_checkpoint(text: str, runs: Path | str, key: str = "run") -> tuple[RunFolder, Path | None]:
    """The run that a person names, and the checkpoint in it, if that is what is named.

    `RUN/checkpoints/step-00000008` is a checkpoint, `RUN/checkpoints/step-8` the same; `RUN/checkpoints` is the run.

    Raises:
        ConfigError: no run fits, several do, or the run has no such checkpoint.
    """
    for given in (Path(text).expanduser(), Path(runs).expanduser() / text):
        # The path as it was typed comes first: a checkpoint may be a symbolic link to its new place.
        for path in (Path(os.path.abspath(given)), given.resolve()):
            step = _STEP.fullmatch(path.name)
            folder = path.parent if step else path
            if folder.name != "checkpoints" or not (folder.parent / "config.yaml").is_file():
                continue
            run = RunFolder(folder.parent)
            return run, None if step is None else of_step(run.checkpoints, int(step[1]), key, text)
    return find_run(text, runs), None
