"""Launchers are known by name in `titanlab/launch` only: everything else asks the contract."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import titanlab
from titanlab.options import discover

PACKAGE = Path(titanlab.__file__).parent
KINDS = ("local", "slurm")
# Variables of launchers and schedulers.
VARIABLES = ("SLURM_", "SUBMITIT_", "SBATCH_")
# Names that decide nothing about a launcher, and why they are there.
ALLOWED = {
    "checkpoint/address_schema.py": {"local"},  # a scheme of addresses: `local:/folder`
    "sweep/space.py": {"local"},  # in names of runs, an option of any group that needs its group's name
    # Environment variables that are recorded, that configs may read, and that differ between any two runs.
    "records/provenance.py": {"SLURM_"},
    "recipe/strangers.py": {"SLURM_JOB_ID", "SLURM_TMPDIR", "SLURM_CLUSTER_NAME"},
    "sweep/repro.py": {"SLURM_"},
}


def named(source: str) -> Iterator[tuple[int, str]]:
    """Lines that name a launcher: a constant text, or an import of its modules."""
    if not any(text in source for text in (*KINDS, *VARIABLES, "launchers_schema")):
        return
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            modules = []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if text in KINDS or text.startswith(VARIABLES):
                    yield node.lineno, text
                elif any(f" {variable}" in text for variable in VARIABLES):
                    yield node.lineno, next(variable for variable in VARIABLES if f" {variable}" in text)
        starts = (*(f"titanlab.launch.{kind}." for kind in KINDS), "titanlab.launch.launchers_schema.")
        found = [module for module in modules if f"{module}.".startswith(starts)]
        yield from ((node.lineno, module) for module in found[:1])


def test_only_the_folder_of_launchers_names_one():
    assert set(KINDS) == set(discover()["launch"])
    found, used = [], set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith("launch/"):
            continue
        for line, text in named(path.read_text()):
            if text in ALLOWED.get(name, ()):
                used.add((name, text))
            else:
                found.append(f"{name}:{line}: {text}")
    assert not found, "\n".join(found)
    assert not re.findall(r"from \.(local|slurm|launchers_schema)\b", (PACKAGE / "launch/__init__.pyi").read_text())
    assert used == {(name, text) for name, texts in ALLOWED.items() for text in texts}
