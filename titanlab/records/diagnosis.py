"""Finds the rank that made a run hang: pure functions over the records of its ranks.

The evidence, strongest first: a rank that does not answer; a rank that ended early; ranks that call different
collectives; a rank that is outside of every collective. Ranks that wait are compared with their own earlier steps; then
a rank counts that others wait for and that waits for nobody. Where this does not decide, no rank is named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titanlab.records.hang_file import Collective, HangRecord

# Collectives whose inputs have the same size on all ranks.
_EQUAL_SIZES = ("all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")
# So many collectives before a place must be the same as before an earlier place, for the two to be compared.
_FEWEST_EQUAL = 3
# A training repeats its collectives in each step, also where ranks are many: so many ranks are enough to compare.
_MOST_RANKS = 64

GroupKey = tuple[str, tuple[int, ...]]
Signature = tuple[str, str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Deviation:
    """A collective that differs from what the rank called at the same place of earlier steps.

    Attributes:
        called, expected: the collective, and the earlier one.
        is_skip: whether the rank has called what follows the expected one.
    """

    called: Collective
    expected: Collective
    is_skip: bool


@dataclass(frozen=True)
class Mismatch:
    """The first collective of a group that ranks call differently.

    Attributes:
        collectives: by rank, what it called under this sequence number.
        wrong: the ranks whose call is wrong; empty if the records do not show which.
        deviation: of the first wrong rank from its own earlier steps; None: the others are more.
    """

    group: GroupKey
    sequence: int
    collectives: Mapping[int, Collective]
    wrong: tuple[int, ...]
    deviation: Deviation | None


def group_key(record: HangRecord, name: str) -> GroupKey:
    """A group's name and ranks; without ranks if the record does not have the group."""
    return name, record.groups[name].ranks if name in record.groups else ()


def first_mismatch(records: Mapping[int, HangRecord]) -> Mismatch | None:
    """The first difference between the ranks of a group; None if what they called is the same."""
    calls: dict[GroupKey, dict[int, dict[int, Collective]]] = defaultdict(lambda: defaultdict(dict))
    for rank, record in records.items():
        # Looked up once a record: a key may have thousands of ranks.
        own = {name: calls[group_key(record, name)] for name, group in record.groups.items() if group.ranks}
        for call in record.collectives:
            if not call.is_message and call.group in own:
                own[call.group][call.sequence][rank] = call
    mismatches = []
    for key, by_sequence in calls.items():
        for sequence in sorted(by_sequence):
            by_rank = by_sequence[sequence]
            if len({_in_group(call) for call in by_rank.values()}) > 1:
                mismatches.append(_judged(records, key, sequence, by_rank))
                break
    # A difference that shows who is wrong explains the others.
    return min(mismatches, key=lambda mismatch: (not mismatch.wrong, mismatch.group, mismatch.sequence), default=None)


def deviation(record: HangRecord, call: Collective) -> Deviation | None:
    """How a call differs from what the rank called at the same place of earlier steps; None if it does not.

    The same place is the one before which the most collectives are the same.
    """
    calls = [collective for collective in record.collectives if not collective.is_message]
    signatures = [signature(record, collective) for collective in calls]
    index = next((number for number, collective in enumerate(calls) if collective is call), 0)
    earlier, equal = _same_place(signatures, index)
    if earlier is None or equal < _FEWEST_EQUAL or signatures[earlier] == signatures[index]:
        return None
    is_skip = earlier + 1 < index and signatures[earlier + 1] == signatures[index]
    return Deviation(call, calls[earlier], is_skip)


def signature(record: HangRecord, call: Collective) -> Signature:
    """What a call has in common with the same call of other steps: axis, operation and sizes."""
    return _axis(record, call.group), *_in_group(call)


def _axis(record: HangRecord, group: str) -> str:
    return record.groups[group].axis if group in record.groups else f"group {group}"


