import json
import os
import py_compile
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import titanlab
from tests.sweep.conftest import quiet
from tests.sweep.studies import SLURM, seeds, study
from titanlab.records import code_fingerprint, collect, git_state
from titanlab.sweep import sweep_folder
from titanlab.sweep.submit import submit

PACKAGE = Path(titanlab.__file__).parent


def copy_of_the_clone(folder):
    for name in ("titanlab", "conf", "launch", "sweeps"):
        ignored = shutil.ignore_patterns("__pycache__", "dev-slurm")
        shutil.copytree(PACKAGE.parent / name, folder / name, symlinks=True, ignore=ignored)
    return folder / "titanlab"


def small_clone(folder):
    """A clone of few files, where nothing of the real one matters."""
    files = {
        "titanlab/__init__.py": "",
        "titanlab/launch/__init__.py": "",
        "titanlab/launch/task.py": "",
        "titanlab/distributed/__init__.py": "",
        "titanlab/distributed/stop.py": "",
        "titanlab/distributed/world.py": "# The world\n",
        "conf/config.yaml": "defaults: [_self_]\n",
        "conf/model/debug.yaml": "dim: 64\n",
        "launch/slurm.yaml": "kind: slurm\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder / "titanlab"


def git(folder, *words):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


def test_ranks_need_not_compile_what_was_compiled_before(tmp_path):
    package = small_clone(tmp_path / "clone")
    compiled = Path(py_compile.compile(package / "distributed" / "world.py", doraise=True))
    (compiled.parent / "world.cpython-311.pyc.123").write_text("a part")
    taken = sweep_folder.take_snapshot(tmp_path / "code", package=package)
    (copied,) = taken.rglob("__pycache__/*")
    assert copied.name == compiled.name
    # Python takes it for the copied source if time and size are those in its head.
    source = (taken / "titanlab" / "distributed" / "world.py").stat()
    assert struct.unpack("<II", copied.read_bytes()[8:16]) == (int(source.st_mtime), source.st_size)
    # The name of the copy is that of its sources alone.
    shutil.rmtree(compiled.parent)
    assert sweep_folder.take_snapshot(tmp_path / "code", package=package) == taken


def test_equal_content_is_one_copy_and_another_is_another(tmp_path):
    package = small_clone(tmp_path / "clone")
    first = sweep_folder.take_snapshot(tmp_path / "code", package=package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_text("x")
    assert sweep_folder.take_snapshot(tmp_path / "code", package=package) == first
    (tmp_path / "clone" / "conf" / "model" / "debug.yaml").write_text("dim: 8\n")
    assert sweep_folder.take_snapshot(tmp_path / "code", package=package) != first


def test_a_wheels_yamls_are_inside_its_package(tmp_path):
    package = small_clone(tmp_path / "site")
    shutil.copytree(tmp_path / "site" / "conf", package / "conf")
    shutil.rmtree(tmp_path / "site" / "conf")
    (tmp_path / "site" / "launch" / "somebody_elses.yaml").write_text("")
    taken = sweep_folder.take_snapshot(tmp_path / "code", package=package)
    assert (taken / "titanlab" / "conf" / "config.yaml").is_file()
    assert not (taken / "launch").exists()
    assert git_state(taken / "titanlab") is None


def test_its_git_state_is_what_was_recorded(tmp_path):
    clone = tmp_path / "clone"
    package = small_clone(clone)
    git(clone, "init")
    git(clone, "add", "-A")
    git(clone, "commit", "-m", "all of it")
    (package / "distributed" / "world.py").write_text("# edited\n")
    before = git_state(package)
    taken = sweep_folder.take_snapshot(tmp_path / "code", package=package)
    git(clone, "checkout", ".")
    assert before is not None
    assert before.dirty
    assert "+# edited" in before.patch
    assert git_state(taken / "titanlab") == before


def test_what_is_edited_after_submission_reaches_no_job(slurm, tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    package = small_clone(clone)
    (package / "launch" / "task.py").write_text("import titanlab.distributed.stop\nprint(titanlab.__file__)\n")
    taken = sweep_folder.take_snapshot
    monkeypatch.setattr(sweep_folder, "take_snapshot", lambda code: taken(code, package=package))
    folder = submit(study(tmp_path / "runs", seeds(1), launch=SLURM), quiet).folder
    (submission,) = folder.submissions()
    script = slurm.jobs()[101]["script"]

    (package / "launch" / "task.py").write_text("raise SystemExit('edited')\n")
    (package / "distributed" / "stop.py").write_text("raise SystemExit('edited')\n")
    # As Slurm runs it, in the clone itself, in which a plain `python -m` would find the edited code first. srun runs
    # what stands behind its own words.
    srun = slurm.folder / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\nwhile [ "$1" != {sys.executable} ]; do shift; done\nexec "$@"\n')
    ran = subprocess.run(["bash", "-c", script], cwd=clone, capture_output=True, text=True, env=os.environ, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.strip() == str(folder.path / submission.code / "titanlab" / "__init__.py")


def test_its_code_is_what_env_json_tells(tmp_path):
    """In a job the package is that of the snapshot: the record of a run is made from there."""
    package = copy_of_the_clone(tmp_path / "clone")
    taken = sweep_folder.take_snapshot(tmp_path / "code", package=package)
    for name in ("titanlab/train/train.py", "conf/config.yaml", "conf/launch/local.yaml", "launch/slurm.yaml"):
        assert (taken / name).is_file()
    assert not list(taken.rglob("__pycache__"))
    assert json.loads((taken / "code.json").read_text())["fingerprint"] == code_fingerprint(package)
    assert [path.name for path in (tmp_path / "code").iterdir()] == [taken.name]
    code = "import json; from titanlab.records.provenance import collect; "
    code += "print(json.dumps(dict(collect(devices={}, launcher='slurm').record['code'])))"
    environment = {**os.environ, "PYTHONPATH": str(taken), "PYTHONSAFEPATH": "1"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(told.stdout)["fingerprint"] == code_fingerprint(package)
    assert json.loads(told.stdout)["fingerprint"] == collect(devices={}, launcher="local").record["code"]["fingerprint"]
