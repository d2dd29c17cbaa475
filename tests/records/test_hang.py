"""The verdict over records of a hang, the table of its ranks, and the records on disk: whole, damaged and foreign."""

import json
from dataclasses import replace

import msgspec
import pytest

from tests import tiny
from titanlab.records import (
    CodeLine,
    Collective,
    GroupRecord,
    HangRecord,
    Messages,
    Waiting,
    diagnose,
    different_calls,
    named,
    odd_calls,
    rank_rows,
    read_hang,
    write_hang,
)
from titanlab.records.hang import hang_folder

STEP = (
    ("shard", "all_gather", 40),
    ("shard", "all_gather", 48),
    ("shard", "reduce_scatter", 88),
    ("world", "all_reduce", 7),
)
FORWARD = CodeLine("titanlab/train/assemble.py", 228, "forward_backward")
MINE = CodeLine("/home/me/project/mine.py", 7, "loop")


def record(
    rank, calls, *, state="waits", groups=None, source=FORWARD, activity="", messages=None, is_done=None, step=3
):
    """A record of a rank that has called `calls`: (axis, operation, size); the last is pending if the rank waits."""
    groups = groups or {"shard": (0, 1, 2), "world": (0, 1, 2)}
    numbers = dict.fromkeys([*groups, "unknown"], 0)
    collectives = []
    for axis, operation, size in calls:
        numbers[axis] += 1
        is_message = operation in ("send", "recv")
        call = Collective(axis, numbers[axis], operation, ((size,),), ("Float",), is_message, is_done=True)
        collectives.append(call)
    if collectives and state == "waits" and not is_done:
        collectives[-1] = replace(collectives[-1], is_done=False)
    return HangRecord(
        rank=rank,
        state=state,
        phase=f"step {step + 1}",
        step=step,
        seconds=9.0,
        limit=9.0,
        activity=activity,
        source=source,
        stack=(source,),
        groups={name: GroupRecord(name, tuple(ranks)) for name, ranks in groups.items()},
        messages=messages,
        collectives=tuple(collectives),
    )


def calls(steps, *more):
    return [*(STEP * steps), *more]


def by_rank(*records):
    return {each.rank: each for each in records}


def first(findings):
    """The first finding: its text and its ranks; nothing if there is none."""
    return next(((text, tuple(ranks)) for text, ranks in findings), (None, ()))


def verdict(*records, world=3, **known):
    return diagnose(by_rank(*records), world=world, **known)


WAITING = calls(3, *STEP[:2])
"""In the fourth step, in the second all_gather."""
PENDING = "all_gather (shard, sequence number 11)"
AT_FORWARD = "at forward_backward (titanlab/train/assemble.py:228)"
WAITERS = (record(0, WAITING), record(2, WAITING))


def outside(state, activity=""):
    return (*WAITERS, record(1, calls(3, STEP[0]), state=state, activity=activity, source=MINE))


