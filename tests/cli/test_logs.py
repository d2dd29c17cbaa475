"""`titanlab logs`: what ranks have printed, of runs that run, end, start again, or never started."""

import contextlib
import subprocess
import sys
import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from tests import tiny
from tests.sweep.made import Made, begin, end
from titanlab.cli import inspect_runs
from titanlab.cli.verbs import main
from titanlab.records import Status

VERB = "logs"


@pytest.fixture
def run(tmp_path):
    return tiny.begin(tiny.recipe(tmp_path / "runs", shard=2))


def write(run, rank, text, mode="w"):
    with (run.logs / f"rank-{rank}.log").open(mode + "b") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def test_all_ranks_are_merged_and_one_rank_is_its_file(run, say):
    # The lines are of the last minute, as those of a run are: a time of day is taken to be the one nearest to what is known.
    start = datetime.now() - timedelta(minutes=1)
    zero, two, five, nine = ((start + timedelta(seconds=seconds)).strftime("%H:%M:%S") for seconds in (0, 2, 5, 9))
    write(run, 0, f"{zero}  begin\n{two}  step 1\n{nine}  end\n")
    write(run, 11, f"{five} slow\nTraceback\n")
    first = f"[rank  0] {zero}  begin\n[rank  0] {two}  step 1\n"
    last = f"[rank 11] Traceback\n[rank  0] {nine}  end\n"
    assert say(run.path)[:2] == (0, f"{first}[rank 11] {five} slow\n{last}")
    assert say(run.path, "--rank", 11) == (0, f"{five} slow\nTraceback\n", "")
    assert say(run.path, "--tail", 2)[1] == last
    assert say(run.path, "--tail", 0)[1] == ""
    assert say(run.path, "--grep", "st.p|Trace", "--tail", 5)[1].count("\n") == 2
    assert say(run.path, "--grep", f"^({two}|{nine})", "--rank", 0)[1] == f"{two}  step 1\n{nine}  end\n"


def test_the_bytes_of_a_log_are_unchanged_in_a_pipe(run, capfdbinary):
    content = b"\xff\xfe\x1b[31m red\r\n\x00 no end"
    write(run, 0, content)
    assert main(["logs", str(run.path), "--rank", "0"]) == 0
    assert capfdbinary.readouterr().out == content + b"\n"


def test_each_attempt_has_its_part(run, say):
    write(run, 0, "first\n")
    run.begin_attempt(run.config(), {"time": time.time()})
    write(run, 0, "second\n", "a")
    write(run, 1, "also second\n")
    assert say(run.path, "--attempt", 1)[1] == "[rank 0] first\n"
    assert sorted(say(run.path, "--attempt", 2)[1].splitlines()) == ["[rank 0] second", "[rank 1] also second"]
    assert say(run.path, "--attempt", 3)[2] == (
        "error: --attempt=3: the run has no such attempt; known: 1, 2; try --attempt 2\n"
    )
    (run.attempt_folder(2) / "logs.json").unlink()
    code, _, err = say(run.path, "--attempt", 2)
    assert (code, err) == (2, "error: --attempt=2: where it begins in the logs is not known; leave --attempt out\n")
    (run.attempt_folder(2) / "logs.json").write_text('{"bytes": {"0": 999999, "1": -4, "x": []}}')
    assert say(run.path, "--attempt", 2)[0] in (0, 2)
    assert say(run.path)[0] == 0


def test_a_run_without_logs_names_what_there_is(tmp_path, say):
    made = Made(tmp_path / "runs")
    one = made.run("one")
    assert say(one.path) == (0, f"{one.path.name}: no rank has printed anything yet (nobody has started it)\n", "")
    made.submit(one, job_id="77")
    made.folder.jobs.mkdir()
    (made.folder.jobs / "77_0_0_log.err").write_text("slurmstepd: error: no such file\n")
    (made.folder.jobs / "77_0_0_log.out").write_text("")
    (made.folder.jobs / "77_1_0_log.err").write_text("of another run\n")
    code, out, err = say(one.path)
    assert (code, out.count("\n"), err) == (0, 1, "")
    assert f"its job has: {made.folder.jobs / '77_0_0_log.err'}\n" in out


def test_a_run_that_ended_without_logs_says_how(tmp_path, say):
    run = Made(tmp_path / "runs").run("one")
    begin(run)
    end(run, "infeasible", cause="a rule")
    assert say(run.path)[1] == f"{run.path.name}: no rank has printed anything; it ended as infeasible: a rule\n"


def test_following_goes_on_until_the_run_ends(run, say, monkeypatch):
    write(run, 0, "10:00:00 old\n10:00:01 half")

    def ends():
        write(run, 0, "last words without an end", "a")
        end(run, "crash")
        work.close()

    # What happens between two looks.
    events = [
        lambda: write(run, 0, " a line\n", "a"),
        lambda: write(run, 1, "rank 1 joins\n"),
        lambda: write(run, 0, "cut\n"),
        lambda: run.begin_attempt(run.config(), {"time": time.time()}),
        (run.logs / "rank-1.log").unlink,
        ends,
    ]
    monkeypatch.setattr(inspect_runs, "time", SimpleNamespace(time=time.time, sleep=lambda _: events.pop(0)()))
    with contextlib.ExitStack() as work:
        work.enter_context(run.claim())
        code, out, err = say(run.path, "--follow")
    assert code == 0
    assert out.splitlines() == [
        "[rank 0] 10:00:00 old",
        "[rank 0] 10:00:01 half a line",
        "[rank 1] rank 1 joins",
        "[rank 0] cut",
        "[rank 0] last words without an end",
    ]
    assert err.splitlines() == [
        "rank-0.log was replaced or cut short; it is read from its beginning",
        "attempt 2 begins",
        f"{run.path.name} ended: crash",
    ]


def test_following_a_run_that_nobody_works_on_ends(run, say, monkeypatch):
    monkeypatch.setattr(inspect_runs, "_POLL_SECONDS", 0.02)
    write(run, 0, "text\n")
    run.write_status(Status(state="running", attempt=1, pid=2**22 + 1, updated=time.time() - 1000))
    code, out, err = say(run.path, "--follow", "--rank", 0)
    assert (code, out) == (0, "text\n")
    assert err == f"{run.path.name} ended: crash\n"
    assert run.result().cause.startswith("its processes left no result")


def test_ctrl_c_ends_only_the_looking(run, say, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_runs.time, "sleep", interrupt)
    write(run, 0, "text\n")
    with run.claim():
        assert say(run.path, "--follow") == (0, "[rank 0] text\n", "")


def test_a_terminal_gets_no_control_characters(run, capfdbinary, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write(run, 0, b"\x1b]0;title\x07 \xff\x1b[2J\n")
    assert main(["logs", str(run.path)]) == 0
    assert capfdbinary.readouterr().out.decode() == "[rank 0] ^[]0;title^G \N{REPLACEMENT CHARACTER}^[[2J\n"


@pytest.mark.parametrize(
    ("shell", "code", "said"), [("| :", 0, ""), (">/dev/full", 1, "error: the disk is full: make room\n")]
)
def test_lines_that_cannot_be_written_end_it(saved_run, shell, code, said):
    (saved_run / "logs").mkdir(exist_ok=True)
    (saved_run / "logs" / "rank-0.log").write_text("a\n" * (1 << 18))
    command = f'set -o pipefail; "$0" -m titanlab logs {saved_run} {shell}'
    done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, said)
