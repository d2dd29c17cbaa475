"""Finds the rank that made a run hang: pure functions over the records of its ranks.

The evidence, strongest first: a rank that does not answer; a rank that ended early; ranks that call different
collectives; a rank that is outside of every collective. Waiting ranks are compared with their own earlier steps; the
last evidence is a rank for which others wait and that waits for nobody. If this does not decide, no rank is named.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from titanlab.records.hang_file import Collective, HangRecord

# Collectives whose inputs have the same size on all ranks.
_EQUAL_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")
# Two places are compared if at least this many collectives before them are the same.
_FEWEST_EQUAL = 3
# Steps repeat their collectives: it is enough to compare this many ranks with their earlier steps.
_MOST_RANKS = 64
_MOST_NAMED = 8
# File and functions in which a rank posts or waits for keys and values of a ring. With NCCL a rank can wait when it
# posts: the first message of a group starts the group, which waits for the other ranks.
_RING_FILE, _RING_FUNCTIONS = "titanlab/parallelism/context.py", ("received", "transfer")
# Words for ranks that do not wait for others, for one rank and for several.
_VERBS = {
    "computes": ("computes", "compute"),
    "stands": ("stands", "stand"),
    "data": ("waits for data", "wait for data"),
    "checkpoint": ("is in a checkpoint", "are in a checkpoint"),
}


class Deviation(NamedTuple):
    """The collective that a rank called here in earlier steps, and whether the rank has now skipped it."""

    expected: Collective
    is_skip: bool


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a rank waits for, or does instead of waiting.

    Attributes:
        text: `all_reduce (shard, sequence number 41)`; empty if it is not known.
        on: the ranks that have not come; empty if all have come, or if they are not known.
        call: the collective; None for a send or receive of a pipeline.
        at: the line of titanlab or of the user in which the rank is.
        instead: key of _VERBS for a rank that does not wait for others.
    """

    text: str = ""
    on: frozenset[int] = frozenset()
    call: Collective | None = None
    at: str = ""
    instead: str | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result.

    Attributes:
        verdict: one sentence.
        ranks: the ranks that made the others wait; empty if the records do not show it.
        pending: the collective, send or receive in which the others wait; None if none of them waits.
        waits: what each rank with a record waits for, or does instead.
    """

    verdict: str
    ranks: tuple[int, ...] = ()
    pending: str | None = None
    waits: Mapping[int, Wait] = field(default_factory=dict)


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
        records: by rank.
        world: number of ranks; 0: unknown.
        silent: ranks that did not answer, with what is known of their processes.
        ended: ranks that ended before, with the way in which each ended.
        unread: ranks that have answered, but whose records cannot be read.
    """
    silent, ended = dict(silent or {}), dict(ended or {})
    known = {*records, *silent, *ended, *unread}
    silent |= {rank: "it has left no record" for rank in range(world) if rank not in known}
    waits = _waits(records, {*silent, *ended})
    if ended:
        return _accused(ended, "ended early", "ended early", waits)
    if silent:
        return _accused(silent, "does not answer", "do not answer", waits)
    different = different_calls(records)
    if different is not None:
        return replace(different, waits=waits)
    apart = {rank: wait for rank, wait in waits.items() if wait.instead is not None}
    if apart:
        awaited = {peer for wait in waits.values() for peer in wait.on}
        apart = {rank: wait for rank, wait in apart.items() if rank in awaited} or apart
        return _with_waits(_listed(apart), tuple(apart), waits)
    return _skipped_message(records, waits) or _waiting(records, waits, is_whole=not unread)


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
    differences = []
    for _, by_sequence in sorted(calls.items()):
        for _, by_rank in sorted(by_sequence.items()):
            if len({_in_group(call) for call in by_rank.values()}) > 1:
                differences.append((by_rank, _wrong(records, by_rank)))
                break
    if not differences:
        return None
    # Prefer a difference that shows which ranks are wrong: it explains the others.
    by_rank, wrong = min(differences, key=lambda difference: not difference[1])
    first, call = next(iter(by_rank.items()))
    place = f"{_axis(records[first], call.group)}, sequence number {call.sequence}"
    if not wrong:
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, each in by_rank.items():
            ranks_of[_with_sizes(each)].append(rank)
        listing = ", ".join(f"{named(ranks)} {text}" for text, ranks in ranks_of.items())
        text = f"ranks call different collectives ({place}): {listing}; the records do not show which of them is wrong"
        return Diagnosis(verdict=text, pending=described(records[first], call))
    ranks = tuple(sorted(wrong))
    deviation = wrong[ranks[0]]
    others = [rank for rank in by_rank if rank not in wrong]
    right = others[0]
    called, usual = _with_sizes(by_rank[ranks[0]]), _with_sizes(by_rank[right])
    if deviation is not None and deviation.is_skip:
        text = f"{named(ranks)} skipped {_with_sizes(deviation.expected)} and called {called}, where "
        text += f"{_who(others, 'waits', 'wait')} in {usual} ({place})"
    else:
        text = f"{_who(ranks, 'calls', 'call')} {called} where {_who(others, 'calls', 'call')} {usual} ({place})"
    pending = described(records[right], by_rank[right])
    return Diagnosis(verdict=text + _is_at(ranks[0], records[ranks[0]]), ranks=ranks, pending=pending)


