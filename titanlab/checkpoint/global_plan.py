"""The global plan of a save: each part of a tensor is written once, and the parts of a tensor cover it exactly.

DCP's own planner makes the metadata of its own format besides, which titanlab's storage does not use, and copies every
entry twice. A layout of 405B parameters over 512 ranks without a pipeline has 1.4 million entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from titanlab.checkpoint.index.format import ITEM_BYTES

# Name and place of an entry; an entry that is not a tensor has no place.
_Key = tuple[str, tuple[int, ...] | None]
# Offsets and sizes of a part of a tensor.
_Part = tuple[tuple[int, ...], tuple[int, ...]]


def without_duplicates(plans: list[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks; an entry of several ranks is in one plan only, the one that has least to write so far."""
    first: dict[_Key, int] = {}
    several: dict[_Key, list[int]] = {}
    for number, plan in enumerate(plans):
        for item in plan.items:
            key = (item.index.fqn, item.index.offset)
            owner = first.setdefault(key, number)
            if owner != number:
                several.setdefault(key, [owner]).append(number)
    if not several:
        return plans
    owners = _owners(plans, several)
    return [
        replace(
            plan,
            items=[item for item in plan.items if owners.get((item.index.fqn, item.index.offset), number) == number],
        )
        for number, plan in enumerate(plans)
    ]


def _owners(plans: Sequence[SavePlan], several: Mapping[_Key, Sequence[int]]) -> dict[_Key, int]:
    """The plan that keeps each entry of several ranks."""
    owners: dict[_Key, int] = {}
    bytes_of_plan = [0] * len(plans)
    for number, plan in enumerate(plans):
        for item in plan.items:
            key = (item.index.fqn, item.index.offset)
            candidates = several.get(key)
            if candidates is None:
                bytes_of_plan[number] += _bytes_of(item)
            elif key not in owners:
                owner = min(candidates, key=bytes_of_plan.__getitem__)
                owners[key] = owner
                bytes_of_plan[owner] += _bytes_of(item)
    return owners


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    if data is None or data.chunk is None:
        return 1
    return math.prod(data.chunk.sizes) * ITEM_BYTES.get(str(data.properties.dtype).removeprefix("torch."), 1)


def check_coverage(plans: Sequence[SavePlan]) -> None:
    """Check that the parts of every tensor lie in it, do not overlap, and leave nothing out.

    Raises:
        ValueError: they do not, with the name of the tensor.
    """
    parts: dict[str, tuple[tuple[int, ...], list[_Part]]] = {}
    for plan in plans:
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                continue
            shape, known = parts.setdefault(item.index.fqn, (data.size, []))
            if shape != data.size:
                raise ValueError(
                    f"{item.index.fqn} has the shape {list(shape)} on one rank, {list(data.size)} on another"
                )
            known.append((data.chunk.offsets, data.chunk.sizes))
    for name, (shape, known) in parts.items():
        if not covers(shape, known):
            raise ValueError(f"the parts of {name} on {len(plans)} ranks do not cover its shape {list(shape)} exactly")


def covers(shape: Sequence[int], parts: Sequence[_Part]) -> bool:
    """Whether parts of a tensor cover it exactly; parts without elements do not count.

    Args:
        shape: of the tensor.
        parts: offsets and sizes.
    """
    if 0 in shape:
        return all(_lies_in(shape, part) for part in parts)
    if len(shape) == 0:
        return len(parts) == 1
    filled = [part for part in parts if 0 not in part[1]]
    return _is_grid(shape, filled, 0) or _is_partition(shape, filled)


def _is_grid(shape: Sequence[int], parts: Sequence[_Part], dim: int) -> bool:
    """Whether the parts cut each dim into ranges, one dim after the other, as meshes of devices do."""
    if dim == len(shape):
        return len(parts) == 1
    ranges: dict[tuple[int, int], list[_Part]] = {}
    for part in parts:
        ranges.setdefault((part[0][dim], part[1][dim]), []).append(part)
    end = 0
    for start, extent in sorted(ranges):
        if start != end:
            return False
        end += extent
    return end == shape[dim] and all(_is_grid(shape, group, dim + 1) for group in ranges.values())


def _is_partition(shape: Sequence[int], parts: Sequence[_Part]) -> bool:
    """Whether the parts lie in the shape, have its volume, and do not overlap, for any form of cuts."""
    if sum(math.prod(sizes) for _, sizes in parts) != math.prod(shape):
        return False
    active: list[_Part] = []
    for part in sorted(parts, key=itemgetter(0)):
        active = [other for other in active if other[0][0] + other[1][0] > part[0][0]]
        if not _lies_in(shape, part) or any(_overlap(part, other) for other in active):
            return False
        active.append(part)
    return True


def _lies_in(shape: Sequence[int], part: _Part) -> bool:
    return all(start >= 0 and start + size <= whole for start, size, whole in zip(*part, shape, strict=True))


def _overlap(one: _Part, other: _Part) -> bool:
    return all(
        start < start_of_other + size_of_other and start_of_other < start + size
        for start, size, start_of_other, size_of_other in zip(*one, *other, strict=True)
    )
