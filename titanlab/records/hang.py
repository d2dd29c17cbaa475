"""A hang: the record of each rank (`attempts/N/hang/rank-R.json`), and the rank that made the others wait.

The evidence of a verdict, strongest first: a rank that ended early; a rank that does not answer; ranks that call
different collectives; a rank that waits for nobody; a rank that calls something else than in its earlier steps; a rank
for which others wait and that is in no collective. If this does not decide, no rank is named.
"""

from __future__ import annotations

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from titanlab.errors import ConfigError
from titanlab.records.files import read_object
from titanlab.records.run_folder import RunFolder
from titanlab.system import finite, write_text

SCHEMA = 1
_LONGEST_TEXT = 500
_MOST_BYTES = 1 << 24
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
    """A collective, or a send or receive (`is_message`), that a rank has called, with its number in torch's group."""

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]  # of its inputs
    dtypes: tuple[str, ...]  # in torch's words
    is_message: bool
    is_done: bool
    # Seconds since the epoch: when it was called, when the device began and ended it. 0: not known, as with gloo.
    created: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    source: CodeLine | None = None  # the innermost line of titanlab or of the user that called it


@dataclass(frozen=True)
class GroupRecord:
    """A process group: its axis of the mesh, and its ranks."""

    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Waiting:
    """The send or receive of a pipeline for which a rank waits."""

    operation: str
    what: str
    microbatch: int
    stage: int
    peer_stage: int
    peer: int


@dataclass(frozen=True)
class Messages:
    """Sends and receives of a pipeline: how many a rank has started, by the other rank, and what it waits for."""

    runs: bool  # whether a schedule was running; if not, all its messages had been started
    stages: tuple[int, ...]
    sent: Mapping[int, int]
    received: Mapping[int, int]
    waiting: Waiting | None


@dataclass(frozen=True, kw_only=True)
class HangRecord:
    """One rank's record; it has `raised` an error, `waits` for other ranks or its device, `computes`, or `stands`."""

    rank: int
    state: RankState
    phase: str  # such as `step 3`, which began `seconds` ago
    step: int  # the last complete one
    seconds: float
    limit: float | None  # that the phase has reached; None: another rank reached its limit first
    activity: str  # `data`, `checkpoint` or empty
    source: CodeLine | None  # the innermost line of titanlab or of the user
    stack: tuple[CodeLine, ...]  # of the main thread, innermost first
    groups: Mapping[str, GroupRecord]  # by torch's name
    messages: Messages | None
    collectives: tuple[Collective, ...]  # oldest first
    coordinates: Mapping[str, int] = field(default_factory=dict)  # on each axis whose degree is above 1
    time: float = 0.0  # when the record was made, in seconds since the epoch

    def axis(self, group: str) -> str:
        return self.groups[group].axis if group in self.groups else f"group {group}"

    def described(self, call: Collective) -> str:
        """`all_reduce (shard, sequence number 41)`."""
        return f"{call.operation} ({self.axis(call.group)}, sequence number {call.sequence})"


def hang_folder(run: RunFolder, attempt: int) -> Path:
    return run.attempt_folder(attempt) / "hang"


def write_hang(run: RunFolder, attempt: int, record: HangRecord) -> None:
    """Write a rank's record."""
    folder = hang_folder(run, attempt)
    folder.mkdir(parents=True, exist_ok=True)
    # In one line: a record has a thousand collectives.
    text = json.dumps(finite({"schema": SCHEMA, **asdict(record)}))
    write_text(folder / f"rank-{record.rank}.json", text + "\n")


def read_hang(run: RunFolder, attempt: int) -> tuple[dict[int, HangRecord], dict[int, str]]:
    """The records of an attempt by rank, and for damaged files the reason in one line."""
    records: dict[int, HangRecord] = {}
    damaged: dict[int, str] = {}
    for path in sorted(hang_folder(run, attempt).glob("rank-*.json")):
        number = path.stem.removeprefix("rank-")
        if not number.isdecimal() or len(number) > 9:
            continue
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ValueError(f"it has more than {_MOST_BYTES} bytes")
            record = parse_hang(read_object(path) or {})
            if record.rank != int(number):
                raise ValueError(f"it is of rank {record.rank}")
            records[record.rank] = record
        except (OSError, ConfigError, ValueError) as error:
            reason = error.rule if isinstance(error, ConfigError) else getattr(error, "strerror", error)
            damaged[int(number)] = f"{path}: {reason}"
    return records, damaged


