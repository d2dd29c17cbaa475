"""Checks before a job trains: it runs the code that was submitted, and no other process works on its run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import titanlab
from titanlab.errors import ConfigError
from titanlab.records.run_folder import RunFolder

_LOOK_SECONDS = 1.0


def check_code(code: Path) -> None:
    """Check that this process runs the code in a folder, and not sources that were edited after the submission.

    Raises:
        ConfigError: it runs other code.
    """
    here = Path(titanlab.__file__).parent
    # Compare the folders themselves: one folder may have several paths.
    with contextlib.suppress(OSError):
        if here.samefile(code / "titanlab"):
            return
    rule = f"is not the code of this job, {code}: PYTHONPATH was lost or changed on the way to its processes"
    cure = "have launch.container and launch.srun_arguments pass PYTHONPATH on, and launch.environment leave it alone"
    raise ConfigError("titanlab", here, rule, cure)


def claim_run(
    run: RunFolder, stack: contextlib.ExitStack, *, seconds: float, is_ending: Callable[[], bool]
) -> str | None:
    """Claim the run until the stack closes.

    Args:
        seconds: how long to wait for another process that has claimed the run.
        is_ending: whether this process must end and so waits no longer.

    Returns:
        a message that names the other process; None if this process has the claim.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            patience = max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))
            stack.enter_context(run.claim(patience_seconds=patience))
        except ConfigError as error:
            if is_ending() or time.monotonic() >= end:
                return error.rule
        else:
            return None
