"""One rank: its environment, what it imports before its first step, and the note of its failure."""

import inspect
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._library.utils import get_source

from tests import tiny
from tests.planted_schema import Planted
from tests.test_layers import HEAVY
from titanlab.distributed import ALONE, Ranks, cores
from titanlab.distributed.start_up import FILE, PHASES
from titanlab.launch import import_techniques
from titanlab.launch import processes as local
from titanlab.launch.launchers_schema import Local
from titanlab.launch.rank import rank as worker
from titanlab.launch.rank.rank import _frames_know_their_module
from titanlab.recipe import to_mapping
from titanlab.records import OutcomeKind

ROOT = Path(__file__).parent.parent.parent
TWO = Ranks(rank=1, world=2, local_rank=1, local_world=2, address="127.0.0.1", port=1234, started_by="local")
ALLOCATOR = "expandable_segments:True"

# Runs the worker up to the first import of torch, and tells what the environment is there.
UP_TO_TORCH = """
    import json, os, sys

    class Watch:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                print(json.dumps(dict(os.environ)), flush=True)
                os._exit(0)

    sys.meta_path.insert(0, Watch())
    from titanlab.launch.rank import rank
    rank.main(sys.argv[1:])
"""


def python(script, *arguments, given=None, **environment):
    clean = {
        name: value for name, value in os.environ.items() if "THREADS" not in name and name != "TOKENIZERS_PARALLELISM"
    }
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=clean | environment,
        timeout=60,
        check=False,
    )