def parse_hang(value: Mapping[str, Any]) -> HangRecord:
    """The record in a JSON object; ValueError: a value has the wrong type, or the schema's number differs."""
    import msgspec

    if value.get("schema") != SCHEMA:
        raise ValueError(f"schema {value.get('schema')} is not {SCHEMA}")
    try:
        return msgspec.convert(_printable(value), HangRecord, str_keys=True)
    except msgspec.ValidationError as error:
        # Not a ValueError before msgspec 0.21.
        raise ValueError(str(error)) from error


def _printable(value: Any) -> Any:
    """The value with short texts that cannot control the terminal on which they are printed."""
    if isinstance(value, str):
        return "".join(letter if letter.isprintable() else "?" for letter in value[:_LONGEST_TEXT])
    if isinstance(value, Mapping):
        return {_printable(key): _printable(inner) for key, inner in value.items()}
    return [_printable(inner) for inner in value] if isinstance(value, list) else value


# Collectives whose inputs have the same size on all ranks.
_EQUAL_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")
# Two places are compared if at least this many collectives before them are the same.
_FEWEST_EQUAL = 3
_MOST_NAMED = 8
# File and functions in which a rank posts or waits for keys and values of a ring. With NCCL a rank can wait when it
# posts: the first message of a group starts the group, which waits for the other ranks.
_RING_FILE, _RING_FUNCTIONS = "titanlab/parallelism/context.py", ("received", "transfer")
_ACTIVITIES = {"data": "wait for data", "checkpoint": "are in a checkpoint"}
_SINGULAR = {"wait": "waits", "call": "calls", "compute": "computes", "stand": "stands", "are": "is", "do": "does"}
_SINGULAR["have"] = "has"


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a rank waits for, or what it does instead (`verb`, such as `compute`)."""

    verb: str = "wait"
    text: str = ""  # `all_reduce (shard, sequence number 41)`; empty if it is not known
    on: frozenset[int] = frozenset()  # ranks that have not come; empty if all have, or if they are not known
    call: Collective | None = None  # None for a message
    skipped: str = ""  # messages that the rank in `on` should have started: it has ended its schedule
    at: str = ""  # the line of titanlab or of the user in which the rank is

    def __str__(self) -> str:
        place = f" {'at' if self.verb == 'wait' else 'in'} {self.at}" if self.at else ""
        return self.verb + (f" in {self.text}" if self.text else "") + place


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict in one sentence, and the ranks that made the others wait; none if the records do not show them."""

    verdict: str
    ranks: tuple[int, ...] = ()
    pending: str | None = None  # the collective or message in which the others wait; None if none of them waits
    waits: Mapping[int, Wait] = field(default_factory=dict)  # of each rank with a record


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
        silent: ranks that did not answer, with what is known of their processes.
        ended: ranks that ended before, with the way in which each ended.
        unread: ranks that have answered, but whose records cannot be read.
    """
    silent, ended = dict(silent or {}), dict(ended or {})
    known = {*records, *silent, *ended, *unread}
    silent |= {rank: "it has left no record" for rank in range(world) if rank not in known}
    waits = _waits(records, {*silent, *ended})
    for reasons, phrase in ((ended, "ended early"), (silent, "do not answer")):
        if reasons:
            ranks = sorted(reasons)
            listing = ", ".join(f"rank {rank}: {reasons[rank]}" for rank in ranks[:_MOST_NAMED])
            why = f": {reasons[ranks[0]]}" if len(ranks) == 1 else f" ({listing})"
            return _accused(_who(ranks, phrase) + why, ranks, waits)
    # From here on every rank has a record, or has one that cannot be read.
    if (different := different_calls(records)) is not None:
        return replace(different, waits=waits)
    awaited = {peer for wait in waits.values() for peer in wait.on}
    if outside := [rank for rank, wait in waits.items() if wait.verb != "wait"]:
        ranks = [rank for rank in outside if rank in awaited] or outside
        return _accused(_listed({rank: waits[rank] for rank in ranks}), ranks, waits)
    if (wait := next((wait for wait in waits.values() if wait.skipped), None)) is not None:
        (peer,) = wait.on
        instead = f" and {_agreeing(waits[peer], 1)}" if waits[peer].text else ""
        return _accused(f"rank {peer} {wait.skipped}{instead}", [peer], waits)
    # Every rank with a record waits. If each waits for another, the graph of waits has a cycle.
    blocked = {rank: wait.call for rank, wait in waits.items() if wait.on}
    calls = {rank: call for rank, call in blocked.items() if call is not None}
    if (odd := _odd(records, calls, fewer_than=len(blocked))) is not None:
        return _accused(odd.verdict, odd.ranks, waits)
    if ends := sorted(rank for rank in awaited if rank in waits and not waits[rank].on and not waits[rank].text):
        place = f" in {waits[ends[0]].at}" if waits[ends[0]].at else ""
        return _accused(f"{_who(ends, 'are')}{place} and in no collective", ends, waits)
    listing = _listed(waits, says_for_whom=not unread)
    # First a collective that all of its ranks have called: the connection may be at fault.
    pending = next((wait.text for wait in sorted(waits.values(), key=lambda wait: bool(wait.on)) if wait.text), None)
    who = "ranks wait" if blocked or unread or not waits else f"all {len(waits)} ranks wait, and no rank is behind"
    verdict = f"{who}: {listing}; the records do not show which of them is wrong"
    return Diagnosis(verdict=verdict, pending=pending, waits=waits)


def different_calls(records: Mapping[int, HangRecord]) -> Diagnosis | None:
    """The verdict over ranks that call different collectives in a group; None if no group has a difference."""
    # By name and ranks of a group, because groups with the same name may have different ranks; then by sequence number.
    calls: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Collective]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in records.items():
        # Look up once per record: a key may have thousands of ranks.
        own = {name: calls[name, group.ranks] for name, group in record.groups.items() if group.ranks}
        for call in record.collectives:
            if not call.is_message and call.group in own:
                own[call.group][call.sequence][rank] = call
    unclear = None
    for _, by_sequence in sorted(calls.items()):
        differ = (group for _, group in sorted(by_sequence.items()) if len(set(map(_signature, group.values()))) > 1)
        if (by_rank := next(differ, None)) is not None:
            if (odd := _odd(records, by_rank, fewer_than=len(by_rank), are_at_one_place=True)) is not None:
                return odd
            # Another group may show which ranks are wrong.
            unclear = unclear or by_rank
    if unclear is None:
        return None
    first, call = next(iter(unclear.items()))
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, each in unclear.items():
        ranks_of[_with_sizes(each)].append(rank)
    listing = ", ".join(f"{named(ranks)} {text}" for text, ranks in ranks_of.items())
    place = f"{records[first].axis(call.group)}, sequence number {call.sequence}"
    text = f"ranks call different collectives ({place}): {listing}; the records do not show which of them is wrong"
    return Diagnosis(verdict=text, pending=records[first].described(call))


def odd_calls(records: Mapping[int, HangRecord], failed: int) -> Diagnosis | None:
    """The verdict over ranks whose last collective, in a group of a failed rank, differs from earlier steps."""
    last: dict[int, Collective] = {}
    for rank, record in records.items():
        call = next((call for call in reversed(record.collectives) if not call.is_message), None)
        if call is not None and call.group in record.groups and failed in record.groups[call.group].ranks:
            last[rank] = call
    return _odd(records, last, fewer_than=max(len(records), 2))


def _odd(
    records: Mapping[int, HangRecord],
    calls: Mapping[int, Collective],
    *,
    fewer_than: int,
    are_at_one_place: bool = False,
) -> Diagnosis | None:
    """The verdict over the ranks whose call differs from their own earlier steps; None if there are none, or too many.

    Args:
        are_at_one_place: the calls have one group and sequence number, so they should be the same. If no rank differs
            from its own earlier steps, the wrong ranks are those that differ from more than half of the ranks.
    """
    past = {rank: _usual_call(records[rank], call) for rank, call in calls.items()}
    wrong = {rank: usual for rank, usual in past.items() if usual is not None}
    if are_at_one_place and not wrong:
        ((most, count),) = Counter(map(_signature, calls.values())).most_common(1)
        if 2 * count > len(calls):
            wrong = {rank: (call, False) for rank, call in calls.items() if _signature(call) != most}
    if not 0 < len(wrong) < fewer_than:
        return None
    ranks = sorted(wrong)
    record, call = records[ranks[0]], calls[ranks[0]]
    expected, is_skipped = wrong[ranks[0]]
    pending, text = record.described(call), f"{_who(ranks, 'call')} {_with_sizes(call)}"
    if is_skipped or not are_at_one_place:
        verb = "skipped" if is_skipped else "have not called"
        text = f"{_who(ranks, verb)} {_with_sizes(expected)} and called {_with_sizes(call)}"
    if are_at_one_place:
        others = [rank for rank in calls if rank not in wrong]
        pending = records[others[0]].described(calls[others[0]])
        text += f" where {_who(others, 'call')} {_with_sizes(calls[others[0]])}"
    text += f" ({record.axis(call.group)}, sequence number {call.sequence})"
    text += f"; rank {ranks[0]} is at {record.source}" if record.source is not None else ""
    return Diagnosis(verdict=text, ranks=tuple(ranks), pending=pending)


def _usual_call(record: HangRecord, call: Collective) -> tuple[Collective, bool] | None:
    """What a rank called at the same place of earlier steps, and whether it now skipped that; None: no difference.

    The same place is the one before which the most collectives are the same.
    """
    known = [each for each in record.collectives if not each.is_message]
    signatures = [(record.axis(each.group), _signature(each)) for each in known]
    index = next((number for number, each in enumerate(known) if each is call), 0)
    earlier, most = 0, 0
    for place in range(index - 1, 0, -1):
        if most >= place:
            break
        equal = 0
        while equal < place and signatures[place - 1 - equal] == signatures[index - 1 - equal]:
            equal += 1
        if equal > most:
            earlier, most = place, equal
    if most < _FEWEST_EQUAL or signatures[earlier] == signatures[index]:
        return None
    return known[earlier], earlier + 1 < index and signatures[earlier + 1] == signatures[index]


def _signature(call: Collective) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The properties that must be equal on all ranks of a group: operation and sizes, or operation only."""
    return call.operation, call.sizes if any(name in call.operation for name in _EQUAL_SIZES) else ()


