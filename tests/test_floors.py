"""Imports only fall: every module stands on a floor, and imports from lower ones."""

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

# Floor → its groups; names are below `titanlab.`, and a package stands for all its modules. Modules of one group may
# import each other; groups on one floor do not know each other. The longest name that fits decides.
FLOORS: dict[int, list[str]] = {
    # Words.
    0: ["errors console options numerals progress atomic_file command ranges"],
    # Sums: no torch at all.
    1: [
        """account layout hardware flops meter outcome identity host ranks loopback stop
        run_folder points_file run_status run_search claim watchdog hang silence disk quiet_import metrics_file config_file git_state
        provenance failure_signs memory_kills traffic_table setting attention_order foreign json_file""",
        "schedule.action schedule.placement schedule.order schedule.timeline schedule.split",
    ],
    # Declarations: what each part says about itself. Torch-free too; one group for each part, by DECLARES.
    2: [],
    # Machine.
    3: [
        *["world", "mesh", "launch", "hub", "precision.dtypes", "precision.loss_scale", "precision.product"],
        """checkpoint.inert_pickle checkpoint.metadata checkpoint.numpy_state checkpoint.reader
        checkpoint.position checkpoint.folders""",
    ],
    # Parts.
    4: [
        *["model", "precision", "parallelism", "optimizer", "data", "checkpoint", "tracker", "cluster", "schedule"],
        *["ac", "compile", "initialise weights huggingface", "totals", "peak", "traffic"],
    ],
    # Assembly.
    5: ["recipe recipe_rules memory_rules assemble stage stage_pieces layout_rules composition"],
    # Story.
    6: [
        "train recorder facts tracked_run tracker_gaps rebuild generate parity conformance attempt execute starting_weights origin interchange"
    ],
    # Study: many runs.
    7: ["sweep report"],
    # Doors.
    8: ["cli __main__", "worker"],
}
DECLARATIONS = 2
DECLARES = ("schema", "account")  # last word of such a module's name

# What takes long to import. Torch-free floors never name any of it.
HEAVY = {
    *["torch", "torchao", "datasets", "wandb", "sentencepiece", "tokenizers", "transformers"],
    *["pandas", "pyarrow", "matplotlib", "tensorboard", "submitit"],
}
# Above those floors: packages that never import torch, and that import the rest inside functions only.
TORCH_FREE_PARTS = ("data", "schedule")
# What the command line imports before it has anything to train.
LIGHT_DOORS = ("recipe", "composition.recipes", "cli.verbs", "cli.compose")


class Place(NamedTuple):
    """Where a module stands."""

    floor: int
    group: str


class Import(NamedTuple):
    """One name that a module imports."""

    name: str
    line: int
    deferred: bool  # inside a function, or for type checkers only


