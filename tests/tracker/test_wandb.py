"""tracker=wandb: the real one offline, and one that hangs, raises, dies, or is not there."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.until import until
from titanlab.system import process_state
from titanlab.techniques.tracker import wandb as writer
from titanlab.techniques.tracker.contract import FINISHED, OPEN, TrackedRun, open_tracker, read_record
from titanlab.techniques.tracker.trackers_schema import Jsonl, Wandb


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "attempts" / "1").mkdir(parents=True)
    return TrackedRun(
        id="abcd1111abcd1111",
        name="toy-abcd1111",
        sweep="layouts",
        folder=tmp_path / "run",
        config={"model": {"dim": 256}, "seed": 0},
        layout={"replicate": 1, "shard": 2},
        facts={"parameters": 5769472},
        tags=["llama", "cpu", "fp32", "llama", "x" * 80],
    )


@pytest.fixture
def told():
    return []


@pytest.fixture
def open_fake(monkeypatch, tmp_path, run, told):
    """`open_fake(source)`: a tracker whose writer finds our own `wandb`, and a server that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        # wandb refuses to start with it.
        monkeypatch.setenv("WANDB_MODE", "")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
        (tmp_path / "fake").mkdir()

        def opened(source=FAKE, **given):
            (tmp_path / "fake" / "wandb.py").write_text(source)
            return open_tracker(Wandb(**{"mode": "online", "finish_seconds": 30, **given}), run, warn=told.append)

        yield opened


FAKE = """
import json, os, time
out = open(os.environ["FAKE_OUT"], "a", buffering=1)
def tell(*what): print(json.dumps(what), file=out)
class Settings:
    def __init__(self, **given): self.given = given
class Summary(dict):
    pass
class Run:
    def __init__(self, folder): self.summary, self.dir = Summary(), folder + "/wandb/offline-run-1-x/files"
    def log(self, metrics, step, commit=None):
        if metrics: tell("log", step, metrics)
    def finish(self, exit_code=0): tell("finish", exit_code, self.summary)
def teardown(): pass
def init(**given):
    assert os.environ.get("WANDB_MODE") != ""
    settings = given.pop("settings")
    tell("init", given, settings.given)
    return Run(given["dir"])
"""


