"""The whole session on a CPU, on a machine that has torch and some packages, and carries wheels of the others."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import pytest

from tests.benchmarks.scripts import BENCHMARKS

SCRIPT = BENCHMARKS / "gpu_session.sh"
# What a GPU machine has had so far, of what the session imports; and what it had to carry.
THERE = ("torch", "numpy", "safetensors", "xxhash", "pyyaml", "packaging", "pip")
CARRIED = ("hydra-core", "omegaconf", "antlr4-python3-runtime", "lazy_loader", "msgspec", "torchao")
# Dependencies of the package that such a machine need not have.
WITHOUT = "wandb datasets sentencepiece transformers tokenizers tensorboard rich pandas pytest".split()


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def with_requirements(names, without):
    """Distributions and all that they require without extras."""
    found, open_ = {}, list(names)
    while open_:
        name = canonical(open_.pop())
        if name in found or name in without:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            # For another platform.
            continue
        lines = requires(name) or []
        open_ += [re.match(r"[\w.-]+", each)[0] for each in lines if "extra ==" not in each]
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """The interpreter of such a machine."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    for found in with_requirements(THERE, CARRIED).values():
        for top in {each.parts[0] for each in found.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(found.locate_file(top))
    return folder / "env" / "bin" / "python"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """What is carried, packed again from what is installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in CARRIED:
        found = distribution(name)
        wheel = folder / f"{canonical(name).replace('-', '_')}-{found.version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as file:
            for each in found.files:
                # What an installation has added: scripts, and files that say how it was installed.
                added = each.parts[0] == ".." or "__pycache__" in each.parts or each.name in ("INSTALLER", "REQUESTED")
                if not added:
                    file.write(found.locate_file(each), str(each))
    return folder


def session(python, *arguments, **variables):
    """A call on a machine of which only the given variables are set."""
    plain = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
    environment = {**plain, "PYTHON": str(python), **{name: str(value) for name, value in variables.items()}}
    return subprocess.run([SCRIPT, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False)


def rows_of(folder):
    lines = (folder / "gpu_session.jsonl").read_text().splitlines()
    return {row["row"]: row for row in map(json.loads, lines)}


def test_a_machine_without_the_packages_is_told_which_to_carry(bare, tmp_path):
    done = session(bare, "--list", WHEELS=tmp_path)
    assert done.returncode == 2
    assert done.stdout == (
        "gpu_session: not installed: hydra-core, omegaconf, antlr4-python3-runtime, lazy_loader, msgspec; carry their "
        "wheels and name the folder as WHEELS\n"
    )
    assert not done.stderr


# Two rows at once: most of their time is that of imports.
REHEARSE = ("--rehearse", "--at-once", "2", "--seconds", "900")
ON_GPUS = ("ladder/flash", "ladder/flash_attn", "ladder/flash3", "ladder/cuda_graphs", "saves/async_pinned")
NOT_HERE = {**dict.fromkeys(ON_GPUS, "not on a CPU"), "tests/gpu": "pytest is not installed"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Where the calls of this file leave their rows: each goes on where the one before has stopped."""
    return tmp_path_factory.mktemp("results") / "out"


@pytest.mark.full
@pytest.mark.parametrize("pieces", ["products,ladder,tests", "float8,sixteen", "memory,saves,kernels"])
def test_pieces_are_rehearsed_on_a_bare_machine(bare, wheels, results, pieces):
    done = session(bare, *REHEARSE, "--only", pieces, WHEELS=wheels, OUT=results)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: row for name, row in rows_of(results).items() if name.partition("/")[0] in pieces.split(",")}
    assert {name.partition("/")[0] for name in found} == set(pieces.split(","))
    for name, row in found.items():
        if name in NOT_HERE:
            assert (row["status"], row["reason"]) == ("absent", NOT_HERE[name])
        else:
            assert row["status"] == "measured", (name, row.get("reason"), row.get("log"))
            check_figures(row)


