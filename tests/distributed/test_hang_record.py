"""What a rank that hangs writes: where it is in the code, what it is busy with, and its place among the others."""

import sys

import pytest

from tests import tiny
from titanlab.distributed import hang
from titanlab.distributed.hang import Topology, stack_of, stack_of_error
from titanlab.records import CodeLine, Collective, GroupRecord, Messages, read_hang, write_hang


def recorded(frames, **changes):
    how = {"rank": 1, "state": "stands", "phase": "step 2", "step": 1, "seconds": 1.0, "limit": None, **changes}
    return hang.hang_record(frames, Topology(), **how)


def test_a_record_names_the_innermost_line_that_is_not_torchs():
    frames = stack_of(sys._getframe())
    torchs = CodeLine("/venv/torch/distributed/distributed_c10d.py", 9, "wait")
    found = recorded([torchs, *frames])
    assert (found.source.function, found.stack[0].function) == (frames[0].function, "wait")
    assert found.activity == ""
    assert len(recorded(frames * 9).stack) == 60


@pytest.mark.parametrize(
    ("file", "function", "activity", "shown"),
    [
        ("data/stream.py", "read", "data", "titanlab/data/stream.py"),
        ("checkpoint/store.py", "save", "checkpoint", "titanlab/checkpoint/store.py"),
        ("train/train.py", "train", "", "titanlab/train/train.py"),
        ("train/train.py", "next_batch", "data", "titanlab/train/train.py"),
    ],
)
def test_what_a_rank_is_busy_with(file, function, activity, shown):
    found = recorded([CodeLine(hang._PACKAGE + file, 3, function)])
    assert (found.activity, found.source.file) == (activity, shown)


def test_the_stack_of_an_error():
    def inner():
        raise LookupError

    with pytest.raises(LookupError) as raised:
        inner()
    assert next(frame.function for frame in stack_of_error(raised.value.__traceback__)) == "inner"
    assert recorded([], state="raised").source is None


def test_a_record_has_the_place_of_the_rank_among_the_others(tmp_path):
    call = Collective("1", 4, "all_reduce", ((8,), ()), ("Float",), is_message=False, is_done=True, created=2.5)
    messages = Messages(runs=True, stages=(0, 2), sent={1: 3}, received={}, waiting=None)
    known = Topology(
        groups={"1": GroupRecord("shard", (0, 2))},
        coordinates={"shard": 1},
        messages=lambda: messages,
        collectives=lambda: [call],
    )
    how = {"rank": 2, "state": "waits", "phase": "step 3", "step": 2, "seconds": 1.5, "limit": 9.0}
    run = tiny.begin(tiny.recipe(tmp_path))
    write_hang(run, 1, hang.hang_record([], known, **how))
    found = read_hang(run, 1)[0][2]
    assert (found.rank, found.state, found.phase, found.step, found.seconds, found.limit) == tuple(how.values())
    assert (found.coordinates, found.source) == ({"shard": 1}, None)
    assert (found.groups, found.messages, found.collectives) == (known.groups, messages, (call,))


def test_a_rank_that_knows_nothing_yet_has_an_empty_place():
    found = recorded([])
    assert (found.groups, found.messages, found.collectives, found.stack) == ({}, None, (), ())


def test_without_a_frame_there_is_no_stack():
    assert (stack_of(None), stack_of_error(None)) == ([], [])
