"""A hang: the record of each rank (`attempts/N/hang/rank-R.json`), and the rank that made the others wait.

The verdict names the ranks for which the evidence is strongest. From the strongest: a rank ended early; a rank does not
answer; ranks call different collectives; a rank waits for no rank; a rank calls something else than in its earlier
steps; a rank for which others wait is in no collective. If there is no such evidence, no rank is named.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from titanlab.errors import ConfigError
from titanlab.records.files import read_typed
from titanlab.records.run_folder import RunFolder
from titanlab.system import finite, write_text

SCHEMA = 1
RankState = Literal["waits", "computes", "stands", "raised"]


@dataclass(frozen=True)
class CodeLine:
    """A line of code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        file = self.file if self.file.startswith("titanlab/") else "/".join(self.file.split("/")[-2:])
        return f"{self.function} ({file}:{self.line})"


@dataclass(frozen=True)
class Collective:
    """A collective, or a send or receive (`is_message`), that a rank has called; `sequence`: number in its group."""

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]  # shapes of its input tensors
    dtypes: tuple[str, ...]  # of its inputs, as torch names them
    is_message: bool
    is_done: bool
    # When it was called, and when the device began and ended it, in seconds since the epoch. 0: unknown, as with gloo.
    created: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    source: CodeLine | None = None  # the innermost line of titanlab or of the user that called it

    def __str__(self) -> str:
        sizes = ", ".join(str(list(size)) for size in self.sizes[:2])
        return f"{self.operation} of {sizes}" if sizes else self.operation

    @property
    def signature(self) -> tuple[str, tuple[tuple[int, ...], ...]]:
        """What must be equal on all ranks of the group: the operation, and for some operations also the sizes."""
        return self.operation, self.sizes if any(name in self.operation for name in _EQUAL_SIZES) else ()


@dataclass(frozen=True)
class GroupRecord:
    """A process group: its axis of the mesh, and its ranks."""

    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Waiting:
    """The send or receive of a pipeline for which a rank waits; `peer`: the rank at the other end."""

    operation: str
    what: str
    microbatch: int
    stage: int
    peer_stage: int
    peer: int


@dataclass(frozen=True)
class Messages:
    """A rank's sends and receives in a pipeline: their counts by peer rank, and the message for which it waits."""

    runs: bool  # whether a schedule was running; if not, the rank had started all messages of its schedule
    stages: tuple[int, ...]
    sent: Mapping[int, int]
    received: Mapping[int, int]
    waiting: Waiting | None


@dataclass(frozen=True, kw_only=True)
class HangRecord:
    """The record of a rank, which has `raised` an error, `waits` for ranks or its device, `computes`, or `stands`."""

    rank: int
    state: RankState
    phase: str  # what the rank does, such as `step 3`, which began `seconds` ago
    step: int  # the last complete step
    seconds: float
    limit: float | None  # the limit in seconds that the phase has reached; None: another rank reached its limit first
    activity: str  # `data`, `checkpoint` or empty
    source: CodeLine | None  # the innermost line of titanlab or of the user
    stack: tuple[CodeLine, ...]  # the main thread's stack, innermost line first
    groups: Mapping[str, GroupRecord]  # by torch's name of the group
    messages: Messages | None
    collectives: tuple[Collective, ...]  # oldest first
    coordinates: Mapping[str, int] = field(default_factory=dict)  # this rank's, on each axis whose degree is above 1
    time: float = 0.0  # when the record was made, in seconds since the epoch

    def group_of(self, call: Collective) -> GroupRecord:
        return self.groups.get(call.group) or GroupRecord(f"group {call.group}", ())

    def place(self, call: Collective) -> str:
        return f"({self.group_of(call).axis}, sequence number {call.sequence})"


def hang_folder(run: RunFolder, attempt: int) -> Path:
    return run.attempt_folder(attempt) / "hang"