@pytest.mark.parametrize(
    ("records", "known", "begins", "ranks"),
    [
        (WAITERS, {"silent": {1: "its process is stopped (SIGSTOP)"}},
         f"rank 1 does not answer: its process is stopped (SIGSTOP); ranks 0, 2 wait in {PENDING} {AT_FORWARD}", (1,)),
        (WAITERS, {}, f"rank 1 does not answer: it has left no record; ranks 0, 2 wait in {PENDING}", (1,)),
        (WAITERS, {"unread": [1]},
         f"ranks wait: ranks 0, 2 wait in {PENDING} {AT_FORWARD}; the records do not show which of them is wrong", ()),
        (WAITERS[:1], {"ended": {1: "ended with exit code 0"}, "silent": {2: "its process is gone"}},
         f"rank 1 ended early: ended with exit code 0; rank 0 waits in {PENDING}", (1,)),
        ((WAITERS[0], record(2, calls(3), state="stands", activity="data", source=MINE)), {"silent": {1: "it is stopped"}},
         (f"rank 1 does not answer: it is stopped; rank 0 waits in {PENDING} {AT_FORWARD}, "
         "rank 2 waits for data in loop (project/mine.py:7)"), (1,)),
        (outside("stands"), {}, f"rank 1 stands in loop (project/mine.py:7); ranks 0, 2 wait in {PENDING}", (1,)),
        (outside("stands", "data"), {}, "rank 1 waits for data in loop (project/mine.py:7); ranks 0, 2 wait in", (1,)),
        (outside("stands", "checkpoint"), {}, "rank 1 is in a checkpoint in loop (project/mine.py:7); ranks 0, 2", (1,)),
        (outside("computes"), {}, "rank 1 computes in loop (project/mine.py:7); ranks 0, 2 wait in all_gather", (1,)),
        ([record(rank, calls(3), state="stands", activity="data", source=MINE) for rank in range(3)], {},
         "ranks 0, 1, 2 wait for data in loop (project/mine.py:7)", (0, 1, 2)),
        ([record(rank, WAITING) for rank in range(3)], {},
         (f"all 3 ranks wait, and no rank is behind: ranks 0, 1, 2 wait in {PENDING} {AT_FORWARD}, which all of its ranks "
         "have called; the records do not show which of them is wrong"), ()),
        ([record(rank, []) for rank in range(3)], {},
         "all 3 ranks wait, and no rank is behind: ranks 0, 1, 2 wait at forward_backward", ()),
        ((*WAITERS, record(1, calls(3, STEP[0]), is_done=True)), {},
         "rank 1 is in forward_backward (titanlab/train/assemble.py:228) and in no collective; ranks 0, 2 wait", (1,)),
    ],
    ids=["silent", "no record", "unread", "ended", "others", "stands", "data", "checkpoint", "computes", "all for data",
         "same collective", "no collective", "behind"],
)  # fmt: skip
def test_who_is_named(records, known, begins, ranks):
    found = verdict(*records, **known)
    assert found.verdict.startswith(begins)
    assert found.ranks == ranks


