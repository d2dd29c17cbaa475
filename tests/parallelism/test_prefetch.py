"""`parallelism.prefetch` and `gathered_blocks`: other gathers at other times, and the same bits."""

from unittest import mock

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests import tiny
from tests.prove.parity_rows import SCHEDULES
from titanlab.costs import Coordinate, step_traffic
from titanlab.errors import ConfigError
from titanlab.plan.memory import memory
from titanlab.recipe import step_of
from titanlab.techniques.model.llama_schema import Qwen3Moe

MIXTURE = Qwen3Moe(
    dim=64, layers=4, heads=4, kv_heads=2, vocab_size=256, head_dim=32, ffn_dim=32, experts=8, active_experts=2
)
SIZES = {"layers": 4, "steps": 2, "global_batch": 8, "at_end": False}


def watched(made, run):
    """This rank's trace, and the gathers, forwards and backwards of its blocks in their order: (kind, block)."""
    events = []

    def block_of(parameters):
        path = parameters[0]._param_fqn.split(".")
        return int(path[1]) if path[0] == "layers" else None

    def noting(owner, name, kind, parameters_of):
        original = getattr(owner, name)

        def noted(*positional, **named):
            events.append((kind, block_of(parameters_of(positional[0]))))
            return original(*positional, **named)

        return mock.patch.object(owner, name, noted)

    group = _fsdp_param_group.FSDPParamGroup
    with (
        noting(_fsdp_param_group, "foreach_all_gather", "gather", list),
        noting(group, "pre_forward", "forward", lambda own: own.fsdp_params),
        noting(group, "pre_backward", "backward", lambda own: own.fsdp_params),
    ):
        return tiny.traced(made, run), events


def run_of(pool, tmp_path, **given):
    sizes = {name: value for name, value in SIZES.items() if name != "layers" or "model" not in given}
    made = tiny.recipe(tmp_path, name=f"run{len(list(tmp_path.rglob('config.yaml')))}", **sizes, **given)
    found, events = pool.run(made.world, watched, made, tiny.begin(made))[0]
    return made, found, events


def leads(events, kind):
    """By block in the order of the pass: how many of it and the next blocks have been gathered when it begins."""
    seen, begun, found = set(), {None}, []
    for other, block in events:
        if other == "gather":
            seen.add(block)
        elif other == kind and block is not None:
            found.append(len(seen - begun))
            begun.add(block)
    return found[:4]


def same_bits(one, two):
    assert (one.losses, one.grad_norms) == (two.losses, two.grad_norms)
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, two.parameters[name]), name


@pytest.mark.parametrize(
    ("given", "ahead", "back"),
    [
        # The last block stays gathered between its passes.
        ({}, [0, 0, 0, 0], [0, 1, 1, 1]),
        ({"prefetch": 2, "gathered_blocks": 2}, [2, 2, 2, 1], [0, 1, 2, 1]),
        pytest.param({"prefetch": 1}, [1, 1, 1, 1], [0, 1, 1, 1], marks=pytest.mark.full),
        pytest.param({"prefetch": 2}, [2, 2, 2, 1], [1, 2, 2, 1], marks=pytest.mark.full),
        pytest.param({"prefetch": 9}, [4, 3, 2, 1], [3, 3, 2, 1], marks=pytest.mark.full),
        pytest.param({"gathered_blocks": 9}, [0, 0, 0, 0], [0, 0, 0, 0], marks=pytest.mark.full),
    ],
)
def test_blocks_are_gathered_ahead_and_kept_with_the_same_bits(pool, traces, tmp_path, given, ahead, back):
    made, found, events = run_of(pool, tmp_path, shard=2, microbatch=2, **given)
    same_bits(traces(**SIZES, shard=2, microbatch=2), found)
    begin = next(place for place, (kind, _) in enumerate(events) if kind == "backward")
    assert (leads(events[:begin], "forward"), leads(events[begin:], "backward")) == (ahead, back)
    (declared,) = (row.count for row in step_traffic(step_of(made), Coordinate()) if row.kind == "all_gather")
    assert sum(kind == "gather" for kind, _ in events) == declared * made.training.steps


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        {"replicate": 2, "shard": 2},
        {"shard": 2, "tensor": 2, "blocks": True, "backend": "aot_eager"},
        {"context": 2},
        {"pipeline": 2, "shard": 2, "microbatch": 1},
        {"pipeline": 2, "shard": 2, "microbatch": 1, "pipeline_schedule": SCHEDULES["zbv"]},
        {"shard": 2, "bf16": True, "reduce_gradients": "each", "microbatch": 2},
        {"shard": 2, "expert": 2, "model": MIXTURE},
        {"shard": 2, "cpu_offload": True},
    ],
)
def test_every_layout_has_the_same_bits(pool, tmp_path, layout):
    kept = {"gathered_blocks": 2} if "pipeline" not in layout else {}
    runs = [run_of(pool, tmp_path, **layout, **given)[1] for given in ({}, {"prefetch": 2, **kept})]
    same_bits(*runs)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            {"prefetch": 2},
            r"prefetch=2: is about the gathers of FSDP2, and nothing is sharded; try parallelism\.shard=2",
        ),
        ({"replicate": 2, "gathered_blocks": 2}, r"gathered_blocks=2: is about the gathers of FSDP2"),
        ({"shard": 2, "reshard_after_forward": "never", "gathered_blocks": 2}, r"gathered_blocks=2: .*; try 1, or"),
        ({"shard": 2, "gathered_blocks": 0}, r"gathered_blocks=0: must be at least 1"),
    ],
)
def test_rules(tmp_path, given, line):
    with pytest.raises(ConfigError, match=rf"^parallelism\.{line}"):
        tiny.recipe(tmp_path, **given)


def test_the_planner_knows_what_stays_gathered(tmp_path):
    default, kept, ahead, never = (
        memory(tiny.recipe(tmp_path, layers=8, shard=2, **given))[0].items["gathered parameters"]
        for given in ({}, {"gathered_blocks": 3}, {"prefetch": 3}, {"reshard_after_forward": "never"})
    )
    assert default < kept == ahead < never
