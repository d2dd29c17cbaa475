"""Frozen parameters: no gradient, no state, no move; and every layout trains the others as one process does."""

import dataclasses
import math

import pytest
import torch

from tests import tiny
from tests.prove.parity_rows import SCHEDULES
from titanlab.checkpoint import checkpoints_of, read_contents
from titanlab.cli.compose import compose_one
from titanlab.costs import meter, training_flops_per_token
from titanlab.errors import ConfigError
from titanlab.plan import for_planning, machine_of, share_of
from titanlab.plan.memory import memory, saved_bytes
from titanlab.plan.step_time import step_time
from titanlab.prove import tolerances, trace
from titanlab.prove.parity import compare
from titanlab.recipe import from_mapping, read_flags, to_mapping
from titanlab.records import identify
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing
from titanlab.techniques.model.llama_schema import Qwen3Moe
from titanlab.techniques.optimizer.contract import Schedule
from titanlab.techniques.optimizer.optimizers_schema import AdamW8bit, Muon
from titanlab.techniques.precision.cast_schema import Bf16, Fp16
from titanlab.techniques.precision.float8_schema import Float8Tensorwise

COMMON = {"layers": 4, "steps": 4, "global_batch": 8, "seq_len": 32, "eps": 1e-6, "at_end": False}
# The beginning of the model; and parts of blocks, of which every stage of a pipeline keeps some to train.
BEGIN = ("tok_embeddings", "layers.0", "layers.1.attention", "layers.2.feed_forward.w1")
PARTS = ("tok_embeddings", "attention.w[qk]", "layers.0.*norm", "layers.2.feed_forward.w2", "layers.3.attention.wo")
MIXTURE = Qwen3Moe(
    dim=64, layers=4, heads=4, kv_heads=2, vocab_size=256, head_dim=32, ffn_dim=32, experts=8, active_experts=2
)
PIPELINE = {"pipeline": 2, "microbatch": 1}
ROWS = [
    (PARTS, {**PIPELINE, "shard": 2, "schedule": "zbv"}),
    (BEGIN, {"shard": 2, "microbatch": 2}),
    (BEGIN, {"replicate": 2}),
    (BEGIN, {"replicate": 2, "microbatch": 1}),
    (BEGIN, {"replicate": 2, "shard": 2, "max_grad_norm": 0.3}),
    (BEGIN, {"shard": 2, "microbatch": 1, "reduce_gradients": "each"}),
    (BEGIN, {"shard": 2, "reshard_after_forward": "never"}),
    (BEGIN, {"shard": 2, "cpu_offload": True}),
    (BEGIN, {"tensor": 2}),
    (BEGIN, {"tensor": 2, "sequence_parallel": False}),
    (PARTS, {"tensor": 2, "shard": 2, "loss_chunk": 16}),
    (BEGIN, {"context": 2}),
    (BEGIN, {"context": 2, "context_method": "all_gather"}),
    (BEGIN, {"shard": 2, "ac": FullCheckpointing()}),
    (BEGIN, {"shard": 2, "tensor": 2, "blocks": True, "loss": True, "backend": "aot_eager"}),
    (BEGIN, {"shard": 2, "blocks": True, "loss": True, "backend": "inductor"}),
    (BEGIN, {"shard": 2, "blocks": True, "backend": "aot_eager", "ac": FullCheckpointing()}),
    (PARTS, PIPELINE),
    *((PARTS, {**PIPELINE, "schedule": schedule}) for schedule in SCHEDULES if schedule != "csv"),
    (PARTS, {**PIPELINE, "schedule": "zbv", "loss_chunk": 16}),
    (PARTS, {**PIPELINE, "schedule": "zbv", "fused": True}),
    (PARTS, {**PIPELINE, "schedule": "zbv", "blocks": True, "backend": "aot_eager"}),
    (BEGIN, {**PIPELINE, "schedule": "1f1b", "split": (3, 1)}),
    (PARTS, {**PIPELINE, "shard": 2, "context": 2, "tensor": 2}),
    (("output", "layers.3"), {"shard": 2, "tensor": 2}),
    (("layers", "tok_embeddings"), {"shard": 2, "tensor": 2, "microbatch": 2}),
    (("experts", "tok_embeddings"), {"shard": 2, "expert": 2, "model": MIXTURE}),
    (("router", "layers.0", "tok_embeddings"), {"shard": 2, "tensor": 2, "expert": 2, "model": MIXTURE}),
]


def common(given):
    return {name: value for name, value in COMMON.items() if name != "layers" or "model" not in given}


def keys_of(given):
    keys = {**common(given), **given}
    if "schedule" in keys:
        name = keys.pop("schedule")
        keys |= {"pipeline_schedule": SCHEDULES[name]} if name in SCHEDULES else {}
    return keys


def alone(freeze, given):
    """The keys of one process that trains the same."""
    kept = ("model", "max_grad_norm", "fused", "optimizer", "precision")
    return {**common(given), "freeze": freeze, **{name: given[name] for name in kept if name in given}}


