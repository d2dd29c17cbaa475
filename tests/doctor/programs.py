"""Programs of a machine that is not here: shell scripts in a folder on PATH."""

from pathlib import Path


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
