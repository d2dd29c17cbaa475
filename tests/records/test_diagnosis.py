"""The verdict over records of a hang that are written by hand."""

from dataclasses import replace

import pytest

from titanlab.records import diagnose, named, odd_calls
from titanlab.records.diagnosis import deviation
from titanlab.records.hang_file import parse_hang

STEP = (
    ("shard", "all_gather", 40),
    ("shard", "all_gather", 48),
    ("shard", "reduce_scatter", 88),
    ("world", "all_reduce", 7),
)
FORWARD = {"file": "titanlab/train/assemble.py", "line": 228, "function": "forward_backward"}
MINE = {"file": "/home/me/project/mine.py", "line": 7, "function": "loop"}


def record(
    rank, calls, *, state="waits", groups=None, source=FORWARD, activity="", messages=None, is_done=None, step=3
):
    """A record of a rank that has called `calls`: (axis, operation, size); the last is pending if the rank waits."""
    groups = groups or {"shard": (0, 1, 2), "world": (0, 1, 2)}
    numbers = dict.fromkeys(groups, 0)
    collectives = []
    for axis, operation, size in calls:
        numbers[axis] += 1
        collectives.append(
            {
                "group": axis,
                "sequence": numbers[axis],
                "operation": operation,
                "sizes": [[size]],
                "dtypes": ["Float"],
                "is_message": False,
                "is_done": True,
                "created": float(len(collectives)),
            }
        )
    if collectives and state == "waits" and not is_done:
        collectives[-1]["is_done"] = False
    return parse_hang(
        {
            "schema": 1,
            "rank": rank,
            "time": 1.0,
            "state": state,
            "phase": f"step {step + 1}",
            "step": step,
            "seconds": 9.0,
            "limit": 9.0,
            "activity": activity,
            "source": source,
            "stack": [source],
            "coordinates": {},
            "messages": messages,
            "collectives": collectives,
            "groups": {name: {"axis": name, "ranks": list(ranks)} for name, ranks in groups.items()},
        }
    )


def calls(steps, *more):
    return [*(STEP * steps), *more]


def verdict(*records, world=3, **known):
    return diagnose({each.rank: each for each in records}, world=world, **known)


WAITING = calls(3, *STEP[:2])
"""In the fourth step, in the second all_gather."""


def test_a_rank_that_does_not_answer():
    found = verdict(record(0, WAITING), record(2, WAITING), silent={1: "its process is stopped (SIGSTOP)"})
    assert found.verdict == (
        "rank 1 does not answer: its process is stopped (SIGSTOP); ranks 0, 2 wait in "
        "all_gather (shard, sequence number 11) at forward_backward (titanlab/train/assemble.py:228)"
    )
    assert (found.ranks, found.pending) == ((1,), "all_gather (shard, sequence number 11)")
    assert {rank: sorted(wait.on) for rank, wait in found.waits.items()} == {0: [1], 2: [1]}