def held(names, freeze, made):
    """The frozen ones of some names."""
    account = dataclasses.replace(made, training=dataclasses.replace(made.training, freeze=freeze)).account
    assert account.frozen
    return account.frozen & set(names)


@pytest.mark.parametrize(
    ("freeze", "given"),
    [
        pytest.param(freeze, given, marks=pytest.mark.full if place else [], id=f"{place}")
        for place, (freeze, given) in enumerate(ROWS)
    ],
)
def test_a_layout_trains_the_rest_as_one_process(traces, tmp_path, freeze, given):
    found, reference = traces(freeze=freeze, **keys_of(given)), traces(**alone(freeze, given))
    difference = compare(reference, found)
    assert difference.largest <= tolerances.FP32, difference
    frozen = held(found.parameters, freeze, tiny.recipe(tmp_path, **alone((), given)))
    check_frozen(found, reference, traces(**alone((), given)), frozen)


def check_frozen(found, reference, trained, frozen):
    """Check that only the frozen parameters have no gradient, and are those of the start."""
    assert found.gradients.keys() == trained.gradients.keys() - frozen
    for name in frozen:
        assert torch.equal(found.parameters[name], reference.parameters[name]), name
        assert not torch.equal(found.parameters[name], trained.parameters[name]), name


@pytest.mark.full
@pytest.mark.parametrize("precision", [Bf16(), Fp16(), Float8Tensorwise(emulate="true")], ids=lambda each: each.kind)
def test_fewer_bits_round_as_far_in_two_processes_as_in_one(traces, tmp_path, precision):
    given = {"precision": precision}
    found, reference = traces(freeze=BEGIN, **keys_of({"shard": 2, **given})), traces(**alone(BEGIN, given))
    rounding, difference = compare(traces(**alone(BEGIN, {})), reference), compare(reference, found)
    assert difference.gradient[0] <= tolerances.ROUNDINGS * rounding.gradient[0], (difference, rounding)
    assert difference.parameter[0] <= tolerances.ROUNDINGS * rounding.parameter[0], (difference, rounding)
    check_frozen(
        found, reference, traces(**alone((), given)), held(found.parameters, BEGIN, tiny.recipe(tmp_path, layers=4))
    )


SCHEDULE = Schedule(warmup_steps=2)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [Muon(schedule=SCHEDULE), AdamW8bit(schedule=SCHEDULE, block_size=16)])
@pytest.mark.parametrize("layout", [{"shard": 2}, {"shard": 2, "tensor": 2}, PIPELINE], ids=str)
def test_every_optimizer_leaves_out_the_frozen(traces, optimizer, layout):
    optimizer = dataclasses.replace(optimizer, eps=1e-6, lr=1e-3)
    keys = {name: value for name, value in COMMON.items() if name != "eps"}
    keys |= {"freeze": PARTS, "optimizer": optimizer}
    difference = compare(traces(**keys), traces(**keys, **layout))
    for name in ("loss", "grad_norm"):
        assert getattr(difference, name) <= optimizer.tolerances[name], difference
    assert difference.parameter[0] <= optimizer.tolerances["parameter"], difference


@pytest.mark.parametrize(
    ("freeze", "given", "line"),
    [
        (["layers.9"], {}, r"=layers\.9: names no parameter of the model; try layers\."),
        (["nothing"], {}, r"=nothing: names no parameter of the model; give steps of a path such as layers\."),
        (
            ["layers", "norm", "output", "tok_embeddings"],
            {},
            r": names all parameters of the model; leave some of them out",
        ),
        (
            ["tok_embeddings", "layers.[01]"],
            {"pipeline": 2, "layers": 4},
            r"stage 0 of the pipeline: tok_embeddings to l",
        ),
    ],
)
def test_what_cannot_be_frozen_is_one_line(tmp_path, freeze, given, line):
    with pytest.raises(ConfigError, match=rf"^training\.freeze.*{line}"):
        tiny.recipe(tmp_path, freeze=freeze, **given)


def test_a_recipe_from_before_has_the_same_identity(tmp_path):
    made = tiny.recipe(tmp_path)
    before = to_mapping(made)
    for group, key in (("training", "freeze"), ("parallelism", "gathered_blocks"), ("parallelism", "prefetch")):
        del before[group][key]
    assert from_mapping(before) == made
    hashes = {
        identify(recipe, data="tiny", hardware="cpu", repeat=0).sha256
        for recipe in (made, from_mapping(before), tiny.changed(made, freeze=("output",)))
    }
    assert len(hashes) == 2


