"""A rank that does not come on: who is late, and how its process ends."""

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import titanlab
from tests import tiny
from titanlab.distributed import Watchdog, hang
from titanlab.distributed.hang import FIRST_STEP_KEY, STEP_KEY, StepTimes, waits_for_others
from titanlab.records import Collective, GroupRecord, Messages, read_hang, write_hang

HERE = """
    import ctypes, json, queue, sys, time
    from dataclasses import asdict
    from titanlab.distributed import Watchdog, hang
    hang.LINGER_SECONDS = 0.1
    hang._NATIVE_MARGIN_SECONDS = 0.5

    def in_torch():
        scope = {"sleep": time.sleep}
        exec(compile("def wait():\\n    sleep(100)", "/venv/torch/autograd/graph.py", "exec"), scope)
        scope["wait"]()

    def note(outcome, record):
        assert (record.rank, record.step, record.phase) == (outcome.rank, outcome.step, outcome.cause[:len(record.phase)])
        assert (record.state == "waits", record.state in outcome.cause) == (outcome.echo, True)
        print(json.dumps(asdict(outcome)), flush=True)

    asked = []
    dog = Watchdog(
        step_seconds=0.5, first_seconds=FIRST, note=note, rank=3, attempt=2, is_asked=lambda: bool(asked)
    )

    def slow_step():
        BODY

    slow_step()
    print("came on")
"""

PACKAGE = Path(titanlab.__file__).parent


def started(body, first=30.0):
    script = textwrap.dedent(HERE).replace("FIRST", repr(first)).replace("BODY", body)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# What processes do; most of the time they wait, so that all but one do at once.
BODIES = {
    "does not end": ("dog.step(1); dog.step(2); time.sleep(100)", 30.0),
    "start does not end": ("time.sleep(100)", 0.4),
    "longer first step and pause": (
        'time.sleep(1); dog.step(1); time.sleep(1); dog.step(2)\n    with dog.pausing("validation", 2):\n        time.sleep(1)\n    dog.ending(2); time.sleep(1)',
        30.0,
    ),
    "computes": ("dog.step(1); dog.step(2)\n    while True: pass", 30.0),
    "others wait": ("dog.step(1); asked.append(1); time.sleep(100)", 30.0),
    "waits": ("dog.step(1); dog.step(2); in_torch()", 30.0),
    "in Python's library": ("dog.step(1); dog.step(2); queue.Queue().get()", 30.0),
}


@pytest.fixture(scope="module")
def ended():
    """How these processes end: `ended("pause")`."""
    processes = {name: started(*how) for name, how in BODIES.items()}
    outputs = {name: process.communicate(timeout=120) for name, process in processes.items()}
    return lambda name: subprocess.CompletedProcess([], processes[name].returncode, *outputs[name])


def test_a_step_that_does_not_end(ended):
    done = ended("does not end")
    assert done.returncode == 71
    told = json.loads(done.stdout)
    assert (told["kind"], told["step"], told["rank"], told["attempt"], told["exit_code"]) == ("hang", 1, 3, 2, 71)
    assert told["cause"].startswith("step 2 did not end within 0.5 s: rank 3 stands in slow_step (")
    assert "in slow_step" in told["traceback"]
    assert not told["echo"]
    assert "most recent call first" in done.stderr
    assert "in slow_step" in done.stderr


def test_the_start_has_the_limit_of_the_first_step(ended):
    told = json.loads(ended("start does not end").stdout)
    assert told["cause"].startswith("the start did not end within 0.4")


def test_the_first_step_and_a_pause_between_steps_may_take_longer(ended):
    done = ended("longer first step and pause")
    assert (done.returncode, done.stdout) == (0, "came on\n"), done.stderr


def test_native_code_that_keeps_pythons_lock_is_ended_too():
    process = started("dog.step(1); dog.step(2); time.sleep(0.3); ctypes.PyDLL(None).sleep(100)")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(hang.NATIVE_SIGN)
    assert "in slow_step" in err


def test_a_rank_that_computes_keeps_others_waiting(ended):
    """In an endless loop of its own, or in a step that is longer than the limit."""
    cause = json.loads(ended("computes").stdout)["cause"]
    assert cause.startswith("step 2 did not end within 0.5 s: rank 3 computes in slow_step (")


