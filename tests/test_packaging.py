"""What an installation consists of: declared dependencies, the tested set, and a wheel that carries its YAMLs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, metadata, packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import titanlab

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(lines: list[str]) -> set[str]:
    return {canonical(re.match(r"[\w.-]+", line)[0]) for line in lines}


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonical(name): pin for name, pin in (line.split("==") for line in lines)}


def is_installed(name: str) -> bool:
    """Whether a library of the tested set is here; the set has some for other systems too."""
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def imported_names() -> set[str]:
    """Top-level names that the package imports, also inside functions."""
    found = set()
    for path in (ROOT / "titanlab").rglob("*.py"):
        source = path.read_text()
        found |= set(re.findall(r'import_module\("(\w+)', source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found


def test_every_library_that_the_package_imports_is_declared():
    libraries = imported_names() - sys.stdlib_module_names - {"titanlab"}
    distributions = packages_distributions()
    # What is not installed here is called as it is imported.
    needed = {canonical(distributions.get(name, [name])[0]) for name in libraries}
    assert "torch" in needed
    optional = PROJECT["optional-dependencies"]
    extras = [line for name in ("flash-attn", "plots", "tensorboard") for line in optional[name]]
    assert needed <= required([*PROJECT["dependencies"], *extras])


def test_the_tested_set_covers_what_is_declared_and_fits_every_platform():
    declared = required([*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]) - {"titanlab"}
    assert declared <= set(pins())
    assert pins()["torch"] == "2.13.0"
    # No builds of one platform (2.13.0+cpu), no paths of one machine.
    assert [pin for pin in pins().values() if not re.fullmatch(r"[0-9][0-9a-z.]*", pin)] == []


def test_pip_installs_a_hydra_with_the_private_functions_that_titanlab_calls():
    """A version that nobody has tried was accepted once, and each verb that composes ended with a traceback."""
    bounds = {Requirement(line).name: Requirement(line).specifier for line in PROJECT["dependencies"]}
    hydra, omegaconf = bounds["hydra-core"], bounds["omegaconf"]
    assert all(hydra.contains(version, prereleases=True) for version in ("1.3.2", "1.4.0rc3"))
    assert all(omegaconf.contains(version, prereleases=True) for version in ("2.3.1", "2.4.1rc1"))
    assert not any(hydra.contains(version, prereleases=True) for version in ("1.3.1", "1.5.0.dev1", "1.5.0", "2.0"))
    assert not any(omegaconf.contains(version, prereleases=True) for version in ("2.5.0.dev1", "2.5.0", "3.0"))


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_the_tested_set_installs_under_every_python_that_is_declared(python):
    """Debian 12 has 3.11.2; one library asked for 3.11.5."""
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    wants = {name: metadata(name).get("Requires-Python") for name in pins() if is_installed(name)}
    assert len(wants) > 100
    assert {name: spec for name, spec in wants.items() if spec and not SpecifierSet(spec).contains(python)} == {}


@pytest.mark.full
def test_the_environment_that_make_made_is_the_tested_set():
    installed = {name: version(name).partition("+")[0] for name in required(PROJECT["dependencies"])}
    assert installed == {name: pins()[name] for name in installed}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("titanlab-*.whl")
    return built


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--no-index", "--disable-pip-version-check", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_the_wheel_has_every_yaml_and_every_module(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = [(ROOT / "conf", "titanlab/conf")]
    folders += [(ROOT / name, f"titanlab/conf/{name}") for name in ("launch", "sweeps")]
    expected = {f"{place}/{path.relative_to(top)}" for top, place in folders for path in top.rglob("*.yaml")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "titanlab").rglob("*.py")}
    # Without it mypy takes nothing of the package as typed.
    expected.add("titanlab/py.typed")
    assert expected <= names
    assert [name for name in names if not name.startswith(("titanlab/", "titanlab-"))] == []


@pytest.mark.full
def test_an_installed_wheel_composes_in_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    pip("install", "--no-deps", "--target", str(site), str(wheel))
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def titanlab_says(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, str(site / "bin" / "titanlab"), *arguments],
            capture_output=True,
            text=True,
            cwd=empty,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert titanlab_says("--version").strip() == f"titanlab {titanlab.__version__}"
    composed = titanlab_says("train", "--cfg", "job", "launch=local", "seed=17")
    assert re.search(r"^seed: 17$", composed, re.MULTILINE)
    assert re.search(r"^launch:$", composed, re.MULTILINE)
    assert str(site) in titanlab_says("train", "--info", "searchpath")
    assert "12 to submit" in titanlab_says("sweep", "+sweeps=quickstart_layouts", "--dry-run")
    assert re.search(r"^proven: row \d+ of docs/parity.md$", titanlab_says("combinations", "tp", "fsdp"), re.MULTILINE)
    assert list(empty.iterdir()) == []