def test_the_planner_knows_what_is_not_trained(tmp_path):
    """Gradients and states of the trained parameters, activations from the first of them on, and their FLOPs."""
    given = {"layers": 4, "microbatch": 1}
    whole, some = (tiny.recipe(tmp_path, **given, freeze=freeze) for freeze in ((), ("tok_embeddings", "layers.[01]")))
    account = some.account
    share = 1 - sum(map(math.prod, (account.parameters[name] for name in account.frozen))) / account.parameter_count
    (before,), (after,) = memory(whole), memory(some)
    assert after.items["parameters"] == before.items["parameters"]
    assert after.items["gradients"] / before.items["gradients"] == pytest.approx(share)
    assert after.items["optimizer"] / before.items["optimizer"] == pytest.approx(share, rel=1e-4)
    # Two of four blocks keep nothing.
    of_blocks = saved_bytes(whole.ac, whole.model, share_of(whole), 1, 32)
    assert before.items["activations"] - after.items["activations"] == of_blocks // 2
    of_block = sum(math.prod(shape) for name, shape in account.parameters.items() if name.startswith("layers.0."))
    fewer = training_flops_per_token(whole.account, seq_len=32) - training_flops_per_token(some.account, seq_len=32)
    assert fewer == 2 * (4 * of_block + 8 * account.heads * account.head_dim * 32)
    # A frozen layer behind a trained one has no gradient of its weight, and hands on that of its input.
    behind = tiny.recipe(tmp_path, layers=4, freeze=("layers.2",)).account
    assert training_flops_per_token(whole.account, seq_len=32) - 2 * of_block == training_flops_per_token(
        behind, seq_len=32
    )


def test_a_step_takes_less_time_by_the_flops_that_it_lacks():
    times = []
    for freeze in ("[]", "[tok_embeddings,layers.?,layers.1?]", "[attention]"):
        given = ("+recipe=llama3_1_8b_8gpus", "cluster=h100", f"training.freeze={freeze}")
        recipe = for_planning(compose_one(read_flags(given))[1], stands=True)
        times.append(step_time(recipe, machine_of(recipe)))
    whole, upper, others = times
    assert upper.seconds < 0.65 * whole.seconds
    assert upper.mfu == pytest.approx(whole.mfu, abs=0.02)
    assert 0.85 * whole.seconds < others.seconds < 0.97 * whole.seconds


@pytest.mark.full
@pytest.mark.parametrize(
    "given",
    [
        {"shard": 2, "microbatch": 2},
        {"shard": 2, "tensor": 2},
        {"context": 2, "ac": FullCheckpointing()},
        {"pipeline": 2, "shard": 2, "microbatch": 1, "global_batch": 8, "split": (3, 1)},
        {
            "pipeline": 2,
            "shard": 2,
            "microbatch": 1,
            "global_batch": 8,
            "split": (3, 1),
            "reshard_after_forward": "always",
        },
        {"shard": 2, "replicate": 2, "precision": Bf16(), "microbatch": 1, "reduce_gradients": "each"},
        {"shard": 2, "gathered_blocks": 2, "prefetch": 2, "microbatch": 2},
        {"shard": 2, "freeze": ("layers", "tok_embeddings")},
    ],
)
def test_what_is_declared_is_traced(tmp_path, given):
    given = {"layers": 4, "freeze": ("tok_embeddings", "layers.0", "layers.1"), **given}
    # The first trained block keeps less than is declared: its input needs no gradient.
    first = next((number for number in range(4) if f"layers.{number}" not in given["freeze"]), None)
    for item in trace(tiny.recipe(tmp_path, **given)).differing:
        assert item.name == f"block {first}: saved bytes", item
        assert 0 < item.traced < item.declared


def test_a_checkpoint_has_no_state_of_the_frozen_and_the_run_resumes(tmp_path):
    freeze = ("tok_embeddings", "layers.0")
    whole = tiny.recipe(tmp_path, name="whole", freeze=freeze, steps=6, every=3)
    run = tiny.begin(whole)
    tiny.as_rank(whole, run)
    checkpoint = checkpoints_of(run) / "step-00000003"
    names = read_contents(checkpoint, "run").names
    assert {f"model.{name}" for name in whole.account.parameters} <= names
    states = {name for name in names if name.startswith("optimizer.state.")}
    assert states
    assert not any(f".{name}." in state for name in whole.account.frozen for state in states)

    resumed = tiny.changed(whole, name="resumed", load_from=str(checkpoint))
    other = tiny.begin(resumed)
    tiny.as_rank(resumed, other)
    assert run.metrics("train")[-1][meter.LOSS] == other.metrics("train")[-1][meter.LOSS]
    # More may be frozen later, but what was frozen has no state to go on with.
    more = tiny.changed(whole, name="more", load_from=str(checkpoint), freeze=(*freeze, "output"))
    assert tiny.as_rank(more, tiny.begin(more)).step == 6
    fewer = tiny.changed(whole, name="fewer", load_from=str(checkpoint), freeze=("layers.0",))
    with pytest.raises(ConfigError, match=r"has no .* of tok_embeddings\.weight, which was frozen there.*init_from="):
        tiny.as_rank(fewer, tiny.begin(fewer))
    started = tiny.changed(whole, name="started", init_from=str(run.path), freeze=("layers.1",))
    assert tiny.as_rank(started, tiny.begin(started)).step == 6
