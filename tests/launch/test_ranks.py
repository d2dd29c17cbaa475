"""launch=local, for real: processes that are interrupted, raise, are killed, or hang; and ranks that torchrun starts.

Every run here is the command that a person types, on data with planted faults.
"""

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.launch.command import alive, children, finished
from tests.until import until
from titanlab.distributed import free_port, handled_signals, held_signals
from titanlab.launch import processes as local
from titanlab.records import OutcomeKind, RunFolder

TWO = ["parallelism=fsdp", "world=2"]
# Which takes a second less to import.
COPIES = ["parallelism=ddp", "world=2"]


def complaints(err):
    """The lines of err but for those about a slow rank: other work on the host makes a rank slow."""
    return [line for line in err.splitlines() if " is slow in " not in line]


def steps(run):
    return [row["step"] for row in run.metrics("train")]


@pytest.mark.full
@pytest.mark.covering
@pytest.mark.parametrize("how", [[], TWO])
def test_ctrl_c_saves_and_the_same_command_goes_on(command, how):
    process = command.start("training.steps=60", "data.seconds=0.05", *how)
    run = command.reached(3)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = finished(process)
    done = run.result().step
    assert (code, run.result().kind, 3 <= done < 60) == (130, OutcomeKind.CANCELLED, True)
    assert steps(run) == list(range(1, done + 1))
    assert run.checkpoints.joinpath(f"step-{done:08d}", "index.json").exists()
    assert complaints(err) == []
    assert "cancelled" in out
    assert "titanlab resume" in out
    code, _, err = command.run("training.steps=60", *how)
    assert (code, run.result().kind, complaints(err)) == (0, OutcomeKind.DONE, [])
    assert command.only_run.attempts() == [1, 2]
    assert steps(run) == list(range(1, 61))
    assert run.metrics("attempt")[1]["step"] == done


@pytest.mark.full
def test_a_second_ctrl_c_loses_what_the_answer_to_the_first_has_said(command):
    process = command.start(*COPIES, "training.steps=60", "data.seconds=8", "checkpoint.every=1")
    run = command.reached(1)
    until(lambda: run.saved_step() == 1 and run.known_status().state == "running")
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    code, out, _ = finished(process)
    assert "stopping after this step, then saving. A second Ctrl-C ends the run now\n" in out
    result = run.result()
    assert (code, result.kind, result.step) == (130, OutcomeKind.CANCELLED, 1)
    assert result.cause == "interrupted again, so it has not saved"


@pytest.mark.full
@pytest.mark.covering
def test_a_rank_that_raises_is_told_with_its_traceback(command):
    code, out, err = command.run(*COPIES, "training.steps=60", "data.fault=raise", "data.step=3", "data.rank=1")
    run = command.only_run
    result = run.result()
    assert (code, result.kind, result.rank, result.exit_code, result.step) == (1, OutcomeKind.CRASH, 1, 1, 2)
    assert result.cause == "LookupError: a planted fault"
    assert "in next_batch" in result.traceback
    assert (run.status().state, run.status().outcome) == ("ended", "crash")
    # On the terminal the cause and nothing of rank 0, which only lost its peer.
    assert (out + err).count("Traceback (most recent call last)") == 1
    assert out.count("LookupError: a planted fault") == 2
    assert "rank" in out
    assert "Traceback" in (run.logs / "rank-1.log").read_text()
    # How long rank 0 took to end after it, by the clocks of both notes.
    notes = run.failures(1)
    assert [note.echo for note in notes if note.rank == 0] in ([], [True])
    assert abs(result.ended - run.status().updated) < 60


def torchrun():
    """What starts two ranks instead of titanlab's own launcher."""
    port = str(free_port())
    return ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, "-m", "titanlab"]


@pytest.mark.full
def test_torchrun_tells_of_a_rank_that_raises_and_goes_on(command):
    def launch(*overrides):
        how = ["parallelism=fsdp", "training.steps=6", "checkpoint.every=2"]
        return command.run(*how, *overrides, launcher=torchrun())

    code, out, err = launch("data.fault=raise", "data.step=4", "data.rank=1")
    assert code == 1
    run = command.only_run
    assert (run.result().kind, run.result().rank, run.attempts()) == (OutcomeKind.CRASH, 1, [1])
    assert (out + err).count("LookupError: a planted fault") >= 1
    assert (run.env()["launcher"], run.config(1)["parallelism"]["shard"]) == ("torchrun", 2)
    # Rank 1 finds the first attempt before rank 0 has begun the second.
    code, out, err = launch("data.late=2.5")
    assert code == 0, err
    assert out.count("titanlab · run") == 1
    assert (run.result().kind, run.attempts()) == (OutcomeKind.DONE, [1, 2])
    assert run.metrics("attempt")[1]["step"] == 2


@pytest.mark.full
def test_a_rank_that_fails_before_it_joins_does_not_keep_the_others_waiting(command):
    """Rank 0 waits for it in native code, where no signal is heard: ten minutes, which are more than the test's limit."""
    code, _, _ = command.run(*TWO, "training.steps=6", "data.fault=raise", "data.step=0", "data.rank=1")
    result = command.only_run.result()
    assert (code, result.kind, result.rank) == (1, OutcomeKind.CRASH, 1)