def test_a_rank_that_left_nothing_is_silent():
    found = verdict(record(0, WAITING), record(2, WAITING))
    assert found.verdict.startswith("rank 1 does not answer: it has left no record; ranks 0, 2 wait in all_gather")
    many = verdict(record(0, WAITING), world=64)
    assert many.verdict.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 more do not answer (rank 1: it has left no ")
    assert len(many.verdict) < 1000


def test_one_whose_record_cannot_be_read_is_not_accused_of_silence():
    found = verdict(record(0, WAITING), record(2, WAITING), unread=[1])
    assert (found.ranks, found.verdict) == (
        (),
        (
            "ranks wait: ranks 0, 2 wait in all_gather (shard, sequence number 11) at forward_backward "
            "(titanlab/train/assemble.py:228); the records do not show for whom"
        ),
    )


def test_what_every_other_rank_does_is_said():
    busy = record(2, calls(3), state="stands", activity="data", source=MINE)
    found = verdict(record(0, WAITING), busy, silent={1: "its process is stopped (SIGSTOP)"})
    assert found.verdict.endswith(
        "; rank 0 waits in all_gather (shard, sequence number 11) at forward_backward "
        "(titanlab/train/assemble.py:228), rank 2 waits for data in loop (project/mine.py:7)"
    )
    assert (found.ranks, found.pending) == ((1,), "all_gather (shard, sequence number 11)")


def test_a_rank_that_ended_early_comes_first():
    found = verdict(record(0, WAITING), ended={1: "ended with exit code 0"}, silent={2: "its process is gone"})
    assert found.verdict.startswith("rank 1 ended early: ended with exit code 0; rank 0 waits in all_gather (shard, ")


@pytest.mark.parametrize(
    ("state", "activity", "begins"),
    [
        ("stands", "", "rank 1 stands in loop (project/mine.py:7); ranks 0, 2 wait in all_gather (shard, sequence"),
        ("stands", "data", "rank 1 waits for data in loop (project/mine.py:7); ranks 0, 2 wait in all_gather"),
        ("stands", "checkpoint", "rank 1 is in a checkpoint in loop (project/mine.py:7); ranks 0, 2 wait"),
        ("computes", "", "rank 1 computes in loop (project/mine.py:7); ranks 0, 2 wait in all_gather"),
    ],
)
def test_a_rank_outside_of_collectives(state, activity, begins):
    late = record(1, calls(3, STEP[0]), state=state, activity=activity, source=MINE)
    found = verdict(record(0, WAITING), late, record(2, WAITING))
    assert found.verdict.startswith(begins)
    assert found.ranks == (1,)


def test_where_all_wait_for_data_all_are_named():
    ranks = [record(rank, calls(3), state="stands", activity="data", source=MINE) for rank in range(3)]
    assert verdict(*ranks).verdict == "ranks 0, 1, 2 wait for data in loop (project/mine.py:7)"


def test_of_two_that_stand_the_one_is_named_for_whom_others_wait():
    groups = {"shard": (0, 1), "world": (0, 1, 2)}
    late = record(1, calls(3, STEP[0]), state="stands", groups=groups, source=MINE)
    other = record(2, [STEP[3]] * 3, state="stands", groups={"world": (0, 1, 2)}, source=MINE)
    assert verdict(record(0, WAITING, groups=groups), late, other).ranks == (1,)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_collective_that_was_skipped_shows_in_the_ranks_own_steps(rank):
    usual = [record(other, calls(3, *STEP)) for other in range(3) if other != rank]
    skipping = record(rank, calls(3, STEP[0], STEP[2]))
    found = verdict(*usual, skipping)
    others = " and ".join(str(each.rank) for each in usual).replace(" and ", ", ")
    assert found.verdict.startswith(
        f"rank {rank} skipped all_gather of [48] and called reduce_scatter of [88], where ranks {others} wait in "
        "all_gather of [48] (shard, sequence number 11); rank "
    )
    assert (found.ranks, found.pending) == ((rank,), "all_gather (shard, sequence number 11)")


def test_of_two_ranks_it_shows_too():
    groups = {"shard": (0, 1), "world": (0, 1)}
    found = verdict(
        record(0, calls(3, *STEP), groups=groups), record(1, calls(3, STEP[0], STEP[2]), groups=groups), world=2
    )
    assert found.ranks == (1,)


def test_another_shape():
    wrong = record(2, calls(3, STEP[0], ("shard", "all_gather", 49)))
    found = verdict(record(0, WAITING), record(1, WAITING), wrong)
    assert found.verdict.startswith(
        "rank 2 calls all_gather of [49] where ranks 0, 1 call all_gather of [48] (shard, sequence number 11)"
    )
    assert found.ranks == (2,)


def test_in_the_first_step_most_ranks_decide_and_two_do_not():
    wrong = record(2, [("shard", "all_gather", 41)])
    assert verdict(record(0, [STEP[0]]), record(1, [STEP[0]]), wrong).ranks == (2,)
    groups = {"shard": (0, 2), "world": (0, 2)}
    found = verdict(
        record(0, [STEP[0]], groups=groups), record(2, [("shard", "all_gather", 41)], groups=groups), world=0
    )
    assert (found.ranks, found.verdict) == (
        (),
        (
            "ranks call different collectives (shard, sequence number 1): rank 0 all_gather of [40], "
            "rank 2 all_gather of [41]; the records do not show which of them is wrong"
        ),
    )


@pytest.mark.parametrize("operation", ["all_to_all", "scatter", "gather"])
def test_sizes_that_may_differ_are_no_difference(operation):
    found = verdict(*[record(rank, [*STEP, ("shard", operation, rank)]) for rank in range(3)])
    assert found.verdict.startswith("all 3 ranks wait, and no rank is behind: ")


GROUPS = {"shard": (0, 1), "tensor": (0, 1)}
PAIR = (("shard", "all_gather", 1), ("tensor", "all_reduce", 2), ("shard", "all_gather", 3))


def test_two_groups_in_another_order():
    usual = record(0, [*PAIR * 3, *PAIR[:1], *PAIR[1:2]], groups=GROUPS)
    other = record(1, [*PAIR * 3, *PAIR[:1], PAIR[2]], groups=GROUPS)
    found = verdict(usual, other, world=2)
    assert found.verdict.startswith(
        "rank 1 skipped all_reduce of [2] and waits in all_gather (shard, sequence number 8) at forward_backward"
    ) or found.verdict.startswith("rank 1 has not called all_reduce of [2] and waits in all_gather (shard,")
    assert (found.ranks, found.pending) == ((1,), "all_reduce (tensor, sequence number 4)")


def test_without_earlier_steps_a_deadlock_accuses_nobody():
    found = verdict(
        record(0, [("tensor", "all_reduce", 2)], groups=GROUPS),
        record(1, [("shard", "all_gather", 3)], groups=GROUPS),
        world=2,
    )
    place = "at forward_backward (titanlab/train/assemble.py:228)"
    assert found.verdict == (
        f"ranks wait for each other: rank 0 waits in all_reduce (tensor, sequence number 1) {place} for rank 1, "
        f"rank 1 waits in all_gather (shard, sequence number 1) {place} for rank 0; "
        "the records do not show which of them is wrong"
    )
    assert found.ranks == ()


def test_where_all_are_in_the_same_collective_nobody_is_accused():
    found = verdict(*[record(rank, WAITING) for rank in range(3)])
    assert found.verdict == (
        "all 3 ranks wait, and no rank is behind: ranks 0, 1, 2 wait in all_gather (shard, sequence number 11) "
        "at forward_backward (titanlab/train/assemble.py:228); the records do not show for whom"
    )
    assert (found.ranks, found.pending) == ((), "all_gather (shard, sequence number 11)")


def test_a_rank_without_a_pending_collective_is_behind():
    found = verdict(record(0, WAITING), record(1, calls(3, STEP[0]), is_done=True), record(2, WAITING))
    assert found.verdict.startswith(
        "rank 1 is in forward_backward (titanlab/train/assemble.py:228) and in no collective; ranks 0, 2 wait"
    )
    assert found.ranks == (1,)


def ring(function):
    return {"file": "titanlab/parallelism/exchanges.py", "line": 94, "function": function}


def in_ring(rank, given, **how):
    """A record of one of four ranks, in two rings."""
    context = (0, 1) if rank < 2 else (2, 3)
    return record(rank, given, groups={"shard": (0, 1, 2, 3), "world": (0, 1, 2, 3), "context": context}, **how)


# NCCL starts a group at its first message: a rank may wait where it posts one.
@pytest.mark.parametrize("function", ["received", "__init__"])
def test_a_rank_in_a_rings_receive_waits_and_is_not_outside_of_collectives(function):
    """The messages of a ring are in no record. Rank 0 was named, which waits for rank 1."""
    others = [in_ring(rank, calls(3, STEP[0]), is_done=True, source=ring(function)) for rank in (0, 2, 3)]
    # Rank 1 is at a collective that its earlier steps did not have here.
    odd = in_ring(1, calls(3, STEP[0], STEP[2]))
    found = verdict(odd, *others, world=4)
    assert found.verdict.startswith(
        "rank 1 skipped all_gather of [48] and waits in reduce_scatter (shard, sequence number 11) at forward_backward"
    )
    assert found.ranks == (1,)
    assert found.waits[0].text == "a receive of the ring (context)"
    assert found.waits[0].on == {1}


def test_what_a_rank_never_did_says_more_than_that_another_is_in_no_collective():
    odd = record(0, calls(3, STEP[0], STEP[2]))
    idle = record(1, calls(3, STEP[0]), is_done=True)
    found = verdict(odd, idle, record(2, calls(3, STEP[0], STEP[1])), world=3)
    assert found.ranks == (0,)


def test_a_call_that_aborted_another_rank_is_named_from_the_ranks_own_steps():
    """gloo aborts the rank that receives a message of another size, which leaves no record."""
    usual = record(0, calls(3, *STEP[:2]), state="raised")
    odd = record(1, calls(3, STEP[0], ("shard", "all_gather", 96)), state="raised", source=MINE)
    found = odd_calls({0: usual, 1: odd}, 2)
    assert found.verdict == (
        "rank 1 calls all_gather of [96] where earlier steps called all_gather of [48] (shard, sequence number 11); "
        "rank 1 is at loop (project/mine.py:7)"
    )
    assert found.ranks == (1,)
    # Of another group, and of no earlier step.
    assert odd_calls({0: usual, 1: odd}, 7) is None
    assert odd_calls({0: usual}, 2) is None


def test_a_collective_that_all_have_called_and_that_does_not_end_accuses_nobody():
    """Ranks 1 and 2 have a bad connection, and rank 0 waits for rank 1."""
    first = record(0, [("shard", "all_gather", 1)], groups={"shard": (0, 1)})
    second = record(1, [("tensor", "all_reduce", 2)], groups={"shard": (0, 1), "tensor": (1, 2)})
    third = record(2, [("tensor", "all_reduce", 2)], groups={"tensor": (1, 2)})
    found = verdict(first, second, third)
    assert found.verdict.startswith(
        "rank 1 waits in all_reduce (tensor, sequence number 1), which all of its ranks have called; rank 0 waits in "
        "all_gather (shard, sequence number 1) at "
    )
    assert (found.ranks, found.pending) == ((), "all_reduce (tensor, sequence number 1)")


def test_without_collectives_nobody_is_accused():
    found = verdict(*[record(rank, []) for rank in range(2)], world=2)
    assert (found.ranks, found.pending) == ((), None)
    assert found.verdict.startswith("all 2 ranks wait, and no rank is behind: ranks 0, 1 wait at forward_backward")


def stage(rank, *, sent, received, waiting=None, runs=True, calls=(), **how):
    other = 1 - rank
    message = waiting and {
        "operation": waiting[0],
        "what": waiting[1],
        "microbatch": 2,
        "stage": rank,
        "peer_stage": other,
        "peer": other,
    }
    messages = {"runs": runs, "stages": [rank], "sent": {str(other): sent}, "received": {str(other): received}}
    groups = {"pipeline": (0, 1)}
    return record(rank, calls, groups=groups, messages={**messages, "waiting": message}, **how)


REDUCE = [("pipeline", "all_reduce", 7)]


def test_a_stage_that_skipped_a_recv():
    first = stage(0, sent=8, received=8, waiting=("send", "hidden state"))
    found = verdict(first, stage(1, sent=8, received=7, runs=False, calls=REDUCE), world=2)
    assert found.verdict.startswith(
        "rank 1 (stage 1) skipped a recv (hidden state) and waits in all_reduce (pipeline, sequence number 1) at "
    )
    assert found.verdict.endswith(
        "; rank 0 waits in send of the hidden state of microbatch 2 to stage 1 (pipeline, stage 0) at "
        "forward_backward (titanlab/train/assemble.py:228)"
    )
    assert found.ranks == (1,)


def test_a_stage_that_skipped_sends():
    last = stage(1, sent=6, received=8, waiting=("recv", "hidden state"))
    found = verdict(stage(0, sent=6, received=8, runs=False, calls=REDUCE), last, world=2)
    assert found.verdict.startswith("rank 0 (stage 0) skipped 2 sends (hidden state) and waits in all_reduce")


def test_stages_that_wait_for_each_other():
    ranks = [stage(rank, sent=5, received=6, waiting=("recv", "gradient")) for rank in range(2)]
    found = verdict(*ranks, world=2)
    assert found.verdict.startswith(
        "ranks wait for each other: rank 0 waits in recv of the gradient of microbatch 2 from stage 1 (pipeline, stage 0)"
    )
    assert found.ranks == ()


def test_a_stage_that_has_sent_and_one_that_sleeps():
    found = verdict(
        stage(0, sent=8, received=8, waiting=("recv", "gradient")),
        stage(1, sent=7, received=8, state="stands", source=MINE),
        world=2,
    )
    assert found.verdict.startswith("rank 1 stands in loop (project/mine.py:7); rank 0 waits in recv of the gradient")


def test_a_step_that_begins_another_way_is_no_deviation():
    """The first collective, and one after too little that is the same."""
    short = record(0, [STEP[0], STEP[1], STEP[0], STEP[2]])
    assert deviation(short, short.collectives[0]) is None
    assert deviation(short, short.collectives[3]) is None


def test_repeated_layers_are_told_apart_by_the_whole_step():
    layers = [("shard", "all_gather", 5)] * 6
    whole = [*layers, ("world", "all_reduce", 7)]
    right = record(0, [*whole * 3, *layers])
    assert deviation(right, right.collectives[-1]) is None
    early = record(0, [*whole * 3, *layers[:4], ("world", "all_reduce", 7)])
    found = deviation(early, early.collectives[-1])
    assert (found.expected.operation, found.called.operation) == ("all_gather", "all_reduce")


def test_many_ranks_take_a_second_and_not_an_hour():
    groups = {"shard": tuple(range(256)), "world": tuple(range(256))}
    usual = record(0, calls(60, STEP[0]), groups=groups)
    ranks = {rank: replace(usual, rank=rank) for rank in range(256)}
    ranks[77] = replace(record(77, calls(60), groups=groups), state="stands")
    found = diagnose(ranks, world=256)
    assert found.ranks == (77,)
    assert found.verdict.count("waits in") + found.verdict.count("wait in") == 1


def test_ranks_are_named():
    assert named([3]) == "rank 3"
    assert named([2, 0]) == "ranks 0, 2"
    assert named(range(64)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"
