"""Ranks that call other collectives than the rest of their group, or than in their own earlier steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

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
    group = record.groups.get(name)
    return name, group.ranks if group is not None else ()


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
    group = record.groups.get(call.group)
    return group.axis if group is not None else call.group, call.operation, _sizes(call)


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


def _in_group(call: Collective) -> tuple[str, tuple[tuple[int, ...], ...]]:
    return call.operation, _sizes(call)


def _sizes(call: Collective) -> tuple[tuple[int, ...], ...]:
    """The sizes if they must be the same on all ranks, else nothing."""
    return call.sizes if any(name in call.operation for name in _EQUAL_SIZES) else ()