# The launcher alone, with a shell in the place of the worker


@pytest.fixture
def ranks_run(monkeypatch, tmp_path):
    """Starts ranks that run a shell's script instead of the worker, and keeps what they print."""

    def start(world, script):
        monkeypatch.setattr(local, "worker_command", lambda folder: ["/bin/sh", "-c", script])
        # A shell cannot fork ranks. This is how ranks start where the system has no adoption.
        monkeypatch.setattr(local, "adopting", lambda: contextlib.nullcontext(False))
        (tmp_path / "logs").mkdir(exist_ok=True)
        # As the caller of a launcher does.
        with held_signals():
            return local.start(RunFolder(tmp_path), local.of_this_host(world), attempt=1)

    return start


# A minute in which signals are heard; then it has failed.
WAIT = "for each in $(seq 1200); do sleep 0.05; done; exit 9"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@pytest.mark.parametrize("world", [1, 3])
def test_ranks_that_end_well(ranks_run, tmp_path, world):
    before = [signal.getsignal(number) for number in SIGNALS]
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR"
    values = " ".join(f"${name}" for name in names.split())
    assert ranks_run(world, f'echo "{values}" > {tmp_path}/rank-$RANK; test $MASTER_PORT -gt 1023') == {}
    for rank in range(world):
        assert (tmp_path / f"rank-{rank}").read_text() == f"{rank} {world} {rank} {world} 127.0.0.1\n"
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_the_first_failure_ends_the_others_and_alone_counts(ranks_run, monkeypatch, script, code):
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.3)
    begin = time.monotonic()
    failures = ranks_run(3, f'if [ $RANK = 1 ]; then {script}; fi; trap "" TERM; sleep 120')
    assert failures == {1: code}
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_handed_on(ranks_run, tmp_path, world, number):
    def send():
        until(lambda: len(list(tmp_path.glob("ready-*"))) == world)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    name = signal.Signals(number).name.removeprefix("SIG")
    script = f"trap 'exit 0' {name}; touch {tmp_path}/ready-$RANK; {WAIT}"
    assert ranks_run(world, script) == {}
    sender.join()


def test_a_signal_that_comes_before_the_ranks_are_there_waits(ranks_run, monkeypatch, tmp_path):
    """Afterwards Ctrl-C is an exception again, also where a shell that runs this in the background has it ignored."""
    usual = local.start_worker

    def late(*given, **named):
        os.kill(os.getpid(), signal.SIGINT)
        started = usual(*given, **named)
        until(lambda: list(tmp_path.glob("ready-*")))
        return started

    monkeypatch.setattr(local, "start_worker", late)
    with handled_signals((signal.SIGINT,), signal.default_int_handler):
        assert ranks_run(1, f"trap 'exit 0' INT; touch {tmp_path}/ready-$RANK; {WAIT}") == {}
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_recipe_can_be_handed_over(monkeypatch, tmp_path):
    """To a rank that somebody else started, and that may be earlier than rank 0."""
    from titanlab.distributed import Ranks

    given = {"name": "x", "training": {"steps": 3}, "none": None}
    script = f'test "$2" = - && cat > {tmp_path}/given'
    monkeypatch.setattr(local, "worker_command", lambda folder: ["/bin/sh", "-c", script, "sh", str(folder)])
    place = Ranks(rank=1, world=2, local_rank=1, local_world=2, address="a", port=1, started_by="torchrun")
    assert local.start(RunFolder(tmp_path), place, attempt=None, config=given) == {}
    assert json.loads((tmp_path / "given").read_text()) == given


def workers(parent):
    """Processes of ranks below a process, by rank."""
    found = {}
    for pid in children(parent):
        found |= workers(pid)
        with contextlib.suppress(OSError):
            if b"titanlab.launch.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                (rank,) = [entry.removeprefix(b"RANK=") for entry in entries if entry.startswith(b"RANK=")]
                name = Path(f"/proc/{pid}/comm").read_text().split()
                # A forked rank has the first environment of the process that forked it, and a name of its own.
                found[int(name[1]) if name[0] == "rank" else int(rank)] = pid
    return found


@pytest.mark.full
def test_a_rank_of_torchrun_that_is_stopped_is_the_one_that_is_named(command):
    given = ["training.steps=2000", "data.seconds=0.05", "training.step_timeout_seconds=8", "parallelism=ddp"]
    process = command.start(*given, launcher=torchrun())
    run = command.reached(3)
    ranks = workers(process.pid)
    os.kill(ranks[0], signal.SIGSTOP)
    process.communicate(timeout=180)
    result = run.result()
    assert (result.kind, result.rank, result.echo) == (OutcomeKind.HANG, 0, False)
    reason = ": rank 0 does not answer: its process is stopped (SIGSTOP); rank 1 waits in all_reduce (repl"
    assert reason in result.cause
    assert result.cause.endswith("training.step_timeout_seconds=8")
    assert [pid for pid in ranks.values() if alive(pid)] == []