def test_a_verdict_has_the_collective_and_for_whom_each_rank_waits():
    found = verdict(*WAITERS)
    assert found.pending == PENDING
    assert {rank: sorted(wait.on) for rank, wait in found.waits.items()} == {0: [1], 2: [1]}
    many = verdict(WAITERS[0], world=64)
    assert many.verdict.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 55 more do not answer (rank 1: it has left no ")
    assert len(many.verdict) < 1000


def test_a_clock_that_was_set_back_leaves_no_rank_behind():
    """Records list collectives by the time of their creation."""
    ahead = record(1, calls(4), is_done=True)
    mixed = replace(ahead, collectives=(*ahead.collectives[1:], ahead.collectives[0]))
    assert verdict(*WAITERS, mixed).waits[0].on == verdict(*WAITERS, ahead).waits[0].on == frozenset()


def test_of_two_that_stand_the_one_is_named_for_whom_others_wait():
    groups = {"shard": (0, 1), "world": (0, 1, 2)}
    late = record(1, calls(3, STEP[0]), state="stands", groups=groups, source=MINE)
    other = record(2, [STEP[3]] * 3, state="stands", groups={"world": (0, 1, 2)}, source=MINE)
    assert verdict(record(0, WAITING, groups=groups), late, other).ranks == (1,)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_collective_that_was_skipped_shows_in_the_ranks_own_steps(rank):
    usual = [record(other, calls(3, *STEP)) for other in range(3) if other != rank]
    found = verdict(*usual, record(rank, calls(3, STEP[0], STEP[2])))
    assert found.verdict.startswith(
        f"rank {rank} skipped all_gather of [48] and called reduce_scatter of [88] where "
        f"{named(each.rank for each in usual)} call all_gather of [48] (shard, sequence number 11); rank "
    )
    assert found.ranks == (rank,)


TWO = {"shard": (0, 1), "world": (0, 1)}


@pytest.mark.parametrize(
    ("usual", "other", "said"),
    [
        (calls(3, *STEP), calls(3, STEP[0], STEP[2]), "rank 1 skipped all_gather of [48] and called reduce_scatter of"),
        (calls(3, *STEP), calls(3, STEP[0], ("shard", "all_to_all", 3)), "rank 1 calls all_to_all of [3] where rank 0"),
        (
            [STEP[0]],
            [("shard", "all_gather", 41)],
            ("ranks call different collectives (shard, sequence number 1): rank 0 all_gather of [40], rank 1 all_gather "
            "of [41]; the records do not show which of them is wrong"),
        ),
        # Both deviate from their earlier steps.
        (calls(3, ("shard", "a", 1)), calls(3, ("shard", "b", 1)), "ranks call different collectives (shard, sequence"),
        # Without three equal collectives before it, a place is not compared with an earlier one.
        ([("shard", "a", 1), ("shard", "b", 1), ("shard", "a", 1), ("shard", "b", 1)],
         [("shard", "a", 1), ("shard", "b", 1), ("shard", "a", 1), ("shard", "c", 1)], "ranks call different"),
    ],
    ids=["skip", "addition", "no past", "both deviate", "short past"],
)  # fmt: skip
def test_of_two_ranks_only_their_own_steps_decide(usual, other, said):
    text, ranks = first(different_calls(by_rank(record(0, usual, groups=TWO), record(1, other, groups=TWO))))
    assert text.startswith(said)
    assert ranks == ((1,) if said.startswith("rank 1") else ())


@pytest.mark.parametrize("steps", [0, 3])
def test_of_three_ranks_the_one_with_another_shape_is_wrong(steps):
    wrong = record(2, calls(steps, STEP[0], ("shard", "all_gather", 49)))
    found = verdict(*(record(rank, calls(steps, *STEP[:2])) for rank in range(2)), wrong)
    place = f"shard, sequence number {3 * steps + 2}"
    assert found.verdict.startswith(
        f"rank 2 calls all_gather of [49] where ranks 0, 1 call all_gather of [48] ({place})"
    )
    assert found.ranks == (2,)


def test_a_difference_that_shows_who_is_wrong_comes_first():
    groups = {"shard": (0, 1), "world": (0, 1, 2)}
    usual, other = ("world", "all_reduce", 4), ("world", "broadcast", 4)
    ranks = [
        record(0, [("shard", "all_reduce", 4), usual], groups=groups),
        record(1, [("shard", "broadcast", 4), usual], groups=groups),
        record(2, [other], groups=groups),
    ]
    assert first(different_calls(by_rank(*ranks)))[1] == (2,)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record(0, calls(3)), record(1, calls(2)), record(2, [])],
        # Sizes that may differ.
        *([record(rank, [*STEP, ("shard", name, rank)]) for rank in range(3)] for name in ("all_to_all", "gather")),
        # Messages, a group that no record describes, and two groups of one name.
        [record(0, [("shard", "send", 4)]), record(1, [("shard", "recv", 4)])],
        [record(rank, [("unknown", "all_reduce", rank)]) for rank in range(2)],
        [record(rank, [("shard", "all_reduce", rank)], groups={"shard": (rank, rank + 2)}) for rank in range(2)],
    ],
    ids=["none", "behind", "all_to_all", "gather", "messages", "unknown", "two groups"],
)
def test_what_is_no_difference(records):
    assert not list(different_calls(by_rank(*records)))


GROUPS = {"shard": (0, 1), "tensor": (0, 1)}
PAIR = (("shard", "all_gather", 1), ("tensor", "all_reduce", 2), ("shard", "all_gather", 3))


def test_two_groups_in_another_order():
    usual = record(0, [*PAIR * 3, *PAIR[:2]], groups=GROUPS)
    found = verdict(usual, record(1, [*PAIR * 3, PAIR[0], PAIR[2]], groups=GROUPS), world=2)
    assert found.verdict.startswith(
        "rank 1 skipped all_reduce of [2] and called all_gather of [3] (shard, sequence number 8); "
        "rank 1 is at forward_backward (titanlab/train/assemble.py:228); rank 0 waits in all_reduce (tensor, sequence "
    )
    assert (found.ranks, found.pending) == ((1,), "all_reduce (tensor, sequence number 4)")