@pytest.fixture
def fake_out(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    monkeypatch.setenv("FAKE_OUT", str(path))

    def read():
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return read


def inspect(folder):
    """The records of a wandb file."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


ALL = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGXCPU)


def descendants(pid):
    """A process and all that it, and they, have started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    started = [each for path in Path(f"/proc/{pid}/task").iterdir() for each in (path / "children").read_text().split()]
    return [pid, *(found for child in {*children, *started} for found in descendants(int(child)))]


def test_the_real_wandb_offline(run, told):
    tracker = open_tracker(Wandb(mode="offline", tags=["mine"], finish_seconds=120), run, warn=told.append)
    tracker.log(5, {"loss_metrics/global_avg_loss": 10.0 / 5, "mfu(%)": None, "lr": float("nan")})
    # Signals to every process of a job cost no row.
    until(lambda: (record := read_record(run.record)) is not None and record.state == OPEN)
    everybody = descendants(tracker._process.pid)
    assert any("wandb-core" in Path(f"/proc/{pid}/cmdline").read_text() for pid in everybody)
    for number in ALL:
        for pid in everybody:
            os.kill(pid, number)
    for step in (6, 7):
        tracker.log(step, {"loss_metrics/global_avg_loss": 10.0 / step, "mfu(%)": None, "lr": float("nan")})
    tracker.log(7, {"validation_metrics/loss": 2.5})
    summary = {"throughput(tps)": 123.0, "mfu(%)": None, "loss_metrics/global_avg_loss": 1.25}
    tracker.finish(summary, exit_code=75)
    assert told == [], (run.folder / "logs" / "wandb.log").read_text()

    records = inspect(run.folder)
    opened = next(record["run"] for record in records if record["type"] == "run")
    assert opened["run_id"] == run.id
    assert opened["display_name"] == run.name
    assert opened["run_group"] == "layouts"
    assert opened["job_type"] == "train"
    assert opened["project"] == "titanlab"
    assert sorted(opened["tags"]) == sorted(["llama", "cpu", "fp32", "x" * 64, "mine"])
    config = opened["config"]["update"]
    assert config["layout.shard"] == 2
    assert config["layout.replicate"] == 1
    # Panels read a dot as a step into a mapping.
    assert config["layout"] == {"replicate": 1, "shard": 2}
    assert config["parameters"] == 5769472
    assert config["model"] == {"dim": 256}

    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [row["_step"] for row in rows] == [5, 6, 7]
    assert [row["loss_metrics/global_avg_loss"] for row in rows] == [10 / 5, 10 / 6, 10 / 7]
    assert rows[2]["validation_metrics/loss"] == 2.5
    assert not any("mfu(%)" in row or "lr" in row for row in rows)

    summary = {}
    for record in records:
        summary |= record.get("summary", {}).get("update", {})
    assert summary["throughput(tps)"] == 123.0
    # Ours, and not that of the last row.
    assert summary["loss_metrics/global_avg_loss"] == 1.25
    assert [record["exit"].get("exit_code", 0) for record in records if record["type"] == "exit"] == [75]


def test_what_wandb_is_told_costs_little_and_it_is_never_imported_here(run, told, open_fake, monkeypatch, fake_out):
    # Tests of other modules may have imported it.
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    # Where Python does not buffer, nothing could be left in a buffer.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    tracker = open_fake(FAKE + "\nprint('hello from wandb')\n", group="mine", project="p", entity="e")
    row = {"loss": 1.5, "mfu(%)": None, **{f"metric/{number}": float(number) for number in range(20)}}
    # CPU time: other work on the machine does not count.
    start = time.thread_time()
    for step in range(1000):
        tracker.log(step, row)
    assert (time.thread_time() - start) / 1000 < 1e-3
    tracker.finish({"loss": 1.0, "peak": None}, exit_code=72)
    (_, given, settings), *rest = fake_out()
    del row["mfu(%)"]
    assert rest == [*(["log", step, row] for step in range(1000)), ["finish", 72, {"loss": 1.0}]]
    assert (given["id"], given["resume"], given["mode"]) == (run.id, None, "online")
    assert (given["group"], given["project"], given["entity"]) == ("mine", "p", "e")
    assert given["dir"] == str(run.folder)
    assert (settings["console"], settings["silent"], settings["x_stats_pid"]) == ("off", True, os.getpid())
    assert told == []
    assert "hello from wandb" in (run.folder / "logs" / "wandb.log").read_text()
    assert "wandb" not in sys.modules


HANGS = "import time\nSettings = dict\ndef init(**given): time.sleep(1000)\n"


def test_one_that_hangs_costs_a_warning_and_the_finish_seconds(told, open_fake):
    tracker = open_fake(HANGS, finish_seconds=0.5)
    process = tracker._process
    for step in range(100):
        tracker.log(step, {"loss": 1.0})
    start = time.monotonic()
    tracker.finish({})
    assert 0.4 < time.monotonic() - start < 60
    assert len(told) == 1
    assert told[0].startswith("wandb: took longer than 0.5 s to finish; metrics.jsonl has everything")
    assert process.returncode == -signal.SIGKILL
    tracker.log(101, {"loss": 1.0})
    tracker.finish({})
    assert len(told) == 1


def test_an_upload_may_take_as_long_as_finish_seconds(told, open_fake, fake_out):
    """The writer limits its time only if the training process has died."""
    slow = FAKE.replace("def finish(self, exit_code=0):", "def finish(self, exit_code=0): time.sleep(1.5); ")
    tracker = open_fake(slow + "import __main__\n__main__._ORPHAN_SECONDS = 0.2\n")
    until(fake_out)
    tracker.finish({"loss": 1.0})
    assert told == []
    assert fake_out()[-1] == ["finish", 0, {"loss": 1.0}]
    until(lambda: not any(thread.name == "wandb" for thread in threading.enumerate()))


def test_one_that_takes_no_rows_fills_a_bounded_queue_and_counts_what_is_left_out(run, told, open_fake, fake_out):
    tracker = open_fake(queue_rows=50)
    pid = tracker._process.pid
    os.kill(pid, signal.SIGSTOP)
    until(lambda: process_state(pid) == "T")
    start = time.monotonic()
    for step in range(1000):
        tracker.log(step, {"text": "x" * 1000})
    assert time.monotonic() - start < 60
    assert told == ["wandb: cannot keep up, so rows are left out of it; metrics.jsonl has them all"]
    os.kill(pid, signal.SIGCONT)
    tracker.finish({"loss": 1.0})
    # What was taken came whole and in order, the summary with it.
    steps = [step for what, step, _ in fake_out() if what == "log"]
    assert steps == sorted(set(steps))
    # The queue; and what went into the pipe, if the thread that empties the queue had its turn.
    assert 50 <= len(steps) < 1000
    assert fake_out()[-1] == ["finish", 0, {"loss": 1.0}]
    assert len(told) == 1
    record = read_record(run.record)
    assert (record.state, record.rows, record.left_out) == (FINISHED, len(steps), 1000 - len(steps))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (FAKE.replace('tell("log", step, metrics)', "raise ValueError('bad row')"), "stopped (ValueError: bad row)"),
        (FAKE.replace("def finish(self, exit_code=0):", "def finish(self, exit_code=0): 1 / 0; "), "ZeroDiv"),
        ("import os\nos._exit(3)", "has ended by itself"),
    ],
)
def test_one_that_fails_costs_one_warning(source, words, told, open_fake, fake_out):
    tracker = open_fake(source)
    for step in range(10):
        tracker.log(step, {"loss": 1.0})
    tracker.finish({"loss": 1.0})
    assert len(told) == 1
    assert told[0].startswith("wandb: ")
    assert words in told[0]
    assert "\n" not in told[0]