def _waits(records: Mapping[int, HangRecord], absent: Collection[int]) -> dict[int, Wait]:
    """For each rank with a record that is not absent, what it waits for, or does instead."""
    reached: dict[int, dict[str, int]] = {}
    for rank, record in records.items():
        own = reached[rank] = dict[str, int]()
        for call in record.collectives:
            if not call.is_message:
                # The list is ordered by time, so its last call may not have the largest number.
                own[call.group] = max(own.get(call.group, 0), call.sequence)

    # Cached: ranks that wait in the same collective have the same answer, which may list thousands of ranks.
    @functools.cache
    def late(group: str, ranks: tuple[int, ...], sequence: int) -> frozenset[int]:
        behind = {rank for rank in ranks if rank in reached and reached[rank].get(group, 0) < sequence}
        return frozenset(behind.union(absent).intersection(ranks))

    waits = {}
    in_ring = {
        rank
        for rank, record in records.items()
        if any(line.file.endswith(_RING_FILE) and line.function in _RING_FUNCTIONS for line in record.stack)
    }
    for rank in sorted(set(records) - set(absent)):
        record = records[rank]
        at = str(record.source) if record.source is not None else ""
        if record.state in ("computes", "stands"):
            stands = _ACTIVITIES.get(record.activity, "stand")
            waits[rank] = Wait(verb="compute" if record.state == "computes" else stands, at=at)
            continue
        if record.messages is not None and record.messages.waiting is not None:
            waits[rank] = _wait_for_message(record, record.messages.waiting, records, absent, at)
            continue
        # A collective that raised an error counts as done; it is the last one.
        failed = record.collectives[-1:] if record.state == "raised" else ()
        # Collectives of one group end in order: only the first pending one of each group blocks the rank.
        firsts: dict[str, Collective] = {}
        for call in (*record.collectives, *failed):
            if not call.is_done or call in failed:
                firsts.setdefault(call.group, call)
        found = []
        for call in firsts.values():
            ranks = record.groups[call.group].ranks if call.group in record.groups else ()
            # Messages have numbers of their own: only absent ranks are known to be late.
            on = late(call.group, ranks, 0 if call.is_message else call.sequence)
            found.append(Wait(text=record.described(call), on=on, call=call, at=at))
        if not found and rank in in_ring:
            # No list of collectives contains the messages of a ring.
            ring = next((group.ranks for group in record.groups.values() if group.axis == "context"), ())
            outside = {peer for peer in ring if peer in absent or (peer in records and peer not in in_ring)}
            found = [Wait(text="a receive of the ring (context)", on=frozenset(outside - {rank}), at=at)]
        waits[rank] = next((wait for wait in found if wait.on), found[0] if found else Wait(at=at))
    return waits