def test_without_earlier_steps_a_deadlock_accuses_nobody():
    ranks = record(0, [PAIR[1]], groups=GROUPS), record(1, [PAIR[2]], groups=GROUPS)
    found = verdict(*ranks, world=2)
    assert found.verdict == (
        f"ranks wait: rank 0 waits in all_reduce (tensor, sequence number 1) {AT_FORWARD} for rank 1, "
        f"rank 1 waits in all_gather (shard, sequence number 1) {AT_FORWARD} for rank 0; "
        "the records do not show which of them is wrong"
    )
    assert found.ranks == ()


# NCCL starts a group at its first message: a rank may wait where it posts one.
@pytest.mark.parametrize("function", ["received", "transfer"])
def test_a_rank_in_a_rings_receive_waits_and_is_not_outside_of_collectives(function):
    """The messages of a ring are in no record. Rank 0 was named, which waits for rank 1."""

    def in_ring(rank, given, **how):
        context = (0, 1) if rank < 2 else (2, 3)
        return record(rank, given, groups={"shard": (0, 1, 2, 3), "world": (0, 1, 2, 3), "context": context}, **how)

    ring = CodeLine("titanlab/parallelism/context.py", 94, function)
    others = [in_ring(rank, calls(3, STEP[0]), is_done=True, source=ring) for rank in (0, 2, 3)]
    # Rank 1 is at a collective that its earlier steps did not have here.
    found = verdict(in_ring(1, calls(3, STEP[0], STEP[2])), *others, world=4)
    assert found.verdict.startswith(
        "rank 1 skipped all_gather of [48] and called reduce_scatter of [88] (shard, sequence number 11); rank 1 is at for"
    )
    assert found.ranks == (1,)
    assert found.waits[0].text == "a receive of the ring (context)"
    assert found.waits[0].on == {1}


def test_what_a_rank_never_did_says_more_than_that_another_is_in_no_collective():
    odd, idle = record(0, calls(3, STEP[0], STEP[2])), record(1, calls(3, STEP[0]), is_done=True)
    assert verdict(odd, idle, record(2, WAITING)).ranks == (0,)


def test_a_collective_that_all_have_called_and_that_does_not_end_accuses_nobody():
    """Ranks 1 and 2 have a bad connection, and rank 0 waits for rank 1."""
    first = record(0, [("shard", "all_gather", 1)], groups={"shard": (0, 1)})
    second = record(1, [("tensor", "all_reduce", 2)], groups={"shard": (0, 1), "tensor": (1, 2)})
    third = record(2, [("tensor", "all_reduce", 2)], groups={"tensor": (1, 2)})
    found = verdict(first, second, third)
    assert found.verdict == (
        f"ranks wait: rank 0 waits in all_gather (shard, sequence number 1) {AT_FORWARD} for rank 1, ranks 1, 2 wait in "
        f"all_reduce (tensor, sequence number 1) {AT_FORWARD}, which all of its ranks have called; the records do not "
        "show which of them is wrong"
    )
    assert (found.ranks, found.pending) == ((), "all_reduce (tensor, sequence number 1)")


def test_a_call_that_aborted_another_rank_is_named_from_the_ranks_own_steps():
    """gloo aborts the rank that receives a message of another size, which leaves no record."""
    usual = record(0, WAITING, state="raised")
    odd = record(1, calls(3, STEP[0], ("shard", "all_gather", 96)), state="raised", source=MINE)
    assert first(odd_calls({0: usual, 1: odd}, 2)) == (
        (
            "rank 1 has not called all_gather of [48] and called all_gather of [96] (shard, sequence number 11); "
            "rank 1 is at loop (project/mine.py:7)"
        ),
        (1,),
    )
    # Of another group, and of no earlier step.
    assert not list(odd_calls({0: usual, 1: odd}, 7))
    assert not list(odd_calls({0: usual}, 2))


LAYERS = [("shard", "all_gather", 5)] * 6
WHOLE = [*LAYERS, ("world", "all_reduce", 7)]


