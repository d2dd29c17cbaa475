"""The slowest rank is named with the phase in which it is slow, and the rank with the most memory."""

import os
import re
import time
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch

from tests import tiny
from tests.planted import PlantedStream
from tests.planted_schema import Planted
from titanlab.costs import meter
from titanlab.distributed import World
from titanlab.techniques.model import llama
from titanlab.train import totals
from titanlab.train.totals import RankTimes, compared

EVEN = [0.1, 1.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("rows", "slow"),
    [
        ([EVEN], None),
        ([EVEN] * 4, None),
        ([EVEN, EVEN, [0.1, 1.4, 2.0, 5.0], EVEN], None),
        ([EVEN, EVEN, [0.1, 4.0, 2.0, 5.0], EVEN], (2, 1)),
        ([EVEN, [3.0, 1.0, 2.0, 5.0]], (1, 0)),
        # Twice as slow, but a hundredth of the step.
        ([[0.0, 0.2, 2.0, 50.0], [0.0, 0.6, 2.0, 50.0]], None),
        # Three steps of 20 ms, in which another process had the core for 30 ms.
        ([[0.001, 0.088, 2.0, 0.1], [0.0, 0.057, 2.0, 0.1]], None),
    ],
)
def test_a_rank_is_slow_if_others_wait_for_it(rows, slow):
    metrics, found = compared(rows, 10, peers=len(rows))
    assert found == slow
    assert metrics[totals.SLOWEST] == (slow[0] if slow else metrics[totals.SLOWEST])
    assert metrics[meter.MEMORY_MOST] == 2.0


def test_the_seconds_of_the_slowest_rank_are_those_of_one_step():
    metrics, _ = compared([EVEN, [3.0, 1.0, 2.0, 5.0]], 10, peers=2)
    assert (metrics[totals.DATA], metrics[totals.COMPUTE]) == (pytest.approx(0.3), pytest.approx(0.1))


LAST = [0.1, 3.0, 2.0, 5.0]


@dataclass(frozen=True, kw_only=True)
class Others(World):
    """Rank 0, and what the other ranks have measured."""

    rows: list[list[float]]

    def sum(self, values):
        return torch.tensor(self.rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rows", "pipeline", "warning"),
    [
        ([EVEN, EVEN, LAST, LAST], 1, "rank 2 is slow in forward and backward: .* 182% more than the others"),
        ([EVEN, EVEN, LAST, LAST], 2, ""),
        ([EVEN, LAST], 2, r".* than the others, which have other layers \(parallelism.split\)"),
        ([EVEN, [4.0, 1.0, 2.0, 5.0]], 2, "rank 1 is slow in data: .* than the others"),
    ],
)
def test_a_stage_with_more_layers_is_no_slow_rank(rows, pipeline, warning):
    world = Others(rank=0, world=len(rows), local_rank=0, device=torch.device("cpu"), rows=rows)
    warnings = []
    times = RankTimes(2, world, pipeline=pipeline, report=lambda metrics, text: warnings.append(text))
    for step in (1, 2):
        times.after_step(step, last=False)
    assert re.fullmatch(f"step 2: {warning}" if warning else "", warnings[0])


def test_the_rank_with_the_most_memory_is_named():
    metrics, _ = compared([EVEN, [0.1, 1.0, 7.0, 5.0], EVEN], 10, peers=3)
    assert (metrics[meter.MEMORY_MOST], metrics[meter.MEMORY_MOST_RANK]) == (7.0, 1)


def slowed(made, run):
    """Train; rank 1 computes for longer in the first four steps, and then waits for its data."""
    calls, compute, wait = 0, llama.FeedForward.forward, PlantedStream.next_batch

    def forward(self, hidden):
        end = time.process_time() + 0.1
        while calls <= 4 and os.environ["RANK"] == "1" and time.process_time() < end:
            pass
        return compute(self, hidden)

    def next_batch(self):
        nonlocal calls
        calls += 1
        # A tenth of a step, also where the machine is loaded.
        time.sleep(0.8 if calls > 4 and os.environ["RANK"] == "1" else 0.0)
        return wait(self)

    with patch.object(llama.FeedForward, "forward", forward), patch.object(PlantedStream, "next_batch", next_batch):
        return tiny.as_rank(made, run).metrics


def test_a_slow_rank_is_told_once_for_each_phase_and_stays_in_the_metrics(pool, tmp_path):
    made = tiny.recipe(tmp_path, steps=6, shard=2, compare_ranks_every=2, data=Planted())
    run = tiny.begin(made)
    summary = pool.run(2, slowed, made, run)[0]
    assert summary[totals.SLOWEST] == 1
    assert summary[totals.SLOWER] > 50
    log = (run.logs / "rank-0.log").read_text()
    assert log.count("rank 1 is slow in forward and backward") == 1
    assert log.count("step 6: rank 1 is slow in data: ") == 1
    rows = run.metrics("train")
    assert totals.SLOWEST not in rows[0]
    assert all(row[totals.SLOWEST] == 1 for row in rows[2:])
    assert rows[-1][meter.MEMORY_MOST] > 0