def test_a_failure_is_told_while_the_run_goes_on(run, told, open_fake):
    tracker = open_fake("raise ImportError('broken')")

    def failed():
        tracker.log(1, {"loss": 1.0})
        return told

    until(failed)
    tracker.finish({})
    assert len(told) == 1
    assert "broken" in told[0]
    assert "ImportError: broken" in (run.folder / "logs" / "wandb.log").read_text()


@pytest.mark.parametrize("fault", ["wandb raises", "nobody answers"])
def test_online_that_cannot_be_reached_goes_offline_with_all_rows(told, open_fake, monkeypatch, fake_out, fault):
    source, reason = FAKE, r"cannot be reached \(.*\)"
    if fault == "wandb raises":
        raises = "    if given['mode'] == 'online': raise OSError('no route')\n    settings = given.pop"
        source, reason = FAKE.replace("    settings = given.pop", raises), "OSError: no route"
    else:
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    tracker = open_fake(source)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({})
    assert len(told) == 1
    assert re.fullmatch(rf"wandb: could not go online \({reason}\), so it writes offline", told[0])
    assert [what for what, *_ in fake_out()] == ["init", "log", "finish"]
    assert fake_out()[0][1]["mode"] == "offline"


class Refuses(BaseHTTPRequestHandler):
    """A server that lets nobody in."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(401)
        self.end_headers()

    def log_message(self, *given):
        """Nothing is printed."""


@pytest.fixture
def refusing(monkeypatch):
    """The real wandb, whose server answers, and refuses."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        yield
        server.shutdown()


# Here wandb's own process is refused; test_online_that_cannot_be_reached_goes_offline shows the rest in `make test`.
@pytest.mark.full
def test_the_real_wandb_that_is_refused_online_writes_everything_offline(run, told, refusing):
    tracker = open_tracker(Wandb(mode="online", finish_seconds=120), run, warn=told.append)
    for step in range(1, 21):
        tracker.log(step, {"loss": 1.0 / step})
    until(lambda: tracker._troubles)
    tracker.log(21, {"loss": 0.0})
    tracker.finish({"loss": 0.0})
    assert len(told) == 1
    assert told[0].startswith("wandb: could not go online (")
    assert told[0].endswith("), so it writes offline")
    records = inspect(run.folder)
    assert records[-1]["type"] == "exit"
    steps = [record["history"]["item"]["_step"] for record in records if record["type"] == "history"]
    assert steps == list(range(1, 22))
    # A folder made only to go online is not a run: it would be uploaded as an empty run.
    assert not list(run.folder.glob("wandb/run-*"))
    record = read_record(run.record)
    assert (record.state, record.wanted, record.mode) == (FINISHED, "online", "offline")
    assert (record.id, record.step, record.rows, record.left_out) == (run.id, 21, 21, 0)
    assert len(list(run.folder.glob(f"{record.folder}/*.wandb"))) == 1


def test_a_signal_that_comes_with_the_writers_birth_is_not_heard_either(told, open_fake, fake_out):
    tracker = open_fake()
    for number in ALL:
        os.kill(tracker._process.pid, number)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({"loss": 1.0})
    assert [what for what, *_ in fake_out()] == ["init", "log", "finish"]
    assert told == []