@pytest.mark.parametrize(
    ("given", "is_odd"),
    [
        (STEP[:1], False),
        ([STEP[0], STEP[1], STEP[0], STEP[2]], False),
        (calls(3), False),
        # Repeated layers are told apart by the whole step.
        ([*WHOLE * 3, *LAYERS], False),
        ([*WHOLE * 3, *LAYERS[:4], ("world", "all_reduce", 7)], True),
    ],
    ids=["first", "short past", "as before", "layers", "a layer too few"],
)
def test_the_last_call_is_compared_with_the_same_place_of_earlier_steps(given, is_odd):
    text, _ = first(odd_calls({0: record(0, given)}, 1))
    assert (text is not None) is is_odd
    assert text is None or "has not called all_gather of [5] and called all_reduce of [7]" in text


def stage(rank, *, sent, received, waiting=None, runs=True, calls=(), **how):
    """A stage of a pipeline of two: how many messages it has started, and the operation and tensor that it waits for."""
    other = 1 - rank
    message = waiting and Waiting(*waiting, microbatch=2, stage=rank, peer_stage=other, peer=other)
    messages = Messages(runs=runs, stages=(rank,), sent={other: sent}, received={other: received}, waiting=message)
    return record(rank, calls, groups={"pipeline": (0, 1)}, messages=messages, **how)


REDUCE = [("pipeline", "all_reduce", 7)]
RECV, SEND = ("recv", "gradient"), ("send", "hidden state")
SENDS = "rank 0 waits in send of the hidden state of microbatch 2 to stage 1 (pipeline, stage 0)"
RECEIVES = "rank 0 waits in recv of the gradient of microbatch 2 from stage 1 (pipeline, stage 0)"


@pytest.mark.parametrize(
    ("ranks", "begins", "named_ranks"),
    [
        (
            [stage(0, sent=8, received=8, waiting=SEND), stage(1, sent=8, received=7, runs=False, calls=REDUCE)],
            (
                "rank 1 (stage 1) skipped a recv (hidden state) and waits in all_reduce (pipeline, sequence number 1) "
                f"{AT_FORWARD}; {SENDS} {AT_FORWARD}"
            ),
            (1,),
        ),
        (
            [
                stage(0, sent=6, received=8, runs=False, calls=REDUCE),
                stage(1, sent=6, received=8, waiting=("recv", "hidden state")),
            ],
            "rank 0 (stage 0) skipped 2 sends (hidden state) and waits in all_reduce",
            (0,),
        ),
        ([stage(rank, sent=5, received=6, waiting=RECV) for rank in range(2)], f"ranks wait: {RECEIVES}", ()),
        (
            [stage(0, sent=8, received=8, waiting=RECV), stage(1, sent=7, received=8, state="stands", source=MINE)],
            f"rank 1 stands in loop (project/mine.py:7); {RECEIVES}",
            (1,),
        ),
    ],
    ids=["skipped recv", "skipped sends", "each other", "sleeps"],
)
def test_stages_of_a_pipeline(ranks, begins, named_ranks):
    found = verdict(*ranks, world=2)
    assert found.verdict.startswith(begins)
    assert found.ranks == named_ranks
    (row, *_) = [row for row in rows_of(*ranks, world=2) if row["last"] and "microbatch 2" in row["last"]]
    assert (row["is_done"], row["waits_for"]) == (False, [1 - row["rank"]])


def test_many_ranks_take_a_second_and_not_an_hour():
    groups = {"shard": tuple(range(256)), "world": tuple(range(256))}
    usual = record(0, calls(60, STEP[0]), groups=groups)
    ranks = {rank: replace(usual, rank=rank) for rank in range(256)}
    ranks[77] = replace(record(77, calls(60), groups=groups), state="stands")
    found = diagnose(ranks, world=256)
    assert found.ranks == (77,)
    assert found.verdict.count("waits in") + found.verdict.count("wait in") == 1


def rows_of(*records, others=None, world=3):
    return rank_rows(verdict(*records, world=world), by_rank(*records), others or {}, world=world)


