"""torchrun on two nodes: two agents of this host train, are stopped and go on, as one agent with both ranks would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.until import until
from titanlab.distributed import free_port
from titanlab.records import OutcomeKind, RunFolder, find_run

STEPS = 40
RECIPE = (
    "data=synthetic model=debug training.seq_len=32 training.log_every=1 checkpoint.every=10 parallelism.shard=2 "
    f"training.steps={STEPS} cluster.accelerator=cpu"
).split()
# What begins every agent's command, by kind of rendezvous; the last word is the number of the node.
RENDEZVOUS = {
    "c10d": "--nnodes 2 --nproc-per-node 1 --rdzv-id {port} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port}",
    "static": "--nnodes 2 --nproc-per-node 1 --node-rank {node} --master-addr 127.0.0.1 --master-port {port}",
}


def agent(flags: str, words: Sequence[str], folder: Path, name: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("ab") as log:
        command = [sys.executable, "-m", "torch.distributed.run", *flags.split(), "-m", "titanlab", *words]
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture
def two(tmp_path: Path) -> Iterator[object]:
    """Starts two agents of one run."""
    started: list[subprocess.Popen[bytes]] = []

    def start(kind: str, *words: str) -> list[subprocess.Popen[bytes]]:
        port = free_port()
        agents = [agent(RENDEZVOUS[kind].format(port=port, node=n), words, tmp_path, f"node{n}") for n in (0, 1)]
        started.extend(agents)
        return agents

    yield start
    for process in started:
        process.kill()
        process.wait()


def losses(run: RunFolder) -> dict[int, float]:
    rows = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss_metrics/global_avg_loss"] for row in rows if "loss_metrics/global_avg_loss" in row}


@pytest.mark.full
def test_two_nodes_train_stop_and_go_on_as_one_does(two, tmp_path):
    one = agent("--standalone --nproc-per-node 2", ["train", *RECIPE, "name=one", "runs=one"], tmp_path, "one")
    assert one.wait(120) == 0
    first = two("c10d", "train", *RECIPE, "name=two", "runs=two")
    metrics = tmp_path / "two/single"
    until(lambda: any(len(file.read_text().splitlines()) > 3 for file in metrics.glob("*/metrics.jsonl")), 120)
    # One agent passes the signal on to its rank; all ranks agree to stop after the same step.
    first[1].send_signal(signal.SIGTERM)
    assert all(process.wait(60) != 0 for process in first)
    run = find_run("two", tmp_path / "two")
    stopped = run.result()
    assert stopped is not None
    assert stopped.kind is OutcomeKind.PREEMPTED
    assert 3 <= stopped.step < STEPS
    second = two("static", "resume", "two", "--runs", "two")
    assert [process.wait(120) for process in second] == [0, 0]
    assert len(run.attempts()) == 2
    end = run.result()
    assert end is not None
    assert (end.kind, end.step) == (OutcomeKind.DONE, STEPS)
    assert losses(run) == losses(find_run("one", tmp_path / "one"))