def write_hang(run: RunFolder, attempt: int, record: HangRecord) -> None:
    """Write a rank's record."""
    folder = hang_folder(run, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    # Write one line, without indentation: a record has a thousand collectives.
    text = json.dumps(finite({"schema": SCHEMA, **asdict(record)}))
    write_text(folder / f"rank-{record.rank}.json", text + "\n")


def read_hang(run: RunFolder, attempt: int) -> tuple[dict[int, HangRecord], dict[int, str]]:
    """The records of an attempt by rank; and by rank, what is wrong with damaged records, in one line each."""
    records: dict[int, HangRecord] = {}
    damaged: dict[int, str] = {}
    for path in sorted(hang_folder(run, attempt).glob("rank-*.json")):
        if (match := re.fullmatch(r"rank-(\d{1,6})\.json", path.name)) is None:
            continue
        try:
            if (record := read_typed(path, HangRecord, schema=SCHEMA)) is not None:
                records[int(match[1])] = record
        except ConfigError as error:
            damaged[int(match[1])] = error.problem
    return records, damaged


# Collectives whose inputs have the same size on all ranks.
_EQUAL_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")
# Two positions in a rank's list of collectives are compared if at least this many collectives before them are equal.
_FEWEST_EQUAL = 3
_MOST_NAMED = 8
# File and functions in which a rank sends or awaits keys and values in a ring (context parallelism). With NCCL a rank
# may wait already when it sends: the first message of a group starts the group, which waits for the other ranks.
_RING_FILE, _RING_FUNCTIONS = "titanlab/parallelism/context.py", ("received", "transfer")
_ACTIVITIES = {"data": "wait for data", "checkpoint": "are in a checkpoint"}
_SINGULAR = {"wait": "waits", "call": "calls", "compute": "computes", "stand": "stands", "are": "is", "do": "does"}
_SINGULAR["have"] = "has"
_UNDECIDED = "; the records do not show which of them is wrong"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a rank waits for, or what it does instead (`verb`, such as `compute`)."""

    verb: str = "wait"
    text: str = ""  # such as `all_reduce (shard, sequence number 41)`; empty if unknown
    on: frozenset[int] = frozenset()  # ranks that have not come; empty if all have come, or if unknown
    call: Collective | None = None  # the collective it waits in; None for a pipeline's message
    skipped: str = ""  # messages that the rank in `on` has skipped: it has ended its schedule without them
    at: str = ""  # the line of titanlab or of the user in which the rank is

    def __str__(self) -> str:
        place = f" {'at' if self.verb == 'wait' else 'in'} {self.at}" if self.at else ""
        return self.verb + (f" in {self.text}" if self.text else "") + place


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict in one sentence, and the ranks that made the others wait; empty if the records do not show them."""

    verdict: str
    ranks: tuple[int, ...] = ()
    pending: str | None = None  # the collective or message in which the other ranks wait; None if none of them waits
    waits: Mapping[int, Wait] = field(default_factory=dict)  # by rank; only ranks with a record


Finding = tuple[str, Collection[int]]
"""What is wrong, and the ranks that made the others wait; none if that is not known."""


def diagnose(
    records: Mapping[int, HangRecord],
    *,
    world: int,
    silent: Mapping[int, str] | None = None,
    ended: Mapping[int, str] | None = None,
    unread: Collection[int] = (),
) -> Diagnosis:
    """The verdict over the ranks' records.

    Args:
        world: number of ranks; 0: unknown.
        silent: the ranks that did not answer, each with what is known of its process.
        ended: the ranks that ended before the hang, each with how it ended.
        unread: ranks that have answered, but whose records cannot be read.
    """
    silent, ended = dict(silent or {}), dict(ended or {})
    known = {*records, *silent, *ended, *unread}
    silent |= {rank: "it has left no record" for rank in range(world) if rank not in known}
    waits = _waits(records, {*silent, *ended})
    text, named_ranks = next(_findings(records, waits, silent, ended, has_all=not unread))
    ranks = tuple(sorted(named_ranks))
    others = {rank: wait for rank, wait in waits.items() if rank not in ranks}
    if ranks and others:
        text += f"; {_listed(others)}"
    # Ranks that wait for a named rank come first; if no rank is named, ranks whose collective all ranks have called.
    ordered = sorted(others.values(), key=lambda wait: not wait.on & set(ranks) if ranks else bool(wait.on))
    pending = next((wait.text for wait in ordered if wait.text), None)
    return Diagnosis(verdict=text, ranks=ranks, pending=pending, waits=waits)


def _findings(
    records: Mapping[int, HangRecord],
    waits: Mapping[int, Wait],
    silent: Mapping[int, str],
    ended: Mapping[int, str],
    *,
    has_all: bool,
) -> Iterator[Finding]:
    """Yield what the records show, the strongest evidence first; the last finding names no rank."""
    for reasons, phrase in ((ended, "ended early"), (silent, "do not answer")):
        listing = ", ".join(f"rank {rank}: {reasons[rank]}" for rank in sorted(reasons)[:_MOST_NAMED])
        if only := list(reasons.values()):
            yield f"{_who(reasons, phrase)}{f': {only[0]}' if len(only) == 1 else f' ({listing})'}", reasons
    # From here on every rank has a record, or has one that cannot be read.
    yield from different_calls(records)
    awaited = {peer for wait in waits.values() for peer in wait.on}
    if outside := [rank for rank, wait in waits.items() if wait.verb != "wait"]:
        ranks = [rank for rank in outside if rank in awaited] or outside
        yield _listed({rank: waits[rank] for rank in ranks}), ranks
    for wait in waits.values():
        if wait.skipped:
            (peer,) = wait.on
            yield (
                f"rank {peer} {wait.skipped}" + (f" and {_agreeing(waits[peer], 1)}" if waits[peer].text else ""),
                [peer],
            )
    # Here every rank with a record waits. If each waits for another rank, the graph of waits has a cycle.
    blocked = {rank: wait.call for rank, wait in waits.items() if wait.on}
    calls = {rank: call for rank, call in blocked.items() if call is not None}
    yield from _odd(records, calls, fewer_than=len(blocked))
    if ends := [rank for rank in sorted(awaited) if rank in waits and not waits[rank].on and not waits[rank].text]:
        place = f" in {waits[ends[0]].at}" if waits[ends[0]].at else ""
        yield f"{_who(ends, 'are')}{place} and in no collective", ends
    is_complete = has_all and waits and not blocked
    who = f"all {len(waits)} ranks wait, and no rank is behind" if is_complete else "ranks wait"
    listing = _listed(waits, says_for_whom=has_all)
    yield f"{who}: {listing}{_UNDECIDED}" if waits else "the ranks wait for each other", ()


def different_calls(records: Mapping[int, HangRecord]) -> Iterator[Finding]:
    """Ranks that call different collectives under one sequence number of a group. Findings without a rank come last."""
    # Keys: name and ranks of a group, because groups with one name may have different ranks; then the sequence number.
    calls: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Collective]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in records.items():
        # Look up once per record: a key may have thousands of ranks.
        own = {name: calls[name, group.ranks] for name, group in record.groups.items()}
        for call in record.collectives:
            if not call.is_message and call.group in own:
                own[call.group][call.sequence][rank] = call
    unclear: list[dict[int, Collective]] = []
    for _, by_sequence in sorted(calls.items()):
        for _, by_rank in sorted(by_sequence.items()):
            if len({call.signature for call in by_rank.values()}) > 1:
                found = list(_odd(records, by_rank, fewer_than=len(by_rank), is_one_place=True))
                yield from found
                unclear += [] if found else [by_rank]
                break
    for by_rank in unclear[:1]:
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, call in by_rank.items():
            ranks_of[str(call)].append(rank)
        listing = ", ".join(f"{named(ranks)} {text}" for text, ranks in ranks_of.items())
        rank, call = next(iter(by_rank.items()))
        yield f"ranks call different collectives {records[rank].place(call)}: {listing}{_UNDECIDED}", ()