def odd_calls(records: Mapping[int, HangRecord], failed: int) -> Diagnosis | None:
    """The verdict over ranks whose last collective, in a group of a failed rank, differs from earlier steps."""
    odd: dict[int, tuple[Collective, Deviation]] = {}
    for rank, record in records.items():
        last = next((call for call in reversed(record.collectives) if not call.is_message), None)
        if last is None or last.group not in record.groups or failed not in record.groups[last.group].ranks:
            continue
        deviation = deviation_of(record, last)
        if deviation is not None:
            odd[rank] = last, deviation
    if not odd or len(odd) == len(records) > 1:
        return None
    ranks = tuple(sorted(odd))
    record, (called, deviation) = records[ranks[0]], odd[ranks[0]]
    text = (
        f"{_who(ranks, 'calls', 'call')} {_with_sizes(called)} where earlier steps called "
        f"{_with_sizes(deviation.expected)} ({_axis(record, called.group)}, sequence number {called.sequence})"
    )
    return Diagnosis(verdict=text + _is_at(ranks[0], record), ranks=ranks, pending=described(record, called))


def _wrong(records: Mapping[int, HangRecord], calls: Mapping[int, Collective]) -> dict[int, Deviation | None]:
    """The wrong ranks among ranks that call different collectives in one place; empty if that is unclear.

    A rank is wrong if it deviates from its own earlier steps; if no rank does, if it deviates from more than half of
    the ranks (None).
    """
    deviations = {rank: deviation_of(records[rank], call) for rank, call in list(calls.items())[:_MOST_RANKS]}
    deviating = {rank: deviation for rank, deviation in deviations.items() if deviation is not None}
    if deviating:
        return {**deviating} if len(deviating) < len(calls) else {}
    ((usual, count),) = Counter(map(_in_group, calls.values())).most_common(1)
    return {rank: None for rank, call in calls.items() if _in_group(call) != usual} if 2 * count > len(calls) else {}


def deviation_of(record: HangRecord, call: Collective) -> Deviation | None:
    """How a call differs from the rank's call at the same place of earlier steps; None if it does not differ.

    The same place is the one before which the most collectives are the same.
    """
    calls = [collective for collective in record.collectives if not collective.is_message]
    signatures = [(_axis(record, collective.group), *_in_group(collective)) for collective in calls]
    index = next((number for number, collective in enumerate(calls) if collective is call), 0)
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
    return Deviation(calls[earlier], earlier + 1 < index and signatures[earlier + 1] == signatures[index])