def _wait_for_message(
    record: HangRecord, message: Waiting, records: Mapping[int, HangRecord], absent: Collection[int], at: str
) -> Wait:
    """The wait of a pipeline's rank; the other rank is late if it has started fewer messages than this one."""
    ours, peer = record.messages, records.get(message.peer)
    theirs = None if peer is None else peer.messages
    missing, is_send = 0, message.operation == "send"
    if ours is not None and theirs is not None and is_send:
        missing = ours.sent.get(message.peer, 0) - theirs.received.get(record.rank, 0)
    elif ours is not None and theirs is not None:
        missing = ours.received.get(message.peer, 0) - theirs.sent.get(record.rank, 0)
    is_late, skipped = message.peer in absent or missing > 0, ""
    if peer is not None and theirs is not None and is_late and not theirs.runs and peer.step == record.step:
        opposite = "recv" if is_send else "send"
        count = f"a {opposite}" if missing == 1 else f"{missing} {opposite}s"
        skipped = f"(stage {message.peer_stage}) skipped {count} ({message.what})"
    text = f"{message.operation} of the {message.what} of microbatch {message.microbatch} "
    text += f"{'to' if is_send else 'from'} stage {message.peer_stage} (pipeline, stage {message.stage})"
    return Wait(text=text, on=frozenset({message.peer} if is_late else ()), skipped=skipped, at=at)