def place(module: str) -> Place | None:
    """Floor and group of `titanlab.x.y`, or None if the table has no line for it."""
    name = module.removeprefix("titanlab").removeprefix(".")
    if not name:
        return Place(-1, "titanlab")  # below everything: __init__ imports none of ours
    if name.replace(".", "_").endswith(tuple(f"_{word}" for word in DECLARES)):
        return Place(DECLARATIONS, name.partition(".")[0])
    found: tuple[int, Place] | None = None
    for floor, groups in FLOORS.items():
        for group in groups:
            for prefix in group.split():
                fits = name == prefix or name.startswith(prefix + ".")
                if fits and (found is None or len(prefix) > found[0]):
                    found = (len(prefix), Place(floor, group))
    return found[1] if found else None


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

    def visit(node: ast.AST, *, deferred: bool) -> Iterator[tuple[str, int, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, deferred) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                for alias in child.names:
                    full = f"{base}.{alias.name}"
                    yield (full if full in modules else base, child.lineno, deferred)
            elif isinstance(child, ast.Call) and ast.unparse(child.func) == "importlib.import_module":
                # Names that are computed are those of options, which are discovered and not known.
                constants = [value for value in child.args[:1] if isinstance(value, ast.Constant)]
                yield from ((str(constant.value), child.lineno, deferred) for constant in constants)
            is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or (
                isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            )
            yield from visit(child, deferred=deferred or is_later)

    for name, line, deferred in dict.fromkeys(visit(ast.parse(source), deferred=False)):
        target = resolved(name)
        if target is not None and target != module:
            yield Import(target, line, deferred)


def violations(modules: Mapping[str, str]) -> list[str]:
    """What breaks the rule in a package given as module name → source, one line each."""
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for module, source in sorted(modules.items()):
        here = place(module)
        if here is None:
            found.append(f"{module}: has no floor; give it a line in FLOORS (tests/test_floors.py)")
            continue
        for wanted in imports(source, module, modules):
            where = f"{module}:{wanted.line}: imports {wanted.name}"
            if wanted.name.partition(".")[0] != "titanlab":
                found += [f"{where}, {reason}" for reason in [_too_heavy(module, here, wanted)] if reason]
                continue
            there = place(wanted.name)
            if there is None:
                continue  # told for the module itself
            graph.setdefault(module, set()).add(wanted.name)
            if there.floor > here.floor:
                found.append(f"{where}, up from floor {here.floor} to {there.floor}")
            elif there.floor == here.floor and there.group != here.group:
                found.append(f"{where}, another group of floor {here.floor}")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("a circle: " + " → ".join(reversed(error.args[1])))
    return found


def _too_heavy(module: str, here: Place, wanted: Import) -> str | None:
    if wanted.name not in HEAVY:
        return None
    if here.floor <= DECLARATIONS:
        return "on a torch-free floor"
    part = module.split(".")[1]
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


def test_imports_only_fall():
    found = violations(sources())
    assert not found, "\n".join(found)


def test_every_line_of_the_table_stands_for_a_module():
    ours = sources()
    names = [name for groups in FLOORS.values() for group in groups for name in group.split()]
    assert [name for name in names if f"titanlab.{name}" not in ours] == []


def test_what_the_command_line_imports_first_is_light():
    light = [module for module in sources() if (found := place(module)) and found.floor <= DECLARATIONS]
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
        ("titanlab.surprise", "", "titanlab.surprise: has no floor"),
        ("titanlab.layout", "from titanlab.train import train", "titanlab.layout:1: imports titanlab.train, up from floor 1 to 6"),
        ("titanlab.layout", "def f():\n    from titanlab import train", "titanlab.layout:2: imports titanlab.train, up"),
        ("titanlab.layout", "import importlib\nimportlib.import_module('titanlab.train')", "titanlab.layout:2: imports titanlab.train"),
        ("titanlab.model.llama", "import titanlab.optimizer.adamw", "titanlab.optimizer.adamw, another group of floor 4"),
        ("titanlab.model.llama_schema", "from titanlab.data.files_schema import Files", "another group of floor 2"),
        ("titanlab.model.llama_schema", "from titanlab.model import llama", "up from floor 2 to 4"),
        ("titanlab.model.llama_account", "def f():\n    import torch.nn", "imports torch, on a torch-free floor"),
        ("titanlab.data.files", "def f():\n    import torch", "and data is torch-free"),
        ("titanlab.data.files", "import datasets", "must do so inside a function"),
        ("titanlab.cli.verbs", "import torch", "must do so inside a function"),
        ("titanlab.errors", "import titanlab.console", "a circle: titanlab.console → titanlab.errors → titanlab.console"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_found(module, source, complaint):
    package = {
        "titanlab": "",
        "titanlab.console": "import titanlab.errors",
        "titanlab.errors": "",
        "titanlab.train": "import torch",
        "titanlab.model.llama": "",
        "titanlab.optimizer.adamw": "",
        "titanlab.data.files_schema": "",
    }
    assert violations(package) == []
    assert [line for line in violations({**package, module: source}) if complaint in line]


def test_what_falls_is_allowed():
    package = {
        "titanlab": "__version__ = '1'",
        "titanlab.errors": "from titanlab import __version__",
        "titanlab.account": "from titanlab.errors import ConfigError",
        "titanlab.model.llama_account": "from titanlab.model.llama_schema import Llama\nfrom titanlab import account",
        "titanlab.model.llama_schema": "import titanlab.errors, math",
        "titanlab.model.llama": "import torch\nfrom titanlab.model.llama_schema import Llama",
        "titanlab.data.files": "def f():\n    import sentencepiece",
        "titanlab.cli.generate": "def f():\n    from titanlab import train",
        "titanlab.train": "from titanlab.model import llama",
    }
    assert violations(package) == []