def odd_calls(records: Mapping[int, HangRecord], failed: int) -> Iterator[Finding]:
    """Ranks whose last collective, in a group of the failed rank, differs from their own earlier steps."""
    last = {}
    for rank, record in records.items():
        call = next((call for call in reversed(record.collectives) if not call.is_message), None)
        if call is not None and failed in record.group_of(call).ranks:
            last[rank] = call
    return _odd(records, last, fewer_than=max(len(records), 2))


def _odd(
    records: Mapping[int, HangRecord],
    calls: Mapping[int, Collective],
    *,
    fewer_than: int,
    is_one_place: bool = False,
) -> Iterator[Finding]:
    """The ranks whose call differs from their own earlier steps; nothing if there are none, or `fewer_than` or more.

    Args:
        is_one_place: the calls have one group and one sequence number, so they should be equal. If no rank differs from
            its own earlier steps, the wrong ranks are those whose call differs from the call of most ranks.
    """
    usual = {rank: _usual_call(records[rank], call) for rank, call in calls.items()}
    wrong = sorted(rank for rank, call in usual.items() if call is not None)
    if is_one_place and not wrong:
        ((most, count),) = Counter(call.signature for call in calls.values()).most_common(1)
        wrong = sorted(rank for rank, call in calls.items() if call.signature != most) if 2 * count > len(calls) else []
    if not 0 < len(wrong) < fewer_than:
        return
    record, call = records[wrong[0]], calls[wrong[0]]
    expected, is_skipped = usual[wrong[0]] or (call, False)
    if is_skipped or not is_one_place:
        text = f"{_who(wrong, 'skipped' if is_skipped else 'have not called')} {expected} and called {call}"
    else:
        text = f"{_who(wrong, 'call')} {call}"
    if is_one_place:
        others = [rank for rank in calls if rank not in wrong]
        text += f" where {_who(others, 'call')} {calls[others[0]]}"
    at = f"; rank {wrong[0]} is at {record.source}" if record.source is not None else ""
    yield f"{text} {record.place(call)}{at}", wrong