def test_each_rank_has_a_row_also_beyond_the_world():
    rows = rows_of(record(1, STEP), record(3, [], state="computes"), others={5: "ended"}, world=2)
    states = [(0, "no record"), (1, "waits"), (3, "computes"), (5, "ended")]
    assert [(row["rank"], row["state"]) for row in rows] == states
    # All rows have the same keys: they are one table, and one JSON list.
    assert len({frozenset(row) for row in rows}) == 1
    assert (rows[0]["waits_for"], rows[0]["stack"], rows[0]["last"]) == ([], [], None)
    assert (rows[2]["last"], rows[2]["is_done"], rows[2]["sequence"]) == (None, None, None)


def test_rows_say_who_waits_for_whom():
    late = record(2, STEP[:2], state="computes", activity="data")
    rows = rows_of(record(0, STEP[:3]), record(1, STEP[:3]), late)
    assert [(row["waits_for"], row["is_named"], row["is_done"]) for row in rows] == [
        ([2], False, False),
        ([2], False, False),
        ([], True, True),
    ]


LINE = {"file": "titanlab/train/assemble.py", "line": 228, "function": "forward_backward"}


def values(**changes):
    collective = {
        "group": "0",
        "sequence": 3,
        "operation": "all_reduce",
        "sizes": [[7], [2, 3]],
        "dtypes": ["Float", "Long"],
        "is_message": False,
        "is_done": False,
        "created": 1.5,
    }
    return {
        "schema": 1,
        "rank": 0,
        "time": 1.0,
        "state": "waits",
        "phase": "step 4",
        "step": 3,
        "seconds": 9,
        "limit": None,
        "activity": "",
        "source": LINE,
        "stack": [LINE],
        "coordinates": {"shard": 0},
        "groups": {"0": {"axis": "shard", "ranks": [0, 1]}},
        "messages": None,
        "collectives": [collective],
        **changes,
    }


def stored(**changes):
    return msgspec.convert(values(**changes), HangRecord, str_keys=True)


@pytest.fixture
def run(tmp_path):
    return tiny.begin(tiny.recipe(tmp_path, shard=2))


def test_what_is_written_is_read(run):
    assert read_hang(run, 1) == read_hang(run, 7) == ({}, {})
    write_hang(run, 1, stored())
    records, damaged = read_hang(run, 1)
    assert (records, damaged) == ({0: stored()}, {})
    assert records[0].groups["0"].ranks == (0, 1)
    assert records[0].collectives[0].sizes == ((7,), (2, 3))
    assert str(records[0].source) == "forward_backward (titanlab/train/assemble.py:228)"


DAMAGE = {
    "cut": (json.dumps(values())[:90], "is not JSON"),
    "a list": ("[]", "holds list, not an object"),
    "a pickle": (b"\x80\x04cposix\nsystem\n(S'true'\ntR.", "is not JSON"),
    "nested": ("[" * 100_000, "is not JSON"),
    "another schema": (values(schema=2), "has schema 2, and this version of titanlab reads schema 1"),
    "a missing key": ({"schema": 1, "state": "waits"}, "rank=null: is missing in "),
    "an unknown state": (values(state="flies"), "state=flies: invalid enum value 'flies' in "),
    "a text as a number": (values(step="3"), "step=3: expected `int`, got `str` in "),
    "messages to no rank": (
        values(messages={"runs": True, "stages": [0], "sent": {"x": 1}, "received": {}, "waiting": None}),
        "expected `int`, got `str` in ",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_named_in_one_line_and_hides_no_other(run, name):
    content, reason = DAMAGE[name]
    write_hang(run, 1, stored(rank=1))
    path = hang_folder(run, 1) / "rank-0.json"
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    records, damaged = read_hang(run, 1)
    assert (list(records), list(damaged)) == ([1], [0])
    assert str(path) in damaged[0]
    assert reason in damaged[0]
    assert "\n" not in damaged[0]


def test_other_files_are_passed_over(run):
    write_hang(run, 1, stored())
    for name in ("rank-x.json", f"rank-{'9' * 30}.json", ".rank-1.json.tmp"):
        (hang_folder(run, 1) / name).write_text("{}")
    assert list(read_hang(run, 1)[0]) == [0]
