"""Imports point down: folders of titanlab/ are layers, and a module imports from its own folder or from lower ones."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import titanlab

PACKAGE = Path(titanlab.__file__).parent

# Folders of titanlab/techniques/; each is a folder of its own for the rule.
TECHNIQUES = ("model", "precision", "ac", "compile", "schedule", "optimizer", "tracker", "profiler")
# Bottom to top. Folders, and the few loose modules, of one layer do not import each other. A list in a list is one
# group: its members may.
LAYERS: list[list[str | tuple[str, ...]]] = [
    ["errors"],
    ["system"],
    ["costs", ("options", "ranges"), "dtensor"],
    [*(f"techniques.{name}" for name in TECHNIQUES), "records"],
    ["parallelism", "distributed"],
    ["data", "checkpoint"],
    ["recipe"],
    ["train"],
    ["launch"],
    ["plan"],
    ["prove", "doctor"],
    ["sweep"],
    ["report"],
    [("cli", "__main__")],
]
PLANNED: set[str] = set()

# A room's door: full name → the module that defines the name. A name that a module of the room has too is imported from
# that module.
DOORS = {
    f"titanlab.{stub.parent.name}.{alias.name}": f"titanlab.{stub.parent.name}.{node.module}"
    for stub in sorted(PACKAGE.glob("*/__init__.pyi"))
    for node in ast.parse(stub.read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

# What takes long to import. Torch-free modules never name any of it.
HEAVY = {
    *["torch", "torchao", "datasets", "wandb", "sentencepiece", "tokenizers", "transformers"],
    *["pandas", "pyarrow", "matplotlib", "tensorboard", "submitit"],
}
# Folders that import none of it: what the command line reads before it has anything to train.
TORCH_FREE = ("errors", "system", "costs", "options", "ranges", "cluster", "records")
# Last word of the name of a technique's torch-free module.
DECLARES = ("schema", "account", "contract", "huggingface")
# Folders that never import torch, and that import the rest inside functions only.
TORCH_FREE_PARTS = ("data", "techniques.schedule")
# What the command line imports before it has anything to train.
LIGHT_DOORS = (
    *("recipe.recipe", "recipe.compose", "plan.step_time"),
    *("cli.verbs", "cli.compose", "cli.plan"),
)


class Place(NamedTuple):
    """The layer of a module, counted from the bottom, and its folder."""

    layer: int
    group: str


class Import(NamedTuple):
    """One name that a module imports."""

    name: str
    line: int
    deferred: bool  # inside a function, or for type checkers only
    kind: str = ""  # "types": for type checkers only; "implementation": where a config names its implementation


def folder_of(module: str) -> str:
    """`x` of `titanlab.x.y`, and `techniques.x` of `titanlab.techniques.x.y`."""
    first, *rest = module.split(".")[1:]
    return f"{first}.{rest[0]}" if first == "techniques" and rest else first


def place(module: str) -> Place | None:
    """Layer and folder of a module, or None if the table has no such folder."""
    if module in ("titanlab", "titanlab.techniques"):
        return Place(-1, "titanlab")  # below everything: __init__ imports none of ours
    folder = folder_of(module)
    for number, groups in enumerate(LAYERS):
        for group in groups:
            members = (group,) if isinstance(group, str) else group
            if folder in members:
                return Place(number, members[0])
    return None


def is_torch_free(module: str) -> bool:
    """Whether a module is one of those that the command line, the planner and the rules read without torch."""
    return module.split(".")[1:2] in [[name] for name in TORCH_FREE] or module.replace(".", "_").endswith(
        tuple(f"_{word}" for word in DECLARES)
    )


def imports(source: str, module: str, modules: Mapping[str, str]) -> Iterator[Import]:
    """Everything that a module imports, as the most specific module of ours or the top-level name of another's."""

    def resolved(name: str) -> str | None:
        if name.partition(".")[0] != "titanlab":
            return name.partition(".")[0]
        while name not in modules:
            name = name.rpartition(".")[0]
            if not name:
                return None
        return name

    def visit(node: ast.AST, *, deferred: bool, kind: str) -> Iterator[tuple[str, int, bool, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, deferred, kind) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    yield (DOORS.get(full, full if full in modules else base), child.lineno, deferred, kind)
            elif (
                isinstance(child, ast.Call)
                and isinstance(child.func, ast.Attribute)
                and ast.unparse(child.func) == "importlib.import_module"
            ):
                # Names that are computed are those of options, which are discovered and not known.
                constants = [value for value in child.args[:1] if isinstance(value, ast.Constant)]
                yield from ((str(constant.value), child.lineno, deferred, kind) for constant in constants)
            for_types = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            is_later = for_types or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            names = (
                isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef) and child.name == "implementation"
            )
            below = "types" if for_types else "implementation" if names else kind
            yield from visit(child, deferred=deferred or is_later, kind=below)

    for name, line, deferred, kind in dict.fromkeys(visit(ast.parse(source), deferred=False, kind="")):
        target = resolved(name)
        if target is not None and target != module:
            yield Import(target, line, deferred, kind)


