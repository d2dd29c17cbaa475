"""Imports the scripts of benchmarks/, which are not a package."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    """The script with this name. Scripts import each other by name, and dataclasses look their module up."""
    specification = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def part(package: str, name: str) -> ModuleType:
    """A module of a package in benchmarks/."""
    sys.path.append(str(BENCHMARKS))
    try:
        return importlib.import_module(f"{package}.{name}")
    finally:
        sys.path.remove(str(BENCHMARKS))