DIES = """
import sys
from pathlib import Path
from types import SimpleNamespace
from titanlab.techniques.tracker.contract import TrackedRun, open_tracker
from titanlab.techniques.tracker.trackers_schema import Wandb
folder = Path(sys.argv[1])
run = TrackedRun(id="x", name="x", sweep="s", folder=folder, config={}, layout={})
tracker = open_tracker(Wandb(mode="offline"), run, warn=print)
tracker.log(1, {"loss": 1.0})
import os, time
while '"log"' not in (Path(os.environ["FAKE_OUT"]).read_text() if Path(os.environ["FAKE_OUT"]).exists() else ""):
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""


def test_a_writer_whose_run_was_killed_closes_the_run_as_failed(run, tmp_path, monkeypatch, fake_out):
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "fake"), os.getcwd()]))
    command = [sys.executable, "-c", DIES, str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until(lambda: [what for what, *_ in fake_out()] == ["init", "log", "finish"])
    assert fake_out()[-1][1] == 1


@pytest.mark.parametrize("config", [Wandb(mode="off"), Jsonl()])
def test_off_and_jsonl_write_nothing_more(run, told, config):
    tracker = open_tracker(config, run, warn=told.append)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({"loss": 1.0})
    assert getattr(tracker, "_process", None) is None
    assert told == []
    assert sorted(path.name for path in run.folder.rglob("*")) == ["1", "attempts", "logs"]


def test_a_folder_that_cannot_be_written_costs_a_warning(told, tmp_path):
    run = TrackedRun(id="x", name="x", sweep="s", folder=tmp_path / "gone", config={}, layout={})
    tracker = open_tracker(Wandb(mode="offline"), run, warn=told.append)
    tracker.log(1, {"loss": 1.0})
    tracker.finish({})
    assert len(told) == 1


def test_online_without_a_key_goes_offline_with_a_warning(run, told, monkeypatch, tmp_path, open_fake, fake_out):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "fake" / "wandb.py").write_text(FAKE)
    monkeypatch.delenv("WANDB_API_KEY")
    tracker = open_tracker(Wandb(mode="online", finish_seconds=30), run, warn=told.append)
    tracker.finish({})
    assert told == ["wandb: no API key was found, so it writes offline; `wandb login` makes one known"]
    assert fake_out()[0][1]["mode"] == "offline"


@pytest.fixture
def pipe(monkeypatch):
    """`pipe(bytes)`: all messages that the writer reads to the end of the pipe, and its timers."""
    timers = []
    made = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(writer.threading, "Timer", lambda seconds, action: timers.append(seconds) or made)

    def messages(content):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        waiting, found = writer._messages(), []
        while (message := waiting.get(timeout=60)) is not None:
            found.append(message)
        # A timer that is made after the test would end this process.
        until(lambda: timers)
        return found, timers

    return messages


@pytest.mark.parametrize("torn", [b'{"log": {"st', b"\xff\n", b"\0"])
def test_a_training_that_dies_while_it_writes_a_line_has_ended_the_pipe(pipe, torn):
    """The process would wait for ever for a message."""
    found, timers = pipe(b'{"log": {"step": 1}}\n' + torn)
    assert found == [{"log": {"step": 1}}]
    # A wandb that hangs after this is ended too.
    assert timers == [writer._ORPHAN_SECONDS]


def test_rows_are_dropped_while_wandb_hangs_and_the_end_is_not(pipe, monkeypatch):
    monkeypatch.setattr(writer, "_MOST_ROWS", 0)
    found, _ = pipe(b'{"start": {}}\n{"log": {}}\n{"log": {}}\n{"finish": {}}\n')
    assert found == [{"start": {}}, {"finish": {}}]


def test_an_offline_run_reports_no_errors_to_wandb(monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "true")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    fake = SimpleNamespace(Settings=dict, init=lambda **given: os.environ.get("WANDB_ERROR_REPORTING"))
    names = ("id", "name", "project", "entity", "group", "job_type", "tags", "notes", "dir", "config", "resume", "pid")
    start = dict.fromkeys(names)
    assert writer._init(fake, {**start, "mode": "online"}) is None
    assert writer._init(fake, {**start, "mode": "offline"}) == "false"