def violations(modules: Mapping[str, str]) -> list[str]:
    """What breaks the rule in a package given as module name → source, one line each."""
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, source in sorted(modules.items()):
        here = place(module)
        if here is None:
            found.append(f"{module}: has no layer; give its folder a place in LAYERS (tests/test_layers.py)")
            continue
        for wanted in imports(source, module, modules):
            where = f"{module}:{wanted.line}: imports {wanted.name}"
            if wanted.name.partition(".")[0] != "titanlab":
                found += [f"{where}, {reason}" for reason in [_too_heavy(module, here, wanted)] if reason]
                continue
            there = place(wanted.name)
            if there is None:
                continue  # reported for the module itself
            if wanted.kind == "implementation" and there.group == here.group:
                continue  # a config names what does it, and is imported by it
            if wanted.kind != "types":
                graph.setdefault(module, set()).add(wanted.name)
            if there.layer > here.layer:
                found.append(f"{where}, up from {here.group} to {there.group}")
            elif there.layer == here.layer and there.group != here.group:
                found.append(f"{where}, which stands beside {here.group}, not below")
            elif (
                is_torch_free(module)
                and wanted.kind != "types"
                and there.layer >= 0
                and not is_torch_free(wanted.name)
                and folder_of(wanted.name) not in TORCH_FREE_PARTS
            ):
                found.append(f"{where}, from a torch-free module one that is not")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("a circle: " + " → ".join(reversed(error.args[1])))
    return found


def _too_heavy(module: str, here: Place, wanted: Import) -> str | None:
    if wanted.name not in HEAVY or wanted.kind == "types":
        return None
    if is_torch_free(module):
        return "in a torch-free module"
    part = folder_of(module)
    if part in TORCH_FREE_PARTS and wanted.name in ("torch", "torchao"):
        return f"and {part} is torch-free"
    if (part in TORCH_FREE_PARTS or part == "cli" or here.group == "cli") and not wanted.deferred:
        return "and must do so inside a function: it takes long"
    return None