def test_the_environment_is_set_before_torch_is_imported(tmp_path):
    made = tiny.recipe(tmp_path, deterministic=True)
    made = replace(made, launch=Local(threads=3))
    done = python(UP_TO_TORCH, tiny.begin(made).path, PYTORCH_ALLOC_CONF="mine")
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    assert there["OMP_NUM_THREADS"] == "3"
    assert there["PYTORCH_CUDA_ALLOC_CONF"] == ALLOCATOR
    assert there["PYTORCH_ALLOC_CONF"] == "mine"
    assert there["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert there["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (there["RANK"], there["WORLD_SIZE"]) == ("0", "1")


def test_more_threads_than_cores_are_refused_in_one_line(tmp_path):
    name = "MKL_NUM_THREADS"
    made = tiny.recipe(tmp_path, replicate=2)
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    run = tiny.begin(made)
    done = python(UP_TO_TORCH, run.path, **given, **{name: "99"}, TITANLAB_CORES="3")
    assert json.loads(done.stdout)[name] == "3"
    rule = "2 processes on this host would use more threads than there are cores; each uses 3"
    assert done.stderr == f"warning: {name}=99: {rule} (launch.threads overrides it)\n"


def test_a_recipe_that_is_handed_over_needs_no_attempt(tmp_path):
    """Rank 0's launcher may not have begun it yet, and nobody else may."""
    made = tiny.recipe(tmp_path, replicate=2)
    run = tiny.begin(made)
    run.attempt_folder(1).rename(tmp_path / "aside")
    done = python(
        UP_TO_TORCH, run.path, "-", given=json.dumps(to_mapping(made)), RANK="1", WORLD_SIZE="2", MASTER_PORT="1"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["LOCAL_WORLD_SIZE"] == "2"
    assert run.attempts() == []


@pytest.mark.parametrize(
    ("ranks", "threads", "there", "expected"),
    [
        (ALONE, None, {}, {"OMP_NUM_THREADS": str(cores())}),
        (TWO, None, {}, {"OMP_NUM_THREADS": str(max(1, cores() // 2)), "RANK": "1", "MASTER_PORT": "1234"}),
        (TWO, 5, {}, {"OMP_NUM_THREADS": "5"}),
        (TWO, 5, {"OMP_NUM_THREADS": "7", "RANK": "1"}, {"OMP_NUM_THREADS": "5", "RANK": None, "WORLD_SIZE": "2"}),
        (TWO, None, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": None}),
    ],
)
def test_a_persons_own_settings_win(tmp_path, monkeypatch, ranks, threads, there, expected):
    made = replace(tiny.recipe(tmp_path), launch=Local(threads=threads))
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in there.items():
        monkeypatch.setenv(name, value)
    found = worker.environment(made, ranks)
    assert {name: found.get(name) for name in expected} == expected
    assert "CUBLAS_WORKSPACE_CONFIG" not in found


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Runs the worker in this process on data that cannot be prepared, so that torch is not needed."""
    monkeypatch.setenv("TITANLAB_PARENT", str(os.getppid()))
    for name in ("end_with_parent", "_keep_freed_memory"):
        monkeypatch.setattr(worker, name, lambda: None)
    monkeypatch.setattr(worker, "from_mapping", lambda mapping: made)
    # Nobody watches: the timer is pytest's own here.
    limits = {"step_timeout_seconds": 0.0, "first_step_timeout_seconds": None}
    made = tiny.recipe(tmp_path, data=Planted(fault="raise"), **limits)
    before = dict(os.environ)
    yield made, tiny.begin(made)
    os.environ.clear()
    os.environ.update(before)


def test_a_failure_is_noted_and_told(failing, capfd):
    _, run = failing
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
    assert worker.main([str(run.path)]) == 1
    (note,) = run.failures(1)
    assert (note.kind, note.rank, note.attempt, note.echo) == (OutcomeKind.CRASH, 0, 1, False)
    assert note.cause == "LookupError: a planted fault"
    assert capfd.readouterr().err.count("Traceback") == 1


def test_the_note_goes_to_the_attempt_that_is_latest_then(failing, monkeypatch):
    made, run = failing
    monkeypatch.setattr("sys.stdin", io.StringIO("{}"))
    monkeypatch.setattr(worker.source, "prepare", lambda data, report: tiny.begin(made, run) and fail())
    assert worker.main([str(run.path), "-"]) == 1
    assert [len(run.failures(attempt)) for attempt in run.attempts()] == [0, 1]


def fail():
    raise LookupError("a planted fault")


def test_without_an_attempt_there_is_no_note(failing, tmp_path, capfd):
    _, run = failing
    run.attempt_folder(1).rename(tmp_path / "aside")
    assert worker.main([str(run.path)]) == 1
    assert run.attempts() == []
    assert "Traceback" in capfd.readouterr().err


def ended_by(failing, monkeypatch, error):
    """The exit code of a worker whose data raise an error, and its note."""

    def stop(data, report):
        raise error

    _, run = failing
    monkeypatch.setattr(worker.source, "prepare", stop)
    code = worker.main([str(run.path)])
    (note,) = run.failures(1)
    return code, note


def test_an_echo_is_noted_and_not_told(failing, monkeypatch, capfd):
    code, note = ended_by(failing, monkeypatch, ConnectionResetError("Connection reset by peer"))
    assert (code, note.echo) == (1, True)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("step", "saved", "lost"),
    [(0, 0, ""), (6, 0, "; 6 steps are lost"), (6, 5, "; 1 step since the checkpoint of step 5 is lost")],
)
def test_a_second_ctrl_c_is_the_cause_and_says_what_is_lost(failing, monkeypatch, capfd, step, saved, lost):
    """Other ranks lose their connection to this one. It was told as "step 1", where 6 were done."""
    monkeypatch.setattr(worker.Watchdog, "done", property(lambda self: step))
    if saved:
        failing[1].note_saved(1, saved)
    code, note = ended_by(failing, monkeypatch, KeyboardInterrupt())
    assert (code, note.kind, note.step, note.echo) == (130, OutcomeKind.CANCELLED, step, False)
    assert note.cause == f"interrupted again, so it has not saved{lost}"
    assert capfd.readouterr().err == ""


def test_a_signal_waits_for_the_note(failing, monkeypatch):
    """The launcher ends the other ranks as soon as one is gone: each must still say why it ended."""

    def asked_to_end(data, report):
        os.kill(os.getpid(), signal.SIGTERM)
        fail()

    _, run = failing
    monkeypatch.setattr(worker.source, "prepare", asked_to_end)
    assert worker.main([str(run.path)]) == 1
    assert [note.cause for note in run.failures(1)] == ["LookupError: a planted fault"]


def test_what_is_printed_is_added_to_the_log_at_once(tmp_path):
    log = tmp_path / "rank-1.log"
    script = """
        import os, signal
        from titanlab.launch.rank import rank
        rank._write_to_own_log()
        os.system("echo err >&2")
        print("a loss")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    # Where Python does not buffer, nothing could be lost.
    for _ in range(2):
        done = python(script, TITANLAB_LOG=str(log), PYTHONUNBUFFERED="")
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")
    assert log.read_text() == "err\na loss\n" * 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells a process that its parent is gone")
def test_a_rank_whose_launcher_is_gone_already_does_not_begin():
    done = python("from titanlab.launch.rank.fork import end_with_parent; end_with_parent()", TITANLAB_PARENT="1")
    assert done.returncode == 1
    done = python(
        "from titanlab.launch.rank.fork import end_with_parent; end_with_parent()", TITANLAB_PARENT=str(os.getpid())
    )
    assert done.returncode == 0


def test_torch_finds_the_caller_of_an_operator_without_a_look_at_every_module(monkeypatch):
    searched = inspect.getmodule
    looked = []
    monkeypatch.setattr(inspect.os.path, "realpath", lambda path, **_: looked.append(path) or path)
    frame = sys._getframe()
    with _frames_know_their_module():
        assert inspect.getmodule(frame) is sys.modules[__name__]
        # As torch does for each operator that it registers.
        assert get_source(1) == f"{__file__}:{frame.f_lineno}"
        assert looked == []
        assert inspect.getmodule(pathlib.Path) is pathlib
        unnamed = eval("sys._getframe()", {"sys": sys})
        assert inspect.getmodule(unnamed) is None
    assert inspect.getmodule is searched


# What a plain run does not need: each takes a tenth of a second or more to import.
UNNEEDED = {
    *(HEAVY - {"torch"}),
    *("hydra", "rich", "scipy", "transformers", "IPython"),
    *("torch._inductor.compile_fx", "torch.distributed.pipelining", "torch.utils.tensorboard"),
    *("torch.testing._internal.common_utils", "torch.ao.quantization.fx"),
}
# A build of torch for GPUs, which brings Triton, imports it with its compiler.
if torch.version.cuda is None:
    UNNEEDED.add("triton")

# A worker that notes what was collected while it imported, and what is imported after the fork and by the first step.
WORKER = """
    import gc, json, os, sys
    from pathlib import Path
    from titanlab.launch.rank import rank

    shared, collections = set(), []
    os.register_at_fork(after_in_child=lambda: shared.update(sys.modules))
    import_trainer = rank.import_trainer

    def watched():
        before = [each["collections"] for each in gc.get_stats()]
        import_trainer()
        collections.extend(each["collections"] - old for each, old in zip(gc.get_stats(), before))

    def observe(recipe, run, ranks):
        from titanlab.train.train import Observer

        class Noting(Observer):
            def after_step(self, step, totals):
                noted = {
                    "modules": sorted(sys.modules),
                    "own": sorted(set(sys.modules) - shared),
                    "collections": collections,
                    "kept": gc.get_freeze_count(),
                    "enabled": gc.isenabled(),
                }
                (Path(run.path) / f"noted-{ranks.rank}.json").write_text(json.dumps(noted))

        return Noting()

    rank.import_trainer = watched
    os._exit(rank.main(sys.argv[1:], observe=observe))
"""


@pytest.mark.full
@pytest.mark.covering
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are not forked")
def test_two_ranks_share_their_imports_and_collect_nothing_while_they_import(monkeypatch, tmp_path):
    made = tiny.recipe(tmp_path, shard=2, steps=2, saves="off")
    run = tiny.begin(made)
    command = [sys.executable, "-c", textwrap.dedent(WORKER)]
    monkeypatch.setattr(local, "worker_command", lambda folder: [*command, str(folder)])
    assert local.start(run, local.of_this_host(2), attempt=1) == {}
    for rank in range(2):
        noted = json.loads((run.path / f"noted-{rank}.json").read_text())
        assert UNNEEDED & set(noted["modules"]) == set()
        # The techniques and all of torch are imported once for both.
        own = {".".join(name.split(".")[:2]) for name in noted["own"]}
        parts = ("model", "precision", "ac", "optimizer", "parallelism", "train", "launch", "recipe")
        assert own & {f"titanlab.{part}" for part in parts} == set()
        assert [name for name in noted["own"] if name.startswith(("torch.", "sympy")) and "cupti" not in name] == []
        assert set(noted["collections"]) == {0}
        assert noted["kept"] > 100_000
    start_up = json.loads((run.attempt_folder(1) / FILE).read_text())
    assert list(start_up["seconds"]) == list(PHASES)
    assert all(seconds >= 0 for seconds in start_up["seconds"].values())
    assert start_up["total"] == pytest.approx(sum(start_up["seconds"].values()), abs=1e-3)


def test_a_technique_that_cannot_be_imported_is_left_to_the_ranks():
    """Each of them records the failure."""
    imported = []

    def technique(name):
        return SimpleNamespace(implementation=lambda: imported.append(name), layer_class=None)

    def absent():
        raise ImportError("a planted fault")

    techniques = {name: technique(name) for name in ("model", "precision", "ac", "optimizer")}
    import_techniques(SimpleNamespace(**techniques, layout=SimpleNamespace(pipeline=1)))
    assert sorted(imported) == sorted(techniques)
    techniques["precision"].implementation = absent
    import_techniques(SimpleNamespace(**techniques, layout=SimpleNamespace(pipeline=1)))
