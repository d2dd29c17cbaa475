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
VARIABLES = ("SLURM_", "SBATCH_")
# Names that decide nothing about a launcher, and why they are there.
ALLOWED = {
    "checkpoint/address_schema.py": {"local"},  # a scheme of addresses: `local:/folder`
    "sweep/space.py": {"local"},  # in names of runs, an option of any group that needs its group's name
    # Environment variables that are recorded, that configs may read, and that differ between any two runs.
    "records/provenance.py": {"SLURM_"},
    "recipe/strangers.py": {"SLURM_JOB_ID", "SLURM_TMPDIR", "SLURM_CLUSTER_NAME"},
    "sweep/repro.py": {"SLURM_"},
}


_MODULES = re.compile(r"\btitanlab\.launch(\.| import )(local|slurm|launchers_schema)\b")


def named(source: str) -> Iterator[tuple[int, str]]:
    """Lines that name a launcher: a constant text, or an import of its modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) and _MODULES.search(ast.unparse(node)):
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if text in KINDS or text.startswith(VARIABLES):
                yield node.lineno, text
            else:
                yield from ((node.lineno, variable) for variable in VARIABLES if f" {variable}" in text)


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
