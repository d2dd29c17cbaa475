"""Initial values depend on seed, name and position, and on nothing else."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from titanlab.costs import Init
from titanlab.train import initialise as module
from titanlab.train.initialise import initialise, key

NORMAL = Init(kind="normal", std=0.02)


def values(*shape, name="weight", seed=0, init=NORMAL):
    holder = nn.Module()
    holder.register_parameter(name, nn.Parameter(torch.full(shape, math.nan)))
    initialise(holder, {name: init}, seed)
    return holder.get_parameter(name).detach()


def by_hand(seed, name, index, std):
    """One value in Python's own numbers: SplitMix64, then the truncated normal's quantile."""
    word = (1 << 64) - 1
    z = (key(seed, name) + (index + 1) * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    z ^= z >> 31
    signed = z - (1 << 64) if z >> 63 else z
    uniform = ((signed >> 40) + 0.5) / (1 << 24) + 0.5
    normal = statistics.NormalDist()
    low, high = normal.cdf(-3), normal.cdf(3)
    return std * normal.inv_cdf(low + uniform * (high - low))


@given(
    seed=st.integers(-(2**70), 2**70), rows=st.integers(1, 9), columns=st.integers(1, 9), name=st.sampled_from("abc")
)
def test_against_python(seed, rows, columns, name):
    expected = [by_hand(seed, name, index, 0.5) for index in range(rows * columns)]
    actual = values(rows, columns, seed=seed, name=name, init=Init(kind="normal", std=0.5))
    # The argument of erfinv is rounded to fp32, by up to 6e-8; where the normal is cut its quantile is 113 times as steep.
    assert actual.flatten().tolist() == pytest.approx(expected, abs=0.5 * 113 * 6e-8)


def test_values_are_frozen():
    """A change here is a change of every training: it needs a new decision and an entry in the changelog."""
    before = torch.get_rng_state()
    assert key(0, "weight") == 16219054065691497842
    # To the last bit or two, in which one kind of device may differ from another.
    assert values(4).tolist() == pytest.approx([0.0144878561, -0.0345719568, 0.0116444351, -0.0230298135], rel=3e-7)
    assert torch.equal(torch.get_rng_state(), before)


def correlation(a, b):
    return torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1].abs().item()


def test_neighbours_are_independent():
    side = 512
    bound = 4.5 / side  # 4.5 standard deviations of a correlation of side² pairs
    plain = values(side, side)
    for lag in (1, 2, 3, 4, 8, 16, side - 1, side, side + 1, 2 * side):
        assert correlation(plain.flatten()[:-lag], plain.flatten()[lag:]) < bound, lag
        assert correlation(plain.flatten()[:-lag].square(), plain.flatten()[lag:].square()) < bound, lag
    others = {
        "next seed": values(side, side, seed=1),
        "far seed": values(side, side, seed=1 << 32),
        "negative seed": values(side, side, seed=-1),
        "next name": values(side, side, name="weight1"),
        "transposed": plain.T,
    }
    for (a, first), (b, second) in itertools.combinations({"plain": plain, **others}.items(), 2):
        assert correlation(first, second) < bound, (a, b)


@given(shape=st.lists(st.integers(1, 12), min_size=0, max_size=4), chunk=st.integers(1, 200))
def test_chunks_do_not_show(shape, chunk):
    whole = values(*shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_CPU", chunk)
        assert torch.equal(values(*shape), whole)


def test_memory_order_and_dtype_do_not_show():
    whole = values(6, 10)
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(10, 6).T)
    initialise(holder, {"weight": NORMAL}, 0)
    assert torch.equal(holder.weight, whole)
    holder.weight = nn.Parameter(torch.empty(6, 10, dtype=torch.bfloat16))
    initialise(holder, {"weight": NORMAL}, 0)
    assert torch.equal(holder.weight, whole.bfloat16())


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returned, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        # Views of the parameter itself take no memory.
        if isinstance(output, torch.Tensor) and not output.dtype.is_floating_point:
            self.elements = max(self.elements, output.numel())
        return output


@pytest.mark.parametrize("shape", [(300_000,), (600, 500), (2, 150_000), (2, 300, 500)])
def test_memory_is_bounded(shape):
    holder = nn.Module()
    holder.weight = nn.Parameter(torch.empty(shape))
    with Largest() as largest:
        initialise(holder, {"weight": NORMAL}, 0)
    # Indices of the longest dim, or a chunk.
    assert largest.elements <= max(module._CHUNK_CPU, *shape)


def test_wrappers_do_not_change_names():
    holder = nn.Sequential(nn.Linear(4, 4, bias=False))
    declared = {"0.weight": NORMAL}
    initialise(holder, declared, 0)
    expected = holder[0].weight.detach().clone()
    wrapped = nn.Module()
    inner = nn.Module()
    inner.add_module("_checkpoint_wrapped_module", nn.Linear(4, 4, bias=False))
    wrapped.add_module("0", nn.Module())
    wrapped.get_submodule("0").add_module("_orig_mod", inner)
    initialise(wrapped, declared, 0)
    assert torch.equal(next(wrapped.parameters()), expected)


def test_tied_weights_are_filled_once_under_the_first_name():
    holder = nn.Module()
    holder.first, holder.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    alone = nn.Module()
    alone.first = nn.Linear(4, 4, bias=False)
    initialise(alone, {"first.weight": NORMAL}, 0)
    holder.second.weight = holder.first.weight
    initialise(holder, {"first.weight": NORMAL}, 0)
    assert holder.second.weight is holder.first.weight
    assert torch.equal(holder.first.weight, alone.first.weight)


def test_ones_and_zeros_and_what_is_refused():
    assert torch.equal(values(3, init=Init(kind="ones")), torch.ones(3))
    assert torch.equal(values(3, init=Init(kind="zeros")), torch.zeros(3))
    assert torch.equal(values(3, init=Init(kind="normal")), torch.zeros(3))
    holder = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match="no initial value is declared for weight"):
        initialise(holder, {"bias": NORMAL}, 0)
    with pytest.raises(ValueError, match="weight is on meta"):
        initialise(holder.to("meta"), {"weight": NORMAL}, 0)


SHAPES = [(8, 6), (7, 8), (3, 4), (1, 4), (5,), (16,), (9, 4, 3), (17, 3)]


def spread_and_compare(world):
    """Places where a shard's values differ from those at the same positions of the whole tensor: none.

    What a rank holds is learned from torch itself: the same layout, of a tensor of flat indices.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    line = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor")) if world % 2 == 0 else None

    def layouts(shape):
        """Functions from a whole tensor to a module that holds this rank's part."""

        def placed(mesh, *placements):
            return lambda whole: holding(distribute_tensor(whole, mesh, placements))

        def fsdp(mesh, *, dim=0, tensor_dim=None):
            def spread(whole):
                if tensor_dim is not None:
                    whole = distribute_tensor(whole, grid["tensor"], [Shard(tensor_dim)])
                held = holding(whole)
                fully_shard(held, mesh=mesh, shard_placement_fn=lambda _: Shard(dim))
                return held

            return spread

        yield "replicate", placed(line, Replicate())
        yield "fsdp", fsdp(line)
        yield from ((f"shard {dim}", placed(line, Shard(dim))) for dim in range(len(shape)))
        if grid is not None:
            yield "hsdp", fsdp(grid)
            yield from ((f"fsdp and tensor {dim}", fsdp(grid["data"], tensor_dim=dim)) for dim in range(len(shape[:2])))
            yield "both on dim 0", placed(grid, Shard(0), Shard(0))
            if len(shape) > 1:
                yield "crossed", placed(grid, Shard(1), Shard(0))
            if len(shape) > 1 and shape[1] % 4 == 0:  # FSDP cuts other dims evenly or not at all
                yield "fsdp on dim 1 and tensor 0", fsdp(grid["data"], dim=1, tensor_dim=0)
                yield "fsdp on dim 1 and tensor 1", fsdp(grid["data"], dim=1, tensor_dim=1)

    def holding(tensor):
        held = nn.Module()
        held.weight = nn.Parameter(tensor)
        return held

    wrong, empty = [], 0
    for shape in SHAPES:
        expected = values(*shape).flatten()
        for name, spread in layouts(shape):
            held = spread(torch.arange(math.prod(shape), dtype=torch.float32).view(shape))
            local = held.weight.to_local()
            indices = local.long()
            empty += indices.numel() == 0
            initialise(held, {"weight": NORMAL}, 0)
            if not torch.equal(held.weight.to_local(), expected[indices]):
                wrong.append((shape, name))
    assert not wrong, wrong
    partial = holding(DTensor.from_local(torch.ones(4), line, [Partial()]))
    with pytest.raises(ValueError, match="partial"):
        initialise(partial, {"weight": NORMAL}, 0)
    return empty


@pytest.mark.parametrize("world", [4, 3])
def test_no_layout_shows(pool, world):
    empty = pool.run(world, spread_and_compare, world)
    # Uneven shapes leave some ranks with nothing, and that was met.
    assert sum(empty) > 0
