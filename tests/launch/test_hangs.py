"""Hangs and deaths planted in a training that a person starts: how soon it ends, and who is named."""

import json
import os
import signal
import time
from dataclasses import dataclass

import pytest

from tests.cover import marks
from tests.launch.command import Command, alive, children
from titanlab.cli.verbs import main
from titanlab.records import OutcomeKind

# Seconds from the limit in force to the end.
BAR = 10.0
SHARDS = ("parallelism=fsdp", "world=2")
THREE = ("parallelism=fsdp", "world=3", "training.global_batch=3")
STAGES = ("parallelism.pipeline=2", "training.microbatch=1")
SHARD_TENSOR = ("parallelism.shard=2", "parallelism.tensor=2")
STAGES_TENSOR = (*STAGES, "parallelism.tensor=2")
COPIES_TENSOR = ("parallelism.replicate=2", "parallelism.tensor=2")
FAULT = "LookupError: a planted fault"
KILLED = "killed by SIGKILL"


@dataclass
class Hang:
    """A fault of a rank, and the verdict about it.

    Attributes:
        verdict: how it begins.
        pending: where the others wait; it begins with the first text and contains the second.
        limit: of a step; long enough for one on a busy machine.
    """

    layout: tuple[str, ...]
    fault: str
    rank: int
    verdict: str
    pending: tuple[str, str] = ("", "")
    where: str = "forward"
    kind: OutcomeKind = OutcomeKind.HANG
    limit: float = 5.0


GATHER = ("all_gather", "(shard, sequence number ")
HANGS = {
    "skips an all-reduce": Hang(THREE, "skip", 1, "rank 1 skipped all_reduce of [7] and called all_gather of ", ("all_reduce", "(shard,")),
    "skips one, of two": Hang(SHARDS, "skip", 0, "rank 0 skipped all_reduce of [7] and called all_gather of ", ("all_reduce", "(shard,")),
    "rank 1 is stopped": Hang(SHARDS, "SIGSTOP", 1, "rank 1 does not answer: its process is stopped (SIGSTOP); rank 0 waits in all_gather (shard,", GATHER),
    "rank 0 is stopped": Hang(THREE, "SIGSTOP", 0, "rank 0 does not answer: its process is stopped (SIGSTOP); ranks 1, 2 wait in all_gather (shard,", GATHER),
    "sleeps": Hang((*STAGES, "parallelism.tensor=2"), "hang", 2, "rank 2 stands in _fail (tests/planted.py:", ("recv of the gradient of microbatch ", "from stage 1 (pipeline, stage 0)"), limit=8),
    "calls another shape": Hang(THREE, "shape", 2, "rank 2 calls all_reduce of [14] where ", ("all_reduce", "(shard,"), kind=OutcomeKind.CRASH),
    "skips a recv": Hang(STAGES, "skip_recv", 1, "rank 1 (stage 1) skipped a recv (hidden state)", ("send of the hidden state of microbatch ", "to stage 1 (pipeline, stage 0)")),
    "exits early": Hang(THREE, "exit", 1, "rank 1 ended early: ended with exit code 0 and left no result", kind=OutcomeKind.CRASH),
    "its data do not come": Hang(SHARDS, "hang", 1, "rank 1 waits for data in _fail (tests/planted.py:", GATHER, where="data"),
    "two groups wait for each other": Hang(SHARD_TENSOR, "order", 3, "rank 3 has not called all_gather of [", ("all_gather (", "sequence number "), limit=8),
    "loops in Python": Hang(SHARDS, "loop", 0, "rank 0 computes in _fail (tests/planted.py:", GATHER),
    # The others wait meanwhile: in a collective, or for a message of the stage before or behind.
    "raises in the last stage": Hang(STAGES_TENSOR, "raise", 3, FAULT, where="backward", kind=OutcomeKind.CRASH, limit=0),
    "raises in the first stage": Hang(STAGES_TENSOR, "raise", 1, FAULT, kind=OutcomeKind.CRASH, limit=0),
    "raises in a copy": Hang(COPIES_TENSOR, "raise", 1, FAULT, where="backward", kind=OutcomeKind.CRASH, limit=0),
    "is killed": Hang((*STAGES, "parallelism.shard=2"), "kill", 3, KILLED, where="backward", kind=OutcomeKind.CRASH, limit=0),
    "leaves a context": Hang(("parallelism.shard=2", "parallelism.context=2"), "exit", 2, "ended early: ended with exit code 0", where="backward", kind=OutcomeKind.CRASH, limit=0),
}  # fmt: skip
COVERING = ("rank 1 is stopped",)


def planted(command, hang):
    """The run in which the rank has hung, and when that began; after it has been seen that nobody is left."""
    process = command.start(
        *hang.layout,
        *[f"data.fault={hang.fault}", f"data.where={hang.where}", f"data.rank={hang.rank}", "data.step=6"],
        *["data.code=0", "training.steps=60", f"training.step_timeout_seconds={hang.limit or 30}"],
    )
    ranks: list[int] = []
    try:
        while process.poll() is None and not (command.folder / "died").exists():
            ranks = children(process.pid) or ranks
            time.sleep(0.1)
        out, err = process.communicate(timeout=120)
        ended = time.time()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (command.folder / "died").exists(), out + err
    assert [pid for pid in ranks if alive(pid)] == []
    return command.only_run, ended - float((command.folder / "died").read_text()), out + err


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name, always=(), covering=COVERING)) for name in HANGS]
)
def test_it_ends_in_time_and_the_right_rank_is_named(command, tmp_path, name, capsys):
    hang = HANGS[name]
    run, seconds, text = planted(command, hang)
    if seconds > hang.limit + BAR:
        # Other work on the machine may have had the cores. Hangs that end late do so again.
        _, seconds, _ = planted(Command(tmp_path / "again"), hang)
    result = run.result()
    assert (result.kind, result.rank, result.echo) == (hang.kind, hang.rank, False), result.cause
    assert hang.verdict in result.cause
    assert result.cause in text
    assert seconds <= hang.limit + BAR
    if hang.kind is not OutcomeKind.HANG:
        assert text.count("Traceback (most recent call last)") == (hang.fault == "raise")
        assert main(["diagnose", str(run.path)]) == 0
        assert (
            capsys.readouterr().out == f"{run.path.name}, attempt 1, did not hang; it ended as crash: {result.cause}\n"
        )
        return
    assert result.cause.startswith(f"step 6 did not end within {hang.limit:g} s: {hang.verdict}")
    # On a machine so busy that steps take a tenth of the limit, it gives a longer one to try.
    assert "training.step_timeout_seconds=" in result.cause
    assert main(["diagnose", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["damaged"]) == ([hang.rank], [])
    assert found["verdict"] in result.cause
    assert found["pending"].startswith(hang.pending[0])
    assert hang.pending[1] in found["pending"]
