"""The command `titanlab` that is installed beside this Python."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def titanlab(*arguments: str | Path, folder: Path, environ: Mapping[str, str], seconds: float) -> str:
    """What the command prints when it is run in a folder; it has to succeed, and in time."""
    done = subprocess.run(
        [Path(sys.executable).parent / "titanlab", *arguments],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