def _in_group(call: Collective) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """What must be the same on all ranks of a group: operation and sizes, or operation only."""
    is_equal = any(name in call.operation for name in _EQUAL_SIZES)
    return call.operation, call.sizes if is_equal else ()


def _same_place(signatures: Sequence[Signature], index: int) -> tuple[int | None, int]:
    """The earlier place before which the most signatures are those before `index`, and how many those are."""
    best, most = None, 0
    for place in range(index - 1, 0, -1):
        if most >= place:
            break
        equal = 0
        while equal < place and signatures[place - 1 - equal] == signatures[index - 1 - equal]:
            equal += 1
        if equal > most:
            best, most = place, equal
    return best, most


def _judged(
    records: Mapping[int, HangRecord], key: GroupKey, sequence: int, by_rank: Mapping[int, Collective]
) -> Mismatch:
    deviations = {
        rank: difference
        for rank in list(by_rank)[:_MOST_RANKS]
        if (difference := deviation(records[rank], by_rank[rank]))
    }
    wrong: Collection[int] = ()
    if deviations and len(deviations) < len(by_rank):
        wrong = deviations
    elif not deviations:
        ((usual, count), *_) = Counter(map(_in_group, by_rank.values())).most_common()
        if 2 * count > len(by_rank):
            wrong = [rank for rank, call in by_rank.items() if _in_group(call) != usual]
    ranks = tuple(sorted(wrong))
    return Mismatch(key, sequence, by_rank, ranks, deviations.get(ranks[0]) if ranks else None)


