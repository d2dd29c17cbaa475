"""Files of profilers: each is whole or absent, and one that cannot be written ends no training."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torch.profiler import profile

from titanlab.system.files import refusal

# torch raises RuntimeError for some faults of a disk, and a trace that is cut off is no JSON.
FAULTS = (OSError, RuntimeError, ValueError)


def write_whole(path: Path, write: Callable[[Path], object], failed: Callable[[str, Exception], None]) -> None:
    """Write a file under another name, and rename it; if this fails, report it and leave no file.

    Args:
        write: writes the path that it is given.
        failed: takes the path, and the error.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        # Without the folder of the run: if that was moved or removed, it must not come back.
        path.parent.mkdir(exist_ok=True)
        write(aside)
        aside.replace(path)
    except FAULTS as error:
        failed(str(path), error)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


@contextlib.contextmanager
def chrome_trace(running: profile) -> Iterator[Path]:
    """A temporary file with the trace of a profile, as JSON.

    Raises:
        OSError: the folder for temporary files takes no more.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        running.export_chrome_trace(str(path))
        _check_written(path)
        yield path


def _check_written(path: Path) -> None:
    """Raise an error if torch has not written the file: at a full disk it only logs a line, and leaves none."""
    if path.exists() and path.stat().st_size:
        return
    path.touch()
    raise refusal(path.parent) or OSError(f"torch.profiler has written no trace into {path.parent}")