def _accused(text: str, ranks: Iterable[int], waits: Mapping[int, Wait]) -> Diagnosis:
    """The verdict, followed by the places where other ranks wait; first the ranks that wait for the accused ones."""
    ranks = tuple(ranks)
    others = {rank: wait for rank, wait in waits.items() if rank not in ranks}
    direct = {rank: wait for rank, wait in others.items() if wait.on & set(ranks)} or others
    pending = next((wait.text for wait in direct.values() if wait.text), None)
    verdict = f"{text}; {_listed(others)}" if others else text
    return Diagnosis(verdict=verdict, ranks=ranks, pending=pending, waits=waits)


def _listed(waits: Mapping[int, Wait], *, says_for_whom: bool = False) -> str:
    """The places where ranks wait; ranks at the same place together."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank, wait in waits.items():
        whom = f" for {named(wait.on)}" if wait.on else ", which all of its ranks have called" if wait.call else ""
        places[f"{wait}{whom if says_for_whom else ''}"].append(rank)
    listed = [_who(ranks, phrase) for phrase, ranks in places.items()]
    more = f", and {len(listed) - _MOST_NAMED} more places" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more


def named(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 2`, `ranks 0, 1, … and 55 more`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return f"ranks {shown}" + (f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else "")


def _who(ranks: Collection[int], phrase: object) -> str:
    """The ranks, and what they do: `rank 1 waits`, `ranks 0, 2 wait`."""
    return f"{named(ranks)} {_agreeing(phrase, len(ranks))}"


def _agreeing(phrase: object, count: int) -> str:
    verb, space, rest = str(phrase).partition(" ")
    return (_SINGULAR.get(verb, verb) if count == 1 else verb) + space + rest


def _with_sizes(call: Collective) -> str:
    sizes = ", ".join(str(list(size)) for size in call.sizes[:2])
    return f"{call.operation} of {sizes}" if sizes else call.operation


def rank_rows(
    diagnosis: Diagnosis, records: Mapping[int, HangRecord], others: Mapping[int, str], *, world: int
) -> list[dict[str, Any]]:
    """One row for each rank; all have the same keys.

    Args:
        others: known facts about ranks without a record.
        world: number of ranks; 0: unknown.
    """
    rows = []
    for rank in sorted({*range(world), *records, *others, *diagnosis.ranks}):
        wait = diagnosis.waits.get(rank, Wait())
        row: dict[str, Any] = {
            "rank": rank,
            "is_named": rank in diagnosis.ranks,
            "state": others.get(rank, "no record"),
            **dict.fromkeys(("phase", "step", "last", "is_done", "sequence", "created", "started", "ended")),
            "called_in": None,
            "seconds": None,  # how long the last collective took, or has been pending
            "waits_for": sorted(wait.on),
            "place": None,
            "stack": [],
        }
        if (record := records.get(rank)) is not None:
            row["state"] = f"{record.state} ({record.activity})" if record.activity else record.state
            row |= {"phase": record.phase, "step": record.step, "stack": list(map(str, record.stack))}
            row["place"] = None if record.source is None else str(record.source)
            if record.collectives:
                last = record.collectives[-1]
                row |= {"last": record.described(last), "is_done": last.is_done, "sequence": last.sequence}
                row |= {name: getattr(last, name) or None for name in ("created", "started", "ended")}
                row["called_in"] = None if last.source is None else str(last.source)
                if last.created and (until := last.ended if last.is_done else record.time):
                    row["seconds"] = max(until - (last.started or last.created), 0.0)
            if record.messages is not None and record.messages.waiting is not None and wait.text:
                row |= {"last": wait.text, "is_done": False, "seconds": None, "called_in": None}
        rows.append(row)
    return rows