@pytest.mark.full
def test_a_whole_session_is_one_page_and_nothing_runs_twice(bare, wheels, results, tmp_path):
    absent = f"import importlib.util as u; print([n for n in {WITHOUT} if u.find_spec(n)])"
    assert subprocess.run([bare, "-c", absent], capture_output=True, text=True, check=True).stdout == "[]\n"
    # With the tests before this one there is nothing left to run; alone it runs all rows.
    done = session(bare, *REHEARSE, WHEELS=wheels, OUT=results)
    assert done.returncode == 0, done.stdout + done.stderr
    # At most eight files come home, no deeper than two folders.
    assert {path.name for path in results.iterdir()} == {"gpu_session.jsonl", "gpu_session.md"}
    found, page = rows_of(results), (results / "gpu_session.md").read_text()
    listed = session(bare, "--list", WHEELS=wheels).stdout.splitlines()[:-1]
    assert found.keys() == {line.split()[0] for line in listed}
    assert {name for name, row in found.items() if row["status"] == "absent"} == NOT_HERE.keys()
    assert all(name in page for name in found)
    # Rows of one model and one start lose alike: none of them has computed something else.
    runs = {name: row["figures"]["loss"] for name, row in found.items() if row["kind"] == "run" and "figures" in row}
    losses = [loss for name, loss in runs.items() if not name.startswith("sixteen/")]
    assert max(losses) - min(losses) < 0.05
    # ... but the float8 recipes differ from bf16 and from each other, and each from itself with its head in float8.
    formats = [loss for name, loss in runs.items() if name.startswith(("float8/", "ladder/chunked"))]
    assert len(set(formats)) == len(formats) == 7
    # The next call has nothing to do, and neither has one on a fresh machine with the rows carried back.
    for folder in (results, tmp_path / "fresh"):
        carried = [] if folder == results else ["--from", results]
        done = session(bare, *REHEARSE, *carried, WHEELS=wheels, OUT=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r" (measured|failed|late|cut) ", done.stdout[: done.stdout.index("# GPU session")]) is None
        assert rows_of(folder) == found


def check_figures(row):
    """What each kind of row measures is there, and is a number that can be."""
    figures = row["figures"]
    if row["kind"] == "products":
        assert not figures["failed"]
        formats = {name.split()[2].rstrip(",") for name in figures["rates"]}
        assert formats == {"bfloat16", "float8_tensorwise", "float8_rowwise"}
        assert all(rate["seconds"] > 0 and rate["tflops"] > 0 for rate in figures["rates"].values())
        assert sum("sustained" in name for name in figures["rates"]) == 3
        (attention,) = figures["attention"].values()
        assert attention["forward"]["seconds"] > 0
        assert attention["backward"]["seconds"] > 0
        assert figures["memory"]["copy"]["bytes_per_second"] > 0
        return
    assert figures["tokens_per_second"] > 0
    assert figures["step_seconds"] > 0
    assert row["predicted"]["tokens_per_second"] > 0
    assert row["predicted"]["reserved_bytes"] > 0
    assert figures["resident_bytes"] > 2**27
    if row["row"].startswith("memory/"):
        # A CPU's checkpointing keeps the state of the generator too, 5 KB a block: more than tiny blocks' other needs.
        declared = row["predicted"]["activation_bytes"] + 2 * 5056
        least = 0.5 if row["row"] == "memory/memory_budget" else 0.97
        assert least < figures["held_bytes"] / declared < 1.05, row["row"]
    if row["row"].startswith("kernels/"):
        assert figures["kernels"]["seconds"] > 0
        assert all(kernel["calls"] > 0 for kernel in figures["kernels"]["most"].values())
    if row["kind"] == "saves":
        saves = 0 if row["row"] == "saves/off" else 2
        assert figures["checkpoints"] == saves
        assert len(figures["extra_seconds"]) == 2
        if saves:
            # Beside the states a file has its index.
            assert 1 <= figures["checkpoint_bytes"] / row["predicted"]["checkpoint_bytes"] < 1.1


@pytest.mark.full
def test_the_tests_are_run_by_whatever_pytest_there_is(tmp_path):
    done = session(sys.executable, "--rehearse", "--only", "tests", WHEELS=tmp_path, OUT=tmp_path / "results")
    assert done.returncode == 0, done.stdout + done.stderr
    row = rows_of(tmp_path / "results")["tests/gpu"]
    assert row["status"] == "measured", row
    assert row["figures"]["tests"] == row["figures"]["passed"] > 0
    assert row["figures"]["failed"] == {}


@pytest.mark.full
def test_ending_a_session_ends_its_rows(tmp_path):
    environment = {**os.environ, "PYTHON": sys.executable, "WHEELS": str(tmp_path), "OUT": str(tmp_path / "results")}
    mark = f"TMPDIR={tmp_path}".encode()

    def rows_under_way():
        """Processes of this session that train."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_ours = mark in (path / "environ").read_bytes().split(b"\0")
                if is_ours and b"titanlab.launch.rank" in (path / "cmdline").read_bytes():
                    found.append(path)
        return found

    process = subprocess.Popen(
        [SCRIPT, "--rehearse", "--only", "ladder/eager"],
        env={**environment, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
    )
    end = time.monotonic() + 120
    while not rows_under_way():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 143
    assert not rows_under_way()
    assert not list(tmp_path.glob("gpu-session-*"))
