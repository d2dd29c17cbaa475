"""Our lists of actions are torch's own, wherever torch has one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torchs

from tests.schedule.conftest import KINDS, LOOPED, Schedule

CLASSES = {
    "gpipe": torchs.ScheduleGPipe,
    "1f1b": torchs.Schedule1F1B,
    "interleaved_1f1b": torchs.ScheduleInterleaved1F1B,
    "looped_bfs": torchs.ScheduleLoopedBFS,
    "interleaved_zero_bubble": torchs.ScheduleInterleavedZeroBubble,
    "zbv": torchs.ScheduleZBVZeroBubble,
    "dualpipe_v": torchs.ScheduleDualPipeV,
}
RANKS = (1, 2, 3, 4, 6, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)


class Recorder:
    """A stage that computes nothing, and writes down what it is asked for."""

    def __init__(self, stage_index: int) -> None:
        self.stage_index, self.is_last, self.asked = stage_index, False, []

    def forward_one_chunk(self, microbatch, *_, **__):
        self.asked.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **_):
        self.asked.append(f"{self.stage_index}B{microbatch}")

    def perform_reduce_grad(self, _):
        pass

    def get_fwd_recv_ops(self, _):
        return []

    def release_fwd_send_outputs(self, _):
        """Called by torch 2.15."""

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops


def run_by_torch(kind: str, rank: int, ranks: int, microbatches: int) -> list[str]:
    """What a schedule of one stage a rank does on a rank. Its `_get_pipeline_order` counts wrong on the last one."""
    schedule = object.__new__(CLASSES[kind])
    stage = Recorder(rank)
    schedule._stage, schedule._num_stages, schedule._n_microbatches = stage, ranks, microbatches
    schedule._has_backward, schedule.scale_grads, schedule._internal_losses = True, False, []
    schedule._loss_fn, schedule._stage_initialized = None, True
    # Of torch 2.15.
    schedule._finalize_gradients = True
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
    schedule._check_inputs = lambda *_: ([()] * microbatches, [{}] * microbatches)
    schedule._initialize_stage = lambda *_: None
    schedule._step_microbatches()
    return stage.asked


def listed_by_torch(kind: str, stages_per_rank: int, ranks: int, microbatches: int) -> list[list[str]]:
    """The order of a schedule of several stages a rank, without idle time; pairs one after the other."""
    schedule = object.__new__(CLASSES[kind])
    rounds = max(1, microbatches // ranks)
    vars(schedule).update(
        pp_group_size=ranks,
        num_stages=ranks * stages_per_rank,
        _num_stages=ranks * stages_per_rank,
        _stages=[SimpleNamespace()] * stages_per_rank,
        n_local_stages=stages_per_rank,
        _n_microbatches=microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )
    orders = [schedule._calculate_single_rank_operations(rank) for rank in range(ranks)]
    return [
        [str(part) for action in order if action is not None for part in (action.sub_actions or [action])]
        for order in orders
    ]


def defined(kind: str, ranks: int, microbatches: int) -> bool:
    """Whether torch's schedule takes these numbers."""
    if kind.startswith("interleaved"):
        return microbatches % max(1, microbatches // ranks) == 0
    return kind != "dualpipe_v" or microbatches >= 2 * ranks


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_does_what_torchs_does(kind):
    compared = 0
    for stages_per_rank in (1, 2, 3, 4) if kind in LOOPED else (2,):
        for ranks in RANKS:
            for microbatches in MICROBATCHES:
                if not defined(kind, ranks, microbatches):
                    continue
                ours = Schedule(kind, stages_per_rank).actions(ranks, microbatches)
                if kind in ("gpipe", "1f1b"):
                    theirs = [run_by_torch(kind, rank, ranks, microbatches) for rank in range(ranks)]
                else:
                    theirs = listed_by_torch(kind, stages_per_rank, ranks, microbatches)
                assert [[str(action) for action in order] for order in ours] == theirs
                compared += 1
    assert compared >= 40