def sources() -> dict[str, str]:
    """Our modules and their source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def test_imports_point_down():
    found = violations(sources())
    assert not found, "\n".join(found)


def test_other_rooms_import_through_the_door():
    rooms = {name.split(".")[1] for name in DOORS}
    used, past = set(), []
    for path in sorted(
        path for top in ("titanlab", "tests", "benchmarks") for path in (PACKAGE.parent / top).rglob("*.py")
    ):
        own = path.relative_to(PACKAGE.parent).parts[1] if path.is_relative_to(PACKAGE) else ""
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("titanlab."):
                continue
            _, room, *inner = node.module.split(".")
            names = [f"titanlab.{room}.{alias.name}" for alias in node.names]
            used.update(names if room != own and not inner else ())
            past += [
                f"{path}:{node.lineno}: {name}"
                for name in names
                if inner and room != own and DOORS.get(name) == node.module
            ]
    assert not past, "\n".join(past)
    assert set(DOORS) - used == set(), "no other room imports it"
    assert rooms == {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"cli", "techniques"}


def test_every_name_of_the_table_is_a_folder_or_a_loose_module():
    names = {name for groups in LAYERS for group in groups for name in ([group] if isinstance(group, str) else group)}
    assert {name for name in names if f"titanlab.{name}" not in sources()} == PLANNED


def test_few_modules_are_loose_and_folders_are_small():
    assert len(list(PACKAGE.glob("*.py"))) <= 6
    sizes = {folder: len(list(folder.glob("*.py"))) - 1 for folder in PACKAGE.rglob("*") if folder.is_dir()}
    assert {str(folder.relative_to(PACKAGE)): size for folder, size in sizes.items() if size > 20} == {}


def test_what_the_command_line_imports_first_is_light():
    light = [module for module in sources() if is_torch_free(module)]
    light += [f"titanlab.{name}" for name in LIGHT_DOORS]
    code = f"import importlib, sys\nfor name in {light!r}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    loaded = done.stdout.split()
    assert set(light) <= set(loaded)
    assert HEAVY & set(loaded) == set()


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("titanlab.surprise", "", "titanlab.surprise: has no layer"),
        ("titanlab.costs.layout", "from titanlab.train.train import train", "titanlab.costs.layout:1: imports titanlab.train.train, up from costs to train"),
        ("titanlab.costs.layout", "def f():\n    from titanlab.train import train", "titanlab.costs.layout:2: imports titanlab.train.train, up"),
        ("titanlab.costs.layout", "import importlib\nimportlib.import_module('titanlab.train.train')", "titanlab.costs.layout:2: imports titanlab.train.train"),
        ("titanlab.techniques.model.llama", "import titanlab.techniques.optimizer.adamw", "titanlab.techniques.optimizer.adamw, which stands beside techniques.model"),
        ("titanlab.data.cache", "from titanlab.checkpoint import saving", "titanlab.checkpoint.saving, which stands beside data"),
        ("titanlab.techniques.model.llama_schema", "from titanlab.techniques.model import llama", "from a torch-free module one that is not"),
        ("titanlab.techniques.model.llama_huggingface", "def f():\n    import torch.nn", "imports torch, in a torch-free module"),
        ("titanlab.techniques.model.llama_schema", "class A:\n    def implementation(self):\n        from titanlab.techniques.optimizer import adamw", "which stands beside techniques.model"),
        ("titanlab.records.outcome", "import pandas", "imports pandas, in a torch-free module"),
        ("titanlab.data.text", "def f():\n    import torch", "and data is torch-free"),
        ("titanlab.data.text", "import datasets", "must do so inside a function"),
        ("titanlab.cli.verbs", "import torch", "must do so inside a function"),
        ("titanlab.system.terminal", "import titanlab.system.progress", "a circle: titanlab.system.progress → titanlab.system.terminal → titanlab.system.progress"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_found(module, source, complaint):
    package = {
        "titanlab": "",
        "titanlab.system.progress": "import titanlab.system.terminal",
        "titanlab.system.terminal": "",
        "titanlab.train.train": "import torch",
        "titanlab.techniques.model.llama": "",
        "titanlab.techniques.optimizer.adamw": "",
        "titanlab.checkpoint.saving": "",
    }
    assert violations(package) == []
    assert [line for line in violations({**package, module: source}) if complaint in line]


def test_what_points_down_is_allowed():
    package = {
        "titanlab": "__version__ = '1'",
        "titanlab.errors": "from titanlab import __version__",
        "titanlab.costs.account": "from titanlab.errors import ConfigError",
        "titanlab.techniques.model.llama_huggingface": "from titanlab.techniques.model.llama_schema import Llama\nfrom titanlab.costs import account",
        "titanlab.techniques.model.llama_schema": "import titanlab.errors, math\nclass Llama:\n    def implementation(self):\n        from titanlab.techniques.model import llama",
        "titanlab.techniques.model.contract": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "titanlab.techniques.model.llama": "import torch\nfrom titanlab.techniques.model.llama_schema import Llama",
        "titanlab.data.text": "def f():\n    import sentencepiece",
        "titanlab.cli.weights": "def f():\n    from titanlab.train import train",
        "titanlab.train.train": "from titanlab.techniques.model import llama",
    }
    assert violations(package) == []


def test_a_class_name_stands_for_one_thing() -> None:
    files: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(path.relative_to(PACKAGE))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