def test_a_rank_that_others_wait_for_says_where_it_stands_before_its_own_limit(ended):
    done = ended("others wait")
    told = json.loads(done.stdout)
    assert done.returncode == 71
    assert told["cause"].startswith("step 1 had not ended after ")
    assert " s, when another rank reached its limit: rank 3 stands in slow_step (" in told["cause"]
    assert not told["echo"]


def steps_of(*seconds):
    times = StepTimes()
    for each in seconds:
        times.add(each)
    return times


@pytest.mark.parametrize(
    ("seconds", "limit", "advice"),
    [
        ((90, 2, 1, 3), 600.0, "steps before it took 2 s (median of 3); training.step_timeout_seconds=600"),
        (
            (90, 2, 1, 3),
            5.0,
            "steps before it took 2 s (median of 3); if it was only slow, try training.step_timeout_seconds=20",
        ),
        (
            (90,),
            100.0,
            "the one step before it took 90 s; if it was only slow, try training.step_timeout_seconds=900",
        ),
        ((), 0.25, "no step is complete yet; if it was only slow, try training.step_timeout_seconds=1"),
        (
            (90, 131),
            140.0,
            "steps before it took 131 s (median of 1); if it was only slow, try training.step_timeout_seconds=1310",
        ),
    ],
)
def test_advice(seconds, limit, advice):
    assert steps_of(*seconds).advice(STEP_KEY, limit) == advice


def test_pauses_between_steps_are_not_counted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(hang.time, "monotonic", lambda: now[0])
    dog = Watchdog(step_seconds=0.0, first_seconds=None, note=pytest.fail)
    for step, seconds in enumerate((90, 2, 2, 0), 1):
        dog.step(step)
        now[0] += seconds
        with dog.pausing("validation", step):
            now[0] += 1000.0
    assert dog._times.advice(FIRST_STEP_KEY, None) == "steps before it took 2 s (median of 2)"


def test_without_limits_nothing_is_started():
    dog = Watchdog(step_seconds=0.0, first_seconds=None, note=pytest.fail)
    dog.step(1)
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [((90, 2, 3), None), ((90, 2, 3, 4), 60.0), ((90, 7, 50, 6), 70.0), ((90, 700, 500, 600, 800), 6500.0)],
)
def test_the_limit_of_a_step_that_the_config_leaves_open(seconds, limit):
    assert steps_of(*seconds).limit() == limit


@pytest.mark.parametrize(
    ("step_seconds", "keys"),
    [
        (None, [(3600.0, FIRST_STEP_KEY)] * 4 + [(60.0, STEP_KEY)] * 2),
        (7.0, [(3600.0, FIRST_STEP_KEY)] + [(7.0, STEP_KEY)] * 5),
        (0.0, [(3600.0, FIRST_STEP_KEY)] + [(None, STEP_KEY)] * 5),
    ],
)
def test_the_limit_in_force_at_each_step(step_seconds, keys):
    dog = Watchdog(step_seconds=step_seconds, first_seconds=3600.0, note=pytest.fail)
    found = []
    for step in range(1, 7):
        dog.step(step)
        found.append((dog._phase.limit, dog._phase.key))
        with dog.pausing("validation", step):
            assert dog._phase.limit == 3600.0
    dog.close()
    assert found == keys


def test_what_counts_as_file_access_exists():
    """The list has paths as text, which a move does not change."""
    paths = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")]
    starts = hang._OWN_FILE_MODULES
    assert [start for start in starts if not any(path.startswith(start) for path in paths)] == []


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("/venv/torch/distributed/distributed_c10d.py", True),
        ("/venv/torch/autograd/graph.py", True),
        (PACKAGE / "train" / "totals.py", True),
        (PACKAGE / "data" / "stream.py", False),
        (PACKAGE / "train" / "weights.py", False),
        (PACKAGE / "system" / "files.py", False),
        ("/venv/torch/distributed/checkpoint/filesystem.py", False),
        ("/venv/torch/serialization.py", False),
        ("/home/me/observer.py", False),
    ],
)
def test_who_waits_for_others(file, waits):
    assert waits_for_others(str(file)) == waits


