"""What tests of checks make up of a machine that is not here: programs on PATH, and file systems."""

from collections import namedtuple
from pathlib import Path

GIB = 1 << 30


def program(folder: Path, name: str, script: str) -> Path:
    """A program that runs these lines of shell."""
    path = folder / name
    folder.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def states(findings) -> dict[str, str]:
    """The state of each line, by its name."""
    return {each.name: each.state for each in findings}


def volume(*, free, size=100 * GIB, files=1000, free_files=100_000, flags=0):
    """The answer of `os.statvfs`; sizes in bytes."""
    Volume = namedtuple("Volume", "f_bavail f_frsize f_blocks f_files f_favail f_flag")
    return Volume(free // 512, 512, size // 512, files, free_files, flags)