_MOST_NAMED = 8
# File and functions in which a rank waits for keys and values of a ring, or posts them: with NCCL a group starts at its
# first message, and that waits for the other ranks.
_RING_FILE, _RING_FUNCTIONS = "titanlab/parallelism/exchanges.py", ("received", "__init__")
# What a rank does that waits for no other rank, for one rank and for several.
_VERBS = {
    "computes": ("computes", "compute"),
    "stands": ("stands", "stand"),
    "data": ("waits for data", "wait for data"),
    "checkpoint": ("is in a checkpoint", "are in a checkpoint"),
}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What a rank waits for, or does instead.

    Attributes:
        text: `all_reduce (shard, sequence number 41)`; empty if it is not known.
        on: the ranks that have not come; empty if all have, or if it is not known.
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
        pending: the collective, send or receive in which the others wait; None if none does.
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
        ended: ranks that ended before, with how they did.
        unread: ranks that have answered, and whose records cannot be read.
    """
    silent, ended = dict(silent or {}), dict(ended or {})
    known = {*records, *silent, *ended, *unread}
    silent |= {rank: "it has left no record" for rank in range(world) if rank not in known}
    absent = {*silent, *ended}
    late = _Late(records, absent)
    waits = {rank: _wait(records, rank, late) for rank in sorted(records)}
    for rank in (*silent, *ended):
        waits.pop(rank, None)
    if ended:
        return _accused(ended, "ended early", "ended early", waits)
    if silent:
        return _accused(silent, "does not answer", "do not answer", waits)
    mismatch = first_mismatch(records)
    if mismatch is not None:
        return _different(mismatch, records, waits)
    apart = [rank for rank in sorted(records) if records[rank].state in ("stands", "computes")]
    if apart:
        awaited = {peer for wait in waits.values() for peer in wait.on}
        ranks = tuple(rank for rank in apart if rank in awaited) or tuple(apart)
        return _with_waits(_listed({rank: waits[rank] for rank in ranks}), ranks, waits)
    return _waiting(records, waits, is_whole=not unread)


def different_calls(records: Mapping[int, HangRecord]) -> Diagnosis | None:
    """The verdict over ranks that call different collectives in a group; None if no group has a difference."""
    mismatch = first_mismatch(records)
    return None if mismatch is None else _different(mismatch, records, {})


def odd_calls(records: Mapping[int, HangRecord], failed: int) -> Diagnosis | None:
    """The verdict over ranks whose last collective, in a group of a rank that failed, is not that of earlier steps."""
    odd: dict[int, Deviation] = {}
    for rank, record in records.items():
        last = next((call for call in reversed(record.collectives) if not call.is_message), None)
        if last is None or failed not in group_key(record, last.group)[1]:
            continue
        difference = deviation(record, last)
        if difference is not None:
            odd[rank] = difference
    if not odd or len(odd) == len(records) > 1:
        return None
    ranks = tuple(sorted(odd))
    first, record = odd[ranks[0]], records[ranks[0]]
    text = (
        f"{_who(ranks, 'calls', 'call')} {_with_sizes(first.called)} where earlier steps called "
        f"{_with_sizes(first.expected)} ({_axis(record, first.called.group)}, sequence number {first.called.sequence})"
    )
    return Diagnosis(verdict=text + _is_at(ranks[0], record), ranks=ranks, pending=described(record, first.called))


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


class _Late:
    """The ranks of a group that have not called a collective."""

    def __init__(self, records: Mapping[int, HangRecord], absent: Collection[int]) -> None:
        self.absent = absent
        # By rank and group, the sequence number of the last collective.
        self._lasts: dict[int, dict[str, int]] = {}
        for rank, record in records.items():
            lasts = self._lasts[rank] = {}
            for call in record.collectives:
                if not call.is_message:
                    lasts[call.group] = max(lasts.get(call.group, 0), call.sequence)
        # Ranks that wait in the same collective have the same answer.
        self._known: dict[tuple[object, ...], frozenset[int]] = {}

    def ranks(self, record: HangRecord, call: Collective) -> frozenset[int]:
        """Those that are absent or behind; of a send or receive those that are absent."""
        _, ranks = group_key(record, call.group)
        key = (call.group, call.sequence, call.is_message, ranks[:2], len(ranks))
        if key not in self._known:
            late = {rank for rank in ranks if rank in self.absent}
            if not call.is_message:
                lasts = self._lasts
                late |= {rank for rank in ranks if rank in lasts and lasts[rank].get(call.group, 0) < call.sequence}
            self._known[key] = frozenset(late)
        return self._known[key]


def _wait(records: Mapping[int, HangRecord], rank: int, late: _Late) -> Wait:
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
        return Wait(text=text, on=frozenset({waiting.peer} if is_late or waiting.peer in late.absent else ()), at=at)
    # Collectives of one group end in their order: only the first pending one of each group holds the rank up.
    firsts: dict[str, Collective] = {}
    # A collective that has raised counts as done; it is the last one.
    failed = record.collectives[-1:] if record.state == "raised" else ()
    for call in (*record.collectives, *failed):
        if not call.is_done or call in failed:
            firsts.setdefault(call.group, call)
    waits = [
        Wait(text=described(record, call), on=late.ranks(record, call), call=call, at=at) for call in firsts.values()
    ]
    if not waits and _is_in_ring(record):
        # The messages of a ring are in no list of collectives.
        ring = next((group.ranks for group in record.groups.values() if group.axis == "context"), ())
        outside = {peer for peer in ring if peer in late.absent or (peer in records and not _is_in_ring(records[peer]))}
        return Wait(text="a receive of the ring (context)", on=frozenset(outside - {rank}), at=at)
    return next((wait for wait in waits if wait.on), waits[0] if waits else Wait(at=at))


def _is_in_ring(record: HangRecord) -> bool:
    return any(place.file.endswith(_RING_FILE) and place.function in _RING_FUNCTIONS for place in record.stack)


def described(record: HangRecord, call: Collective) -> str:
    """`all_reduce (shard, sequence number 41)`."""
    return f"{call.operation} ({_axis(record, call.group)}, sequence number {call.sequence})"


def _missing(ours: HangRecord, theirs: HangRecord, operation: str) -> int:
    """How many of our sends to a peer, or receives from it, the peer has not started; 0 without its messages."""
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


def _different(mismatch: Mismatch, records: Mapping[int, HangRecord], waits: Mapping[int, Wait]) -> Diagnosis:
    calls, wrong = mismatch.collectives, mismatch.wrong
    first = next(iter(calls))
    place = f"{records[first].groups[mismatch.group[0]].axis}, sequence number {mismatch.sequence}"
    if not wrong:
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, call in calls.items():
            ranks_of[_with_sizes(call)].append(rank)
        listing = ", ".join(f"{named(ranks)} {text}" for text, ranks in ranks_of.items())
        text = f"ranks call different collectives ({place}): {listing}; the records do not show which of them is wrong"
        return Diagnosis(verdict=text, pending=described(records[first], calls[first]), waits=waits)
    others = [rank for rank in calls if rank not in wrong]
    right = others[0] if others else first
    called, usual = _with_sizes(calls[wrong[0]]), _with_sizes(calls[right])
    if mismatch.deviation is not None and mismatch.deviation.is_skip:
        text = f"{named(wrong)} skipped {_with_sizes(mismatch.deviation.expected)} and called {called}, where "
        text += f"{_who(others, 'waits', 'wait')} in {usual} ({place})"
    else:
        text = f"{_who(wrong, 'calls', 'call')} {called} where {_who(others, 'calls', 'call')} {usual} ({place})"
    return Diagnosis(
        verdict=text + _is_at(wrong[0], records[wrong[0]]),
        ranks=wrong,
        pending=described(records[right], calls[right]),
        waits=waits,
    )


def _with_sizes(call: Collective) -> str:
    sizes = ", ".join(str(list(size)) for size in call.sizes[:2])
    return f"{call.operation} of {sizes}" if sizes else call.operation


def _waiting(records: Mapping[int, HangRecord], waits: Mapping[int, Wait], *, is_whole: bool) -> Diagnosis:
    """The verdict where every rank with a record waits."""
    skipped = _skipped_message(records, waits)
    if skipped is not None:
        return skipped
    # Where everyone waits for someone, the graph of waits has a cycle.
    awaited = {peer for wait in waits.values() for peer in wait.on}
    deviating = {
        rank: difference
        for rank, wait in waits.items()
        if wait.on and wait.call is not None and (difference := deviation(records[rank], wait.call)) is not None
    }
    blocked = [rank for rank, wait in waits.items() if wait.on]
    if deviating and len(deviating) < len(blocked):
        ranks = tuple(sorted(deviating))
        difference = deviating[ranks[0]]
        verb = "skipped" if difference.is_skip else "has not called"
        text = f"{named(ranks)} {verb} {_with_sizes(difference.expected)} and waits in {waits[ranks[0]].text}"
        at = waits[ranks[0]].at
        return _with_waits(text + (f" at {at}" if at else ""), ranks, waits)
    ends = sorted(rank for rank in awaited if rank in waits and not waits[rank].on and not waits[rank].text)
    if ends:
        at = f" in {waits[ends[0]].at}" if waits[ends[0]].at else ""
        return _with_waits(f"{_who(ends, 'is', 'are')}{at} and in no collective", tuple(ends), waits)
    listing = _listed(waits, with_peers=True)
    whole = {rank: wait for rank, wait in waits.items() if rank in awaited and wait.text and not wait.on}
    if whole:
        texts = ", ".join(dict.fromkeys(wait.text for wait in whole.values()))
        text = f"{_who(whole, 'waits', 'wait')} in {texts}, which all of its ranks have called"
        return replace(_with_waits(text, tuple(whole), waits), ranks=(), pending=texts)
    if blocked:
        text = f"ranks wait for each other: {listing}; the records do not show which of them is wrong"
        return Diagnosis(verdict=text, pending=waits[blocked[0]].text or None, waits=waits)
    text = (
        f"all {len(waits)} ranks wait, and no rank is behind: {listing}"
        if is_whole and waits
        else f"ranks wait: {listing}"
    )
    pending = next((wait.text for wait in waits.values() if wait.text), None)
    return Diagnosis(verdict=f"{text}; the records do not show for whom", pending=pending, waits=waits)


def _skipped_message(records: Mapping[int, HangRecord], waits: Mapping[int, Wait]) -> Diagnosis | None:
    """The verdict about a rank that has ended its schedule, and has not started a message that another waits for."""
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


def _with_waits(text: str, ranks: tuple[int, ...], waits: Mapping[int, Wait]) -> Diagnosis:
    """The verdict, followed by where the other ranks wait; first those that wait for the accused ones."""
    others = {rank: wait for rank, wait in waits.items() if rank not in ranks}
    direct = {rank: wait for rank, wait in others.items() if wait.on & set(ranks)} or others
    pending = next((wait.text for wait in direct.values() if wait.text), None)
    return Diagnosis(
        verdict=f"{text}; {_listed(others)}" if others else text, ranks=ranks, pending=pending, waits=waits
    )


def _listed(waits: Mapping[int, Wait], *, with_peers: bool = False) -> str:
    """Where ranks wait, ranks with the same place together."""
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


_HEADINGS = {"rank": "rank", "state": "state", "phase": "phase", "last": "last collective", "waits_for": "waits for"}
_STACK_LINES = 8


def rank_rows(
    diagnosis: Diagnosis, records: Mapping[int, HangRecord], others: Mapping[int, str], *, world: int
) -> list[dict[str, Any]]:
    """One row for each rank: `rank`, `state`, `phase`, `last`, `is_done`, `sequence`, `waits_for`, `place`, `stack`.

    Args:
        others: what is known of ranks without a record.
        world: number of ranks; 0: unknown.
    """
    rows: list[dict[str, Any]] = []
    for rank in sorted({*range(world), *records, *others, *diagnosis.ranks}):
        row: dict[str, Any] = {"rank": rank, "is_named": rank in diagnosis.ranks}
        rows.append(row)
        record = records.get(rank)
        if record is None:
            row |= dict.fromkeys(("phase", "step", "last", "is_done", "sequence", "place"))
            row |= {"state": others.get(rank, "no record"), "waits_for": [], "stack": []}
            continue
        wait = diagnosis.waits.get(rank)
        last = record.collectives[-1] if record.collectives else None
        text, is_done = (None, None) if last is None else (described(record, last), last.is_done)
        if record.messages is not None and record.messages.waiting is not None and wait is not None:
            text, is_done = wait.text, False
        row |= {
            "state": f"{record.state} ({record.activity})" if record.activity else record.state,
            "phase": record.phase,
            "step": record.step,
            "last": text,
            "is_done": is_done,
            "sequence": None if last is None else last.sequence,
            "waits_for": [] if wait is None else sorted(wait.on),
            "place": None if record.source is None else str(record.source),
            "stack": [str(place) for place in record.stack],
        }
    return rows


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table, and below it the place of every rank; ranks that are at the same place have one line."""
    texts = []
    for row in rows:
        cells = {key: "" if row[key] is None else str(row[key]) for key in _HEADINGS}
        if row["last"] is not None and row["is_done"] is not None:
            cells["last"] += ": done" if row["is_done"] else ": pending"
        cells["waits_for"] = ", ".join(map(str, row["waits_for"]))
        texts.append(list(cells.values()))
    widths = [max(map(len, column)) for column in zip(_HEADINGS.values(), *texts, strict=True)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in (list(_HEADINGS.values()), *texts)
    ]
    places: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        if row["stack"]:
            places.setdefault(tuple(row["stack"][:_STACK_LINES]), []).append(row["rank"])
    for stack, ranks in places.items():
        lines += ["", f"{named(ranks)}, innermost call first:", *(f"  {place}" for place in stack)]
    return lines