def test_a_rank_that_waits_for_others_is_an_echo(ended):
    told = json.loads(ended("waits").stdout)
    assert told["cause"].startswith("step 2 did not end within 0.5 s: rank 3 waits in wait (autograd/graph.py:2); ")
    assert told["echo"]


def test_pythons_own_library_is_passed_over_for_its_caller(ended):
    cause = json.loads(ended("in Python's library").stdout)["cause"]
    assert cause.startswith("step 2 did not end within 0.5 s: rank 3 stands in slow_step (")


@pytest.mark.parametrize(("world", "seconds"), [(1, 2.0), (256, 2.0), (512, 4.0), (4096, 5.0)])
def test_many_ranks_look_for_notes_less_often(world, seconds):
    """The notes lie on a shared file system."""
    assert Watchdog(step_seconds=0.0, first_seconds=None, note=pytest.fail, world=world)._look_seconds == seconds


# The process and its competitors share one core, and it comes last.
SCRIPT = """
import os, subprocess, sys, threading, time
from titanlab.distributed.hang import main_thread_is_busy

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
loop = "import time\\nwhile time.process_time() < 60: pass"
others = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(3)]
os.nice(10)
found = []
waited = threading.Event()

def measure():
    for _ in range(2):
        # Until the main thread has come to where it waits or computes.
        time.sleep(0.5)
        found.append(main_thread_is_busy())
        waited.set()

measures = threading.Thread(target=measure)
measures.start()
waited.wait()
while len(found) < 2:
    pass
measures.join()
for other in others:
    other.kill()
print(*found)
"""


@pytest.mark.full
def test_a_thread_that_computes_is_busy_also_where_it_hardly_gets_a_core():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    # First it waits, then it computes.
    assert done.stdout.split() == ["False", "True"]


def raised_in(file, function="here", deeper=0):
    """An error of a function that is defined in a file of this name."""
    lines = [f"def {function}(deeper):", f"    return {function}(deeper - 1) if deeper else open('/nowhere')"]
    scope = {}
    exec(compile("\n".join(lines), str(file), "exec"), scope)
    with pytest.raises(FileNotFoundError) as raised:
        scope[function](deeper)
    return raised.value


def recorded(error, **known):
    dog = Watchdog(step_seconds=0.0, first_seconds=None, note=pytest.fail, rank=2)
    dog.step(3)
    dog.learn(lambda: known)
    return dog.record_of_error(error)


def test_a_record_names_the_innermost_line_that_is_not_torchs():
    found = recorded(raised_in("/venv/torch/distributed/distributed_c10d.py", "wait"))
    assert (found.source.function, found.stack[0].function, found.activity) == ("raised_in", "wait", "")
    assert (found.rank, found.state, found.phase, found.step, found.limit) == (2, "raised", "step 3", 2, None)
    assert (found.groups, found.messages, found.collectives) == ({}, None, ())
    assert len(recorded(raised_in("x.py", deeper=99)).stack) == 60
    assert recorded(LookupError()).source is None


@pytest.mark.parametrize(
    ("file", "function", "activity"),
    [
        ("data/stream.py", "read", "data"),
        ("checkpoint/saving.py", "save", "checkpoint"),
        ("train/train.py", "train", ""),
        ("train/train.py", "next_batch", "data"),
    ],
)
def test_what_a_rank_is_busy_with(file, function, activity):
    found = recorded(raised_in(PACKAGE / file, function))
    assert (found.activity, found.source.file) == (activity, f"titanlab/{file}")


def test_a_record_has_the_place_of_the_rank_among_the_others(tmp_path):
    call = Collective("1", 4, "all_reduce", ((8,), ()), ("Float",), is_message=False, is_done=True, created=2.5)
    known = {
        "groups": {"1": GroupRecord("shard", (0, 2))},
        "coordinates": {"shard": 1},
        "messages": Messages(runs=True, stages=(0, 2), sent={1: 3}, received={}, waiting=None),
        "collectives": (call,),
    }
    run = tiny.begin(tiny.recipe(tmp_path))
    write_hang(run, 1, recorded(LookupError(), **known))
    found = read_hang(run, 1)[0][2]
    assert {name: getattr(found, name) for name in known} == known