def _usual_call(record: HangRecord, call: Collective) -> tuple[Collective, bool] | None:
    """What a rank called here in earlier steps, and whether the rank has now skipped that; None: no difference.

    "Here" is the earlier position before which the most collectives are equal to those before `call`.
    """
    known = [each for each in record.collectives if not each.is_message]
    signatures = [(record.group_of(each).axis, each.signature) for each in known]
    index = next((number for number, each in enumerate(known) if each is call), 0)
    earlier, most = 0, 0
    for place in range(index - 1, 0, -1):
        equal = 0
        while equal < place and signatures[place - 1 - equal] == signatures[index - 1 - equal]:
            equal += 1
        if equal > most:
            earlier, most = place, equal
        if most >= place - 1:
            break
    if most < _FEWEST_EQUAL or signatures[earlier] == signatures[index]:
        return None
    return known[earlier], earlier + 1 < index and signatures[earlier + 1] == signatures[index]


def _waits(records: Mapping[int, HangRecord], absent: Collection[int]) -> dict[int, Wait]:
    """For each rank with a record that is not absent, what the rank waits for, or does instead."""
    reached: dict[int, dict[str, int]] = {rank: defaultdict(int) for rank in records}
    for rank, record in records.items():
        for call in record.collectives:
            if not call.is_message:
                # The list is ordered by time, so its last call may not have the largest number.
                reached[rank][call.group] = max(reached[rank][call.group], call.sequence)
    in_ring = {
        rank
        for rank, record in records.items()
        if any(line.file.endswith(_RING_FILE) and line.function in _RING_FUNCTIONS for line in record.stack)
    }

    # Cached: ranks that wait in the same collective have the same answer, which may list thousands of ranks.
    @functools.cache
    def late(group: str, ranks: tuple[int, ...], sequence: int) -> frozenset[int]:
        return frozenset(
            rank for rank in ranks if rank in absent or (rank in reached and reached[rank].get(group, 0) < sequence)
        )

    def wait_of(rank: int, record: HangRecord) -> Wait:
        at = str(record.source) if record.source is not None else ""
        if record.state in ("computes", "stands"):
            stands = _ACTIVITIES.get(record.activity, "stand")
            return Wait(verb="compute" if record.state == "computes" else stands, at=at)
        if record.messages is not None and record.messages.waiting is not None:
            return _wait_for_message(record, record.messages, record.messages.waiting, records, absent, at)
        # A collective that raised an error is marked as done; it is the last collective.
        failed = record.collectives[-1:] if record.state == "raised" else ()
        # Collectives of one group end in order: only the first pending one of each group blocks the rank.
        firsts: dict[str, Collective] = {}
        for call in (*record.collectives, *failed):
            if not call.is_done or call in failed:
                firsts.setdefault(call.group, call)
        found = []
        for call in firsts.values():
            # Messages are numbered separately: for them, only absent ranks are known to be late.
            on = late(call.group, record.group_of(call).ranks, 0 if call.is_message else call.sequence)
            found.append(Wait(text=f"{call.operation} {record.place(call)}", on=on, call=call, at=at))
        if not found and rank in in_ring:
            # The list of collectives does not contain the messages of a ring.
            ring = next((group.ranks for group in record.groups.values() if group.axis == "context"), ())
            outside = frozenset(peer for peer in ring if peer in absent or (peer in records and peer not in in_ring))
            return Wait(text="a receive of the ring (context)", on=outside, at=at)
        return next((wait for wait in found if wait.on), found[0] if found else Wait(at=at))

    return {rank: wait_of(rank, records[rank]) for rank in sorted(set(records) - set(absent))}