def _in_group(call: Collective) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The properties that must be equal on all ranks of a group: operation and sizes, or operation only."""
    return call.operation, call.sizes if any(name in call.operation for name in _EQUAL_SIZES) else ()


def _axis(record: HangRecord, group: str) -> str:
    return record.groups[group].axis if group in record.groups else f"group {group}"


def _waits(records: Mapping[int, HangRecord], absent: Collection[int]) -> dict[int, Wait]:
    """For each rank with a record that is not absent, what it waits for, or does instead."""
    reached: dict[int, dict[str, int]] = {}
    for rank, record in records.items():
        own = reached[rank] = dict[str, int]()
        for call in record.collectives:
            if not call.is_message:
                # The last one of the list may be an earlier call: the list has the order of a clock.
                own[call.group] = max(own.get(call.group, 0), call.sequence)

    # Cached: ranks that wait in the same collective have the same answer, which may list thousands of ranks.
    @functools.cache
    def late(group: str, ranks: tuple[int, ...], sequence: int) -> frozenset[int]:
        behind = {rank for rank in ranks if rank in reached and reached[rank].get(group, 0) < sequence}
        return frozenset(behind.union(absent).intersection(ranks))

    return {rank: _wait(records, rank, absent, late) for rank in sorted(records) if rank not in absent}


def _wait(
    records: Mapping[int, HangRecord],
    rank: int,
    absent: Collection[int],
    late: Callable[[str, tuple[int, ...], int], frozenset[int]],
) -> Wait:
    """What a rank waits for, or does instead.

    Args:
        late: the ranks of a group that have not called the collective of a sequence number.
    """
    record = records[rank]
    at = str(record.source) if record.source is not None else ""
    if record.state == "computes":
        return Wait(at=at, instead="computes")
    if record.state == "stands":
        return Wait(at=at, instead=record.activity if record.activity in _VERBS else "stands")
    if record.messages is not None and (waiting := record.messages.waiting) is not None:
        text = (
            f"{waiting.operation} of the {waiting.what} of microbatch {waiting.microbatch} "
            f"{'to' if waiting.operation == 'send' else 'from'} stage {waiting.peer_stage} "
            f"(pipeline, stage {waiting.stage})"
        )
        peer = records.get(waiting.peer)
        is_late = peer is not None and _missing(record, peer, waiting.operation) > 0
        return Wait(text=text, on=frozenset({waiting.peer} if is_late or waiting.peer in absent else ()), at=at)
    # Collectives of one group end in order: only the first pending one of each group blocks the rank.
    firsts: dict[str, Collective] = {}
    # A collective that raised an error counts as done; it is the last one.
    failed = record.collectives[-1:] if record.state == "raised" else ()
    for call in (*record.collectives, *failed):
        if not call.is_done or call in failed:
            firsts.setdefault(call.group, call)
    waits = []
    for call in firsts.values():
        ranks = record.groups[call.group].ranks if call.group in record.groups else ()
        on = frozenset(absent).intersection(ranks) if call.is_message else late(call.group, ranks, call.sequence)
        waits.append(Wait(text=described(record, call), on=on, call=call, at=at))
    if not waits and _is_in_ring(record):
        # No list of collectives contains the messages of a ring.
        ring = next((group.ranks for group in record.groups.values() if group.axis == "context"), ())
        outside = {peer for peer in ring if peer in absent or (peer in records and not _is_in_ring(records[peer]))}
        return Wait(text="a receive of the ring (context)", on=frozenset(outside - {rank}), at=at)
    return next((wait for wait in waits if wait.on), waits[0] if waits else Wait(at=at))


def _is_in_ring(record: HangRecord) -> bool:
    return any(place.file.endswith(_RING_FILE) and place.function in _RING_FUNCTIONS for place in record.stack)


def _missing(ours: HangRecord, theirs: HangRecord, operation: str) -> int:
    """Number of sends to a peer, or receives from it, that the peer has not started; 0 without its messages."""
    if ours.messages is None or theirs.messages is None:
        return 0
    if operation == "send":
        return ours.messages.sent.get(theirs.rank, 0) - theirs.messages.received.get(ours.rank, 0)
    return ours.messages.received.get(theirs.rank, 0) - theirs.messages.sent.get(ours.rank, 0)


def _accused(reasons: Mapping[int, str], singular: str, plural: str, waits: Mapping[int, Wait]) -> Diagnosis:
    ranks = tuple(sorted(reasons))
    if len(ranks) == 1:
        text = f"rank {ranks[0]} {singular}: {reasons[ranks[0]]}"
    else:
        listing = ", ".join(f"rank {rank}: {reasons[rank]}" for rank in ranks[:_MOST_NAMED])
        text = f"{named(ranks)} {plural} ({listing})"
    return _with_waits(text, ranks, waits)


def _skipped_message(records: Mapping[int, HangRecord], waits: Mapping[int, Wait]) -> Diagnosis | None:
    """The verdict about a rank that has ended its schedule without starting a message for which another rank waits."""
    for rank, wait in waits.items():
        messages = records[rank].messages
        if messages is None or messages.waiting is None or not wait.on:
            continue
        (peer,) = wait.on
        theirs = records[peer].messages
        if theirs is None or theirs.runs or records[peer].step != records[rank].step:
            continue
        waiting = messages.waiting
        opposite = "recv" if waiting.operation == "send" else "send"
        missing = _missing(records[rank], records[peer], waiting.operation)
        count = f"a {opposite}" if missing == 1 else f"{missing} {opposite}s"
        text = f"rank {peer} (stage {waiting.peer_stage}) skipped {count} ({waiting.what})"
        if peer in waits and waits[peer].text:
            text += f" and waits in {waits[peer].text}" + (f" at {waits[peer].at}" if waits[peer].at else "")
        return _with_waits(text, (peer,), waits)
    return None


def _waiting(records: Mapping[int, HangRecord], waits: Mapping[int, Wait], *, is_whole: bool) -> Diagnosis:
    """The verdict if every rank with a record waits."""
    awaited = {peer for wait in waits.values() for peer in wait.on}
    blocked = [rank for rank, wait in waits.items() if wait.on]
    # If every rank waits for another, the graph of waits has a cycle.
    deviating = {
        rank: deviation
        for rank in blocked
        if (call := waits[rank].call) is not None and (deviation := deviation_of(records[rank], call)) is not None
    }
    if deviating and len(deviating) < len(blocked):
        ranks = tuple(sorted(deviating))
        deviation, wait = deviating[ranks[0]], waits[ranks[0]]
        verb = "skipped" if deviation.is_skip else "has not called"
        text = f"{named(ranks)} {verb} {_with_sizes(deviation.expected)} and waits in {wait.text}"
        return _with_waits(text + (f" at {wait.at}" if wait.at else ""), ranks, waits)
    ends = sorted(rank for rank in awaited if rank in waits and not waits[rank].on and not waits[rank].text)
    if ends:
        at = f" in {waits[ends[0]].at}" if waits[ends[0]].at else ""
        return _with_waits(f"{_who(ends, 'is', 'are')}{at} and in no collective", tuple(ends), waits)
    whole = {rank: wait for rank, wait in waits.items() if rank in awaited and wait.text and not wait.on}
    if whole:
        texts = ", ".join(dict.fromkeys(wait.text for wait in whole.values()))
        text = f"{_who(whole, 'waits', 'wait')} in {texts}, which all of its ranks have called"
        return replace(_with_waits(text, tuple(whole), waits), ranks=(), pending=texts)
    listing = _listed(waits, with_peers=True)
    if blocked:
        text = f"ranks wait for each other: {listing}; the records do not show which of them is wrong"
        return Diagnosis(verdict=text, pending=waits[blocked[0]].text or None, waits=waits)
    who = f"all {len(waits)} ranks wait, and no rank is behind" if is_whole and waits else "ranks wait"
    pending = next((wait.text for wait in waits.values() if wait.text), None)
    return Diagnosis(verdict=f"{who}: {listing}; the records do not show for whom", pending=pending, waits=waits)


def _with_waits(text: str, ranks: tuple[int, ...], waits: Mapping[int, Wait]) -> Diagnosis:
    """The verdict, followed by the places where other ranks wait; first the ranks that wait for the accused ones."""
    others = {rank: wait for rank, wait in waits.items() if rank not in ranks}
    direct = {rank: wait for rank, wait in others.items() if wait.on & set(ranks)} or others
    pending = next((wait.text for wait in direct.values() if wait.text), None)
    verdict = f"{text}; {_listed(others)}" if others else text
    return Diagnosis(verdict=verdict, ranks=ranks, pending=pending, waits=waits)


def _listed(waits: Mapping[int, Wait], *, with_peers: bool = False) -> str:
    """The places where ranks wait; ranks at the same place together."""
    places: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for rank, wait in waits.items():
        singular, plural = ("waits", "wait") if wait.instead is None else _VERBS[wait.instead]
        text = f" in {wait.text}" if wait.text else ""
        if wait.at:
            text += f" at {wait.at}" if wait.instead is None else f" in {wait.at}"
        text += f" for {named(wait.on)}" if with_peers and wait.on else ""
        places[singular, plural, text].append(rank)
    listed = [f"{_who(ranks, singular, plural)}{text}" for (singular, plural, text), ranks in places.items()]
    more = f", and {len(listed) - _MOST_NAMED} more places" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more


def named(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 2`, `ranks 0, 1, … and 55 more`."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(map(str, numbers[:_MOST_NAMED]))
    return f"ranks {shown}" + (f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else "")


def _who(ranks: Collection[int], singular: str, plural: str) -> str:
    """`rank 1 waits`, `ranks 0, 2 wait`."""
    return f"{named(ranks)} {singular if len(ranks) == 1 else plural}"


def _is_at(rank: int, record: HangRecord) -> str:
    return f"; rank {rank} is at {record.source}" if record.source is not None else ""


def described(record: HangRecord, call: Collective) -> str:
    """`all_reduce (shard, sequence number 41)`."""
    return f"{call.operation} ({_axis(record, call.group)}, sequence number {call.sequence})"


def _with_sizes(call: Collective) -> str:
    sizes = ", ".join(str(list(size)) for size in call.sizes[:2])
    return f"{call.operation} of {sizes}" if sizes else call.operation


_HEADINGS = {"rank": "rank", "state": "state", "phase": "phase", "last": "last collective", "waits_for": "waits for"}
_STACK_LINES = 8


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
            **dict.fromkeys(("phase", "step", "last", "is_done", "sequence")),
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
                row |= {"last": described(record, last), "is_done": last.is_done, "sequence": last.sequence}
            if record.messages is not None and record.messages.waiting is not None and wait.text:
                row |= {"last": wait.text, "is_done": False}
        rows.append(row)
    return rows


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table, and below it the place of every rank; ranks at the same place share one line."""
    table = [list(_HEADINGS.values())]
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in rows:
        cells = {key: "" if row[key] is None else str(row[key]) for key in _HEADINGS}
        if row["last"] is not None:
            cells["last"] += ": done" if row["is_done"] else ": pending"
        cells["waits_for"] = ", ".join(map(str, row["waits_for"]))
        table.append(list(cells.values()))
        places[tuple(row["stack"][:_STACK_LINES])].append(row["rank"])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
    for stack, ranks in places.items():
        if stack:
            lines += ["", f"{named(ranks)}, innermost call first:", *(f"  {place}" for place in stack)]
    return lines
