"""The global plan of a save: duplicates, and parts that do not cover their tensor."""

import random

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from titanlab.checkpoint.writer import check_coverage, covers, without_duplicates


def item(name, shape, offsets, sizes):
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size(shape),
    )
    return WriteItem(index=MetadataIndex(name, torch.Size(offsets)), type=WriteItemType.SHARD, tensor_data=data)


def names(plan):
    return [(each.index.fqn, tuple(each.index.offset)) for each in plan.items]


def grid(shape, cuts):
    """Parts of a tensor that is cut into equal ranges along each dim."""
    parts = [((), ())]
    for size, count in zip(shape, cuts, strict=True):
        step = size // count
        parts = [((*o, i * step), (*s, step)) for o, s in parts for i in range(count)]
    return parts


def test_plans_without_duplicates_stay_as_they_are():
    plans = [SavePlan([item("x", (4,), (rank * 2,), (2,))]) for rank in range(2)]
    assert without_duplicates(plans) is plans


def test_replicas_write_equal_shares():
    # Two replicas of two shards: each part is in two plans.
    parts = [item(f"x{number}", (4, 8), (2 * shard, 0), (2, 8)) for number in range(6) for shard in range(2)]
    plans = [SavePlan([part for part in parts if part.index.offset[0] == 2 * shard]) for shard in (0, 1, 0, 1)]
    found = without_duplicates(plans)
    assert sorted(name for plan in found for name in names(plan)) == sorted(names(SavePlan(parts)))
    assert [len(plan.items) for plan in found] == [3, 3, 3, 3]
    check_coverage(found)


def test_it_finds_what_torchs_planner_finds():
    """On random layouts: the same entries, and every one of them once."""
    chosen = random.Random(0)
    for _ in range(50):
        ranks, cuts = chosen.randint(1, 6), (chosen.choice([1, 2, 4]), chosen.choice([1, 2]))
        parts = [item(f"x{n}", (8, 4), *part) for n in range(3) for part in grid((8, 4), cuts)]
        homes = [chosen.sample(range(ranks), chosen.randint(1, ranks)) for _ in parts]
        plans = [
            SavePlan([part for part, home in zip(parts, homes, strict=True) if rank in home], planner_data={})
            for rank in range(ranks)
        ]
        torchs, _ = DefaultSavePlanner().create_global_plan(plans)
        found = without_duplicates(plans)
        check_coverage(found)
        assert sorted(n for plan in found for n in names(plan)) == sorted(n for plan in torchs for n in names(plan))


@pytest.mark.parametrize(
    ("shape", "parts", "whole"),
    [
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((6,), [((0,), (4,)), ((4,), (2,))], True),
        # A rank without rows.
        ((6,), [((0,), (6,)), ((6,), (0,))], True),
        ((0, 3), [((0, 0), (0, 3))], True),
        ((6,), [((0,), (4,))], False),
        ((6,), [((0,), (4,)), ((3,), (3,))], False),
        ((6,), [((0,), (4,)), ((4,), (3,))], False),
        # Overlap and hole have one volume.
        ((6,), [((0,), (2,)), ((1,), (2,)), ((4,), (2,))], False),
        ((4, 4), grid((4, 4), (2, 4)), True),
        ((4, 4), grid((4, 4), (2, 4))[1:], False),
        ((4, 4), [*grid((4, 4), (2, 2)), ((0, 0), (2, 2))], False),
        # Two columns whose rows are cut at different places.
        ((4, 4), [((0, 0), (1, 2)), ((1, 0), (3, 2)), ((0, 2), (2, 2)), ((2, 2), (2, 2))], True),
        ((4, 4), [((0, 0), (1, 2)), ((1, 0), (3, 2)), ((0, 2), (2, 2)), ((1, 2), (2, 2))], False),
        ((4, 4), [((0, 0), (4, 2)), ((0, 2), (2, 2)), ((3, 2), (2, 2))], False),
    ],
)
def test_parts_cover_a_tensor(shape, parts, whole):
    assert covers(shape, parts) is whole
    random.Random(1).shuffle(parts)
    assert covers(shape, parts) is whole


def test_a_part_that_nobody_writes_is_named():
    plans = [SavePlan([item("layers.3.weight", (4,), (0,), (2,))]), SavePlan([])]
    with pytest.raises(ValueError, match=r"the parts of layers\.3\.weight on 2 ranks do not cover its shape \[4\]"):
        check_coverage(plans)
    plans[1] = SavePlan([item("layers.3.weight", (6,), (2,), (4,))])
    with pytest.raises(ValueError, match=r"has the shape \[4\] on one rank, \[6\] on another"):
        check_coverage(plans)