def _wait_for_message(
    record: HangRecord,
    ours: Messages,
    message: Waiting,
    records: Mapping[int, HangRecord],
    absent: Collection[int],
    at: str,
) -> Wait:
    """The wait of a rank in a pipeline; its peer is late if the peer has started fewer messages than this rank."""
    peer, skipped, missing = records.get(message.peer), "", 0
    is_send = message.operation == "send"
    if peer is not None and (theirs := peer.messages) is not None:
        own, other = (ours.sent, theirs.received) if is_send else (ours.received, theirs.sent)
        missing = own.get(message.peer, 0) - other.get(record.rank, 0)
        if missing > 0 and not theirs.runs and peer.step == record.step:
            opposite = "recv" if is_send else "send"
            count = f"a {opposite}" if missing == 1 else f"{missing} {opposite}s"
            skipped = f"(stage {message.peer_stage}) skipped {count} ({message.what})"
    is_late = message.peer in absent or missing > 0
    text = f"{message.operation} of the {message.what} of microbatch {message.microbatch} "
    text += f"{'to' if is_send else 'from'} stage {message.peer_stage} (pipeline, stage {message.stage})"
    return Wait(text=text, on=frozenset({message.peer} if is_late else ()), skipped=skipped, at=at)


def _listed(waits: Mapping[int, Wait], *, says_for_whom: bool = False) -> str:
    """The places where ranks wait, as text; ranks that wait at the same place are listed together."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank, wait in waits.items():
        whom = f" for {named(wait.on)}" if wait.on else ", which all of its ranks have called" if wait.call else ""
        places[f"{wait}{whom if says_for_whom else ''}"].append(rank)
    listed = [_who(ranks, phrase) for phrase, ranks in places.items()]
    more = f", and {len(listed) - _MOST_NAMED} more places" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more


def named(ranks: Iterable[int]) -> str:
    """The ranks as text: `rank 1`, `ranks 0, 2`, `ranks 0, 1, … and 55 more`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return f"ranks {shown}" + (f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else "")


def _who(ranks: Collection[int], phrase: object) -> str:
    """The ranks and what they do, as text: `rank 1 waits`, `ranks 0, 2 wait`."""
    return f"{named(ranks)} {_agreeing(phrase, len(ranks))}"


def _agreeing(phrase: object, count: int) -> str:
    verb, space, rest = str(phrase).partition(" ")
    return (_SINGULAR.get(verb, verb) if count == 1 else verb) + space + rest


def rank_rows(
    diagnosis: Diagnosis, records: Mapping[int, HangRecord], others: Mapping[int, str], *, world: int
) -> list[dict[str, Any]]:
    """One row for each rank; all rows have the same keys, `_COLUMNS`.

    Args:
        others: by rank without a record, what is known of it.
        world: number of ranks; 0: unknown.
    """
    rows = []
    for rank in sorted({*range(world), *records, *others, *diagnosis.ranks}):
        record, wait = records.get(rank), diagnosis.waits.get(rank, Wait())
        row = dict.fromkeys(_COLUMNS) | {
            "rank": rank,
            "is_named": rank in diagnosis.ranks,
            "state": others.get(rank, "no record"),
            "waits_for": sorted(wait.on),
            "stack": [],
        }
        if record is not None:
            row["state"] = f"{record.state} ({record.activity})" if record.activity else record.state
            row |= {"phase": record.phase, "step": record.step, "stack": list(map(str, record.stack))}
            row["place"] = None if record.source is None else str(record.source)
            for last in record.collectives[-1:]:
                row |= {"last": f"{last.operation} {record.place(last)}", "is_done": last.is_done}
                row |= {name: getattr(last, name) or None for name in ("sequence", "created", "started", "ended")}
                row["called_in"] = None if last.source is None else str(last.source)
                if last.created and (until := last.ended if last.is_done else record.time):
                    row["seconds"] = max(until - (last.started or last.created), 0.0)
            if record.messages is not None and record.messages.waiting is not None and wait.text:
                row |= {"last": wait.text, "is_done": False, "seconds": None, "called_in": None}
        rows.append(row)
    return rows


# The keys of a row. `seconds`: how long the last collective took, or has been pending.
_COLUMNS = (
    *("rank", "is_named", "state", "phase", "step", "last", "is_done", "sequence", "created", "started", "ended"),
    *("called_in", "seconds", "waits_for", "place", "stack"),
)
