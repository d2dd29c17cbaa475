"""The time of a step and of its pieces: sums by hand, monotony, the bytes of the formulas, and honest caches."""

import dataclasses
import math

import pytest

from tests.plan.recipes import LLAMA_8B, SMALL, made
from titanlab.costs import (
    EXCHANGE,
    Coordinate,
    Repeats,
    Share,
    TrafficRow,
    add_context,
    add_tensor,
    step_traffic,
    sum_whole_gradients,
    training_flops_per_token,
)
from titanlab.plan import block_time, machine_of
from titanlab.plan.block_time import TRANSPOSED, RankWork, exposed, model_time, rows_of, work_of
from titanlab.plan.machine import AxisPlacement, Efficiencies
from titanlab.plan.search import not_priced
from titanlab.plan.stages import model_facts
from titanlab.plan.step_time import sharding_of, step_time
from titanlab.recipe import repeats_in_block, step_of
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveLayer, SelectiveOp
from titanlab.techniques.model.llama_schema import Llama, Qwen3Moe
from titanlab.techniques.optimizer.optimizers_schema import Muon
from titanlab.techniques.precision.cast_schema import Bf16, Fp32
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8Tensorwise
from titanlab.techniques.schedule.published_schema import ZBV, Interleaved1F1B, OneFOneB

# A machine in which only products take time, at 1e12 FLOP/s.
PERFECT = Efficiencies(
    product=1.0, attention=1.0, eager_memory=1.0, fused_memory=1.0, link=1.0, network=1.0, overlap=1.0,
    stragglers=0.0, launch_seconds=0.0, host_seconds=0.0, hook_seconds=0.0,
)  # fmt: skip


def only_products(recipe, **changes):
    """A machine with infinite bandwidths and no latency."""
    return dataclasses.replace(
        machine_of(recipe),
        product_flops={"bfloat16": 1e12},
        attention_flops={"forward": 1e12, "backward": 1e12},
        memory_bytes_per_second=math.inf,
        link_bytes_per_second=math.inf,
        network_bytes_per_second=math.inf,
        link_seconds=0.0,
        network_seconds=0.0,
        link_hop_seconds=0.0,
        network_hop_seconds=0.0,
        efficiencies=PERFECT,
        **changes,
    )


def seconds(recipe):
    return step_time(recipe, machine_of(recipe)).seconds


def test_parts_add_up_and_give_the_rate():
    recipe = made(shard=8, tensor=2, batch=64)
    found = step_time(recipe, machine_of(recipe))
    assert found.seconds == pytest.approx(sum(found.parts.values()), rel=1e-12)
    assert all(part >= 0 for part in found.parts.values())
    assert found.tokens_per_second == pytest.approx(64 * 8192 / found.seconds / 16, rel=1e-12)
    per_token = training_flops_per_token(LLAMA_8B.account(), seq_len=8192)
    assert found.mfu == pytest.approx(found.tokens_per_second * per_token / 989e12, rel=1e-12)


@pytest.mark.parametrize("degrees", [{}, {"shard": 4}, {"shard": 2, "tensor": 2}, {"context": 4}])
def test_with_infinite_bandwidths_only_flops_are_left(degrees):
    recipe = made(**degrees, batch=4)
    found = step_time(recipe, only_products(recipe))
    ranks = recipe.world
    tokens = 4 * 8192 / ranks
    block = LLAMA_8B.block_operations(batch=1, seq_len=8192)
    products = sum(operation.flops for operation in block if operation.kind == "matmul") / 8192
    attention = sum(operation.flops for operation in block if operation.kind == "attention") / 8192
    head = 2 * 4096 * 128256
    # Products: 3 times the forward pass. Causal attention: half of the square, 3.5 times.
    per_token = 3 * (32 * products + head) + 3.5 * 32 * attention / 2
    assert found.seconds == pytest.approx(tokens * per_token / 1e12, rel=1e-9)
    assert found.parts["compute"] == pytest.approx(found.seconds, rel=1e-9)


def test_full_recomputation_repeats_all_but_the_last_product():
    times = {}
    for ac in (NoCheckpointing(), FullCheckpointing(), SelectiveLayer(every=2)):
        recipe = made(ac=ac, batch=1)
        times[ac.kind] = step_time(recipe, only_products(recipe)).seconds
    block = LLAMA_8B.block_operations(batch=1, seq_len=8192)
    again = sum(operation.flops for operation in block[:-2] if operation.kind == "matmul")
    again += sum(operation.flops for operation in block if operation.kind == "attention") / 2
    assert block[-2].name == "feed_forward.w2"
    assert times["full"] - times["none"] == pytest.approx(32 * again / 1e12, rel=1e-9)
    # Every second of 32 blocks.
    assert times["selective_layer"] - times["none"] == pytest.approx(16 * again / 1e12, rel=1e-9)


@pytest.mark.parametrize(
    "better",
    [
        {"memory_bytes_per_second": 1e13},
        {"link_bytes_per_second": 9e11},
        {"network_bytes_per_second": 1e12},
        {"product_flops": {"bfloat16": 1e15}},
        {"attention_flops": {"forward": 1e15, "backward": 1e15}},
        {"link_hop_seconds": 0.0, "network_hop_seconds": 0.0, "link_seconds": 0.0, "network_seconds": 0.0},
    ],
)
@pytest.mark.parametrize("degrees", [{"shard": 32}, {"shard": 4, "tensor": 8}, {"shard": 4, "context": 16}])
def test_a_faster_machine_is_not_slower(better, degrees):
    recipe = made(**degrees, batch=64)
    machine = machine_of(recipe)
    before = step_time(recipe, machine).seconds
    assert step_time(recipe, dataclasses.replace(machine, **better)).seconds <= before * (1 + 1e-12)


@pytest.mark.parametrize("name", ["product", "attention", "eager_memory", "fused_memory", "link", "network"])
def test_every_efficiency_counts(name):
    recipe = made(shard=16, tensor=8, batch=64, compiled=name == "fused_memory")
    machine = machine_of(recipe)
    worse = dataclasses.replace(machine.efficiencies, **{name: getattr(machine.efficiencies, name) / 2})
    assert (
        step_time(recipe, dataclasses.replace(machine, efficiencies=worse)).seconds > step_time(recipe, machine).seconds
    )


def test_compilation_float8_and_async_tensor_are_faster():
    eager, compiled = made(shard=8), made(shard=8, compiled=True)
    float8 = made(shard=8, compiled=True, precision=Float8Tensorwise())
    rows = made(shard=8, compiled=True, precision=Float8Rowwise())
    assert seconds(float8) < seconds(rows) < seconds(compiled) < seconds(eager)
    waits = made(shard=2, tensor=8, compiled=True)
    overlapped = made(shard=2, tensor=8, compiled=True, async_tensor=True)
    assert seconds(overlapped) < seconds(waits)


MIXTURE = Qwen3Moe(dim=4096, layers=4, heads=32, kv_heads=8, head_dim=128, ffn_dim=768, vocab_size=2048, experts=16)


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    # Of two gathers and two sums in a pass, those that are fused, as in `FUSED` of tests/compile/test_async_tensor.py.
    # Rows that are gathered for experts are sorted before they are multiplied, and results are weighted before the sum.
    [
        ({}, 4, 2),
        ({"precision": Float8Tensorwise()}, 2, 0),
        ({"model": MIXTURE}, 2, 1),
        ({"model": dataclasses.replace(LLAMA_8B, fused=True)}, 4, 2),
    ],
    ids=["bf16", "float8", "experts", "fused"],
)
def test_async_tensor_hides_only_collectives_that_torch_fuses(given, forward, backward):
    waits = made(shard=1, tensor=8, compiled=True, ac=FullCheckpointing(), **given)
    overlapped = dataclasses.replace(waits, parallelism=dataclasses.replace(waits.parallelism, async_tensor=True))
    # Products take longer than collectives.
    machine = dataclasses.replace(only_products(waits), link_bytes_per_second=1e12)
    shown, whole = (model_time(recipe, machine).kinds[0] for recipe in (overlapped, waits))
    each = whole.tensor_forward / 4
    assert shown.tensor_forward == pytest.approx((4 - forward) * each)
    # The recomputation repeats what the forward pass does, without the last sum.
    again = whole.tensor_backward - whole.tensor_forward
    hidden = forward - (0 if "model" in given and given["model"] is MIXTURE else 1)
    assert again == pytest.approx(3 * each)
    assert shown.tensor_backward == pytest.approx((4 - backward + 3 - hidden) * each)


def test_float8_gathers_send_half():
    parts = {}
    for gathers in (True, False):
        # So slow a network that nothing hides the gathers.
        recipe = made(
            shard=64, batch=64, seq_len=128, precision=Float8Tensorwise(all_gather=gathers),
            cluster={"network_gb_per_second": 1},
        )  # fmt: skip
        parts[gathers] = step_time(recipe, machine_of(recipe)).parts["shard"]
    assert parts[True] < 0.8 * parts[False]


def float8_work(*, fused, precision=Float8Tensorwise, **changes):
    """The kernels of one layer that multiplies in float8."""
    (product,) = (each for each in LLAMA_8B.block_operations(batch=1, seq_len=512) if each.name == "attention.wo")
    part = RankWork(
        share=Share(element_bytes=2, tensor=changes.pop("tensor", 1)), dtype="bfloat16", attention="flash", fused=fused,
        plan=model_facts(LLAMA_8B).account.plan, prefix="layers.0.",
        products={"layers.0.attention.wo": precision.product}, **changes,
    )  # fmt: skip
    (work,) = work_of([product], part)
    return work


def products_in_float8(**changes):
    """Bytes that the casts of one layer move in the forward and in the backward pass, and their kernels."""
    work = float8_work(**changes)
    casts = [kernels[1] for kernels in (work.forward, work.inputs)]
    return sum(cast.moved for cast in casts), sum(cast.launches for cast in casts)


def test_casts_to_float8_cost_more_outside_compiled_code():
    inputs, weight, gradients = 512 * 4096, 4096 * 4096, 512 * 4096
    assert products_in_float8(fused=True) == (7 * (inputs + weight + gradients), 4.5)
    # Six kernels and 33 bytes, each operand twice.
    assert products_in_float8(fused=False) == (66 * (inputs + weight + gradients), 36)
    arrived = products_in_float8(fused=False, cast_weights=frozenset({"layers.0.attention.wo.weight"}))
    assert arrived[0] == 66 * (inputs + gradients)


def test_products_of_gradients_copy_and_scale_in_kernels_of_their_own():
    inputs, weight, gradients = 512 * 4096, 4096 * 4096, 512 * 4096

    def moved(**changes):
        work = float8_work(**changes)
        return work.inputs[-1].moved, work.weights[-1].moved

    # One scale for a tensor, compiled: a product and its casts are all kernels.
    alone = float8_work(fused=True)
    assert (len(alone.inputs), len(alone.weights)) == (2, 1)
    # Copies into the other order of memory: of the weight, and of both operands of its gradient.
    assert moved(fused=False) == (TRANSPOSED * weight, TRANSPOSED * (inputs + gradients))
    # Scales by row: the results of both products are read and written.
    assert moved(fused=True, precision=Float8Rowwise) == (4 * inputs, 4 * weight)
    # In chunks of tokens each gradient is also added to the sum.
    assert moved(fused=False, chunks=8)[1] == TRANSPOSED * (inputs + gradients) + 8 * 6 * weight


def test_with_a_gather_in_float8_each_rank_casts_its_part_and_sends_half():
    inputs, weight, gradients = 512 * 4096 // 4, 4096 * 4096 // 4, 512 * 4096
    assert products_in_float8(fused=True, tensor=4)[0] == 7 * (inputs + weight + gradients)
    # The layer's input is a part already; the gradient of its output is gathered.
    assert products_in_float8(fused=True, tensor=4, casts_part=True)[0] == 7 * (inputs + weight + gradients // 4)

    class Gathered(Float8Tensorwise):
        @property
        def gathers_activations(self):
            return True

    parts = [
        step_time(recipe, machine_of(recipe)).parts["tensor"]
        for recipe in (made(shard=2, tensor=8, precision=precision()) for precision in (Float8Tensorwise, Gathered))
    ]
    # Gathers are half of what tensor parallelism sends in a block.
    assert 0.7 < parts[1] / parts[0] < 0.85


def test_a_small_model_waits_for_the_host():
    """A pass takes as long as the slower of device and host, so that the size of a small model does not count."""
    tiny, small = (dataclasses.replace(SMALL, layers=32, dim=dim, ffn_dim=3 * dim) for dim in (128, 256))
    times = [
        step_time(recipe, machine_of(recipe)) for recipe in (made(model=m, seq_len=128, batch=1) for m in (tiny, small))
    ]
    assert times[0].parts["compute"] == pytest.approx(times[1].parts["compute"], rel=0.01)
    # 54 kernels of a block, each of 20 µs.
    assert times[0].parts["compute"] == pytest.approx(32 * 54.2 * 20e-6, rel=0.02)
    large = made(shard=8)
    machine = machine_of(large)
    slow = dataclasses.replace(machine, efficiencies=dataclasses.replace(machine.efficiencies, host_seconds=40e-6))
    assert step_time(large, slow).seconds == step_time(large, machine).seconds


def test_hooks_of_fsdp_and_of_tensor_parallelism_take_time_of_the_host():
    parts = {}
    for degrees in ({}, {"shard": 2}, {"tensor": 2}):
        recipe = made(model=SMALL, seq_len=128, batch=2, **degrees)
        parts[tuple(degrees)] = step_time(recipe, machine_of(recipe)).parts
    hook = machine_of(made()).efficiencies.hook_seconds
    assert parts[("shard",)]["shard"] >= 3 * 6 * hook
    gained = parts[("tensor",)]["compute"] + parts[("tensor",)]["tensor"] - parts[()]["compute"] / 2
    assert gained > 8 * 6 * hook


def test_gradients_of_further_microbatches_are_added():
    """In bfloat16 to those in float32 of all parameters: read 2, read 4 and write 4."""
    parts = {}
    for precision in (Bf16(), Fp32()):
        for batch in (1, 2):
            recipe = made(batch=batch, microbatch=1, precision=precision, reshard_after_forward="never")
            parts[precision.kind, batch] = step_time(recipe, machine_of(recipe)).parts["compute"]
    machine = machine_of(made())
    eager = machine.memory_bytes_per_second * machine.efficiencies.eager_memory
    count = LLAMA_8B.account().parameter_count
    recipe = made(batch=1, microbatch=1, precision=Fp32())
    once = model_time(recipe, machine_of(recipe)).whole.compute
    assert parts["fp32", 2] - 2 * once == pytest.approx(12 * count / eager, rel=1e-3)
    recipe = made(batch=1, microbatch=1)
    once = model_time(recipe, machine_of(recipe)).whole.compute
    assert parts["bf16", 2] - parts["bf16", 1] - once == pytest.approx(10 * count / eager, rel=1e-3)


def test_all_ranks_of_expert_parallelism_wait_for_the_busiest():
    experts = Qwen3Moe(
        dim=512, layers=4, heads=8, kv_heads=4, ffn_dim=256, vocab_size=2048, experts=16, active_experts=2,
        balance="auxiliary_batch",
    )  # fmt: skip
    times = {}
    for balance in ("bias", "auxiliary_batch"):
        recipe = made(model=dataclasses.replace(experts, balance=balance), shard=8, expert=8, batch=64)
        times[balance] = step_time(recipe, machine_of(recipe)).parts["tensor"]
    # Two experts on a rank.
    ratio = (1 + 0.72 / math.sqrt(2)) / (1 + 0.04 / math.sqrt(2))
    assert times["auxiliary_batch"] / times["bias"] == pytest.approx(ratio)


def test_a_single_rank_has_no_communication():
    recipe = made(batch=2)
    parts = step_time(recipe, machine_of(recipe)).parts
    assert {name for name, part in parts.items() if part > 0} == {"compute", "optimizer"}
    # Read and written: parameters, two averages; gradients five times. Of 4 bytes each, beside the counts of updates.
    machine = machine_of(recipe)
    rate = machine.memory_bytes_per_second * machine.efficiencies.fused_memory
    expected = LLAMA_8B.account().parameter_count * 4 * 11 / rate
    assert parts["optimizer"] == pytest.approx(expected, rel=1e-4)


def merge_for_nothing(monkeypatch):
    """The merges of partial results of context parallelism take no time."""
    for constant in ("_RING_ENDS", *(name for name in vars(block_time) if name.startswith("_MERGE"))):
        monkeypatch.setattr(block_time, constant, 0)


def test_merges_of_a_ring_take_time(monkeypatch):
    """By hand: bytes of the last rank of eight for one block, in eager mode."""
    recipe = made(context=8, batch=1, seq_len=8192)
    machine = machine_of(recipe)
    eager = machine.memory_bytes_per_second * machine.efficiencies.eager_memory
    queries, keys = 1024 * 4096, 2 * 1024 * 1024
    forward = queries * (12 + 18 * 7.5) / eager + 8 * 7.5 * machine.efficiencies.launch_seconds
    back = (queries * (12 + 10 * 7.5) + keys * 18 * 7.5) / eager + 10 * 7.5 * machine.efficiencies.launch_seconds
    whole = model_time(recipe, machine).whole
    merge_for_nothing(monkeypatch)
    free = model_time(recipe, machine_of(recipe)).whole
    assert whole.context_forward - free.context_forward == pytest.approx(32 * forward)
    assert whole.context_backward - free.context_backward == pytest.approx(32 * back)


def test_short_chunks_leave_multiprocessors_idle():
    """Tiles of 128 rows of 32 heads, on 132 multiprocessors."""
    (inner,) = (each for each in LLAMA_8B.block_operations(batch=1, seq_len=8192) if each.kind == "attention")
    flops = {}
    for ranks in (1, 4, 8, 16, 64):
        part = RankWork(
            share=Share(element_bytes=2, context=ranks), dtype="bfloat16", attention="cudnn", fused=False,
            plan=model_facts(LLAMA_8B).account.plan, prefix="layers.0.", products={},
        )  # fmt: skip
        (work,) = work_of([inner], part)
        flops[ranks] = work.forward[0].flops * ranks
    whole = flops[1]
    assert flops[4] == whole
    assert flops[8] == pytest.approx(whole * 132 / 128)
    assert flops[16] == pytest.approx(whole * 132 / 64)
    assert flops[64] == pytest.approx(2 * whole * 132 / 32)


def test_a_ring_shows_only_what_attention_does_not_hide(monkeypatch):
    merge_for_nothing(monkeypatch)
    short = made(context=8, batch=1, seq_len=8192, cluster={"link_gb_per_second": 20})
    long = made(context=8, batch=1, seq_len=8192 * 64, cluster={"link_gb_per_second": 20})
    assert step_time(short, machine_of(short)).parts["context"] > 0
    # Attention grows with the square of the sequence, what is sent only with its length.
    assert step_time(long, machine_of(long)).parts["context"] == 0
    gathered = made(context=8, batch=1, context_method="all_gather", seq_len=8192 * 64)
    assert step_time(gathered, machine_of(gathered)).parts["context"] > 0


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved1F1B(), ZBV()], ids=lambda schedule: schedule.kind)
def test_the_busiest_rank_of_a_pipeline_decides(schedule):
    """The head makes one of two ranks busier than the other, which has less than half of the work."""
    alone, piped = (
        step_time(recipe, only_products(recipe)).parts["compute"]
        for recipe in (
            made(model=SMALL, batch=8, seq_len=256, microbatch=1),
            made(model=SMALL, batch=8, seq_len=256, microbatch=1, pipeline=2, schedule=schedule),
        )
    )
    assert alone / 2 < piped < alone


def test_a_message_counts_where_it_is_sent_and_an_all_reduce_goes_around_twice():
    recipe = made()
    machine, four = machine_of(recipe), AxisPlacement(ranks=4, in_node=4, nodes=1)

    def seconds_of_kind(*kinds):
        rows = [TrafficRow(axis="tensor", kind=kind, count=3, bytes=1, wire_bytes=6000) for kind in kinds]
        return block_time.seconds_of(rows, four, machine)

    for kind, hops in (("send", 1), ("all_gather", 3), ("all_reduce", 6)):
        assert seconds_of_kind(kind, "recv") == machine.collective_seconds(four, 6000, count=3, hops=hops)
    assert seconds_of_kind() == seconds_of_kind("recv") == 0.0


def test_stragglers_grow_with_nodes():
    shares = []
    for ranks in (8, 16, 64):
        recipe = made(shard=ranks, batch=ranks)
        found = step_time(recipe, machine_of(recipe))
        shares.append(found.parts["stragglers"] / (found.seconds - found.parts["stragglers"]))
    share = machine_of(recipe).efficiencies.stragglers
    assert shares == pytest.approx([0.0, share, 3 * share], rel=1e-9)


def test_accumulated_microbatches_are_reduced_once():
    cluster = {"network_gb_per_second": 0.5, "efficiencies": {"hook_seconds": 0.0}}
    slow = {"shard": 64, "microbatch": 1, "seq_len": 128, "cluster": cluster}

    def shard(batch, choice):
        recipe = made(**slow, batch=batch, reshard_after_forward="never", reduce_gradients=choice)
        return step_time(recipe, machine_of(recipe)).parts["shard"]

    assert shard(64, "last") == shard(64, "each") == pytest.approx(shard(256, "last"), rel=1e-9)
    # Nothing hides so slow a network: four reductions instead of one, in float32, and one gather in bfloat16.
    assert shard(256, "each") == pytest.approx(shard(64, "each") * (4 * 2 + 1) / 3, rel=0.05)


@pytest.mark.parametrize(
    "recipe",
    [
        made(model=SMALL, shard=8, seq_len=256),
        made(model=SMALL, shard=4, replicate=2, seq_len=256, microbatch=1),
        made(model=SMALL, shard=2, tensor=2, seq_len=256, precision=Float8Tensorwise()),
        made(model=SMALL, shard=2, context=4, seq_len=256, reshard_after_forward="never"),
        made(model=SMALL, shard=2, context=2, tensor=4, seq_len=256, microbatch=2),
        made(model=SMALL, shard=4, tensor=2, seq_len=256, sequence_parallel=False, loss_parallel=False),
    ],
    ids=lambda recipe: recipe.layout.label,
)
def test_bytes_are_those_of_the_formulas(recipe):
    """Bytes of one block times the blocks, and of the edges, are what the formulas say of the whole model."""
    facts, machine = model_facts(recipe.model), machine_of(recipe)
    step = step_of(recipe, account=facts.sample)
    layers, edges = recipe.model.layers, (*facts.before, *facts.after)
    expected = step_traffic(step_of(recipe), Coordinate())
    block, rest = sharding_of(step, (facts.block,), machine), sharding_of(step, edges, machine)
    freed = recipe.parallelism.freed_blocks(layers)
    kept = layers - freed
    gathers = 2 * recipe.microbatches * freed + kept
    fsdp = [row for row in expected if row.axis.startswith("shard")]
    gathered = next(row.bytes for row in fsdp if row.kind == "all_gather")
    assert gathers * block.gathered_bytes + rest.gathered_bytes == gathered
    reduced = next(row.bytes for row in fsdp if row.kind == "reduce_scatter")
    assert layers * block.scattered_bytes + rest.scattered_bytes == reduced
    if recipe.layout.tensor > 1:
        sent = 0
        for piece in [facts.block] * layers + list(edges):
            sent += sum(row.bytes for row in rows_of(add_tensor, step, (piece,)))
            sent += sum(row.bytes for row in rows_of(sum_whole_gradients, step, Coordinate(), (piece,)))
        assert sent == sum(row.bytes for row in expected if row.axis == "tensor")
    if recipe.layout.context > 1:
        sent = layers * sum(row.bytes for row in rows_of(add_context, step, Coordinate(), (facts.block,)))
        assert sent == sum(row.bytes for row in expected if row.axis == "context")


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_a_recomputed_block_repeats_is_that_of_the_whole_step(compiled, sequence_parallel):
    """The list of SelectiveOp has the reduce-scatter of compiled tensor parallelism, and no other collective."""
    kept = {"none": (False, False), "full": (True, True), "selective_op": (True, not (compiled and sequence_parallel))}
    for ac in (NoCheckpointing(), FullCheckpointing(), SelectiveOp()):
        recipe = made(model=SMALL, tensor=2, ac=ac, compiled=compiled, sequence_parallel=sequence_parallel)
        for number in range(SMALL.layers):
            whole = step_of(recipe).repeats.get(f"layers.{number}", Repeats())
            assert repeats_in_block(recipe, ac, number) == (whole.gathers, whole.sums) == kept[ac.kind]


def test_an_exchange_that_is_kept_is_not_repeated():
    """Expert parallelism is all that the tensor axis communicates here."""
    model = Qwen3Moe(dim=512, layers=4, heads=8, kv_heads=4, head_dim=64, ffn_dim=256, vocab_size=2048, experts=16)

    def sent(ac):
        recipe = made(model=model, shard=8, expert=8, batch=8, ac=ac)
        return step_time(recipe, machine_of(recipe)).parts["tensor"]

    kept = SelectiveOp(saved=[EXCHANGE, "titanlab.grouped_product.default"])
    once, twice = sent(NoCheckpointing()), sent(FullCheckpointing())
    assert twice == pytest.approx(once * 3 / 2)
    assert (sent(kept), sent(SelectiveOp())) == (pytest.approx(once), pytest.approx(twice))


# A machine is equal only to itself: with one for all recipes the caches are shared, as in a search.
MACHINE = machine_of(made())


def test_what_runs_beside_a_computation_is_never_free_and_never_more_than_one_after_the_other():
    for compute, exchange in ((1.0, 0.5), (0.5, 1.0), (1.0, 1.0)):
        assert 0 < exposed(compute, exchange, MACHINE) <= exchange
    assert (exposed(1.0, 0.0, MACHINE), exposed(0.0, 1.0, MACHINE)) == (0.0, 1.0)


def test_a_loss_in_chunks_has_all_its_time_ahead():
    recipe = made(model=SMALL)
    chunked = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, loss_chunk=256))
    whole, chunks = (list(model_time(each, MACHINE).edges.values())[-1] for each in (recipe, chunked))
    assert (chunks.inputs, chunks.weights) == (0.0, 0.0)
    assert chunks.compute == pytest.approx(whole.compute)


DEGREES = (
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"tensor": 2, "sequence_parallel": True},
    {"tensor": 2, "async_tensor": True},
    {"tensor": 2, "loss_parallel": False},
    {"context": 2},
    {"context": 2, "context_method": "all_gather"},
    {"shard": 4, "tensor": 2},
)


def test_a_cache_never_answers_for_another_recipe():
    recipes = [
        made(model=SMALL, batch=8, seq_len=1024, ac=ac, compiled=compiled, microbatch=microbatch, **degrees)
        for degrees in DEGREES
        for ac in (NoCheckpointing(), FullCheckpointing())
        for compiled in (False, True)
        for microbatch in (None, 2)
    ]
    cached = [plain(model_time(recipe, MACHINE)) for recipe in recipes]
    fresh = []
    for recipe in recipes:
        for cache in (block_time._shaped, block_time._model_time):
            cache.cache_clear()
        fresh.append(plain(model_time(recipe, MACHINE)))
    assert cached == fresh
    assert len(set(map(str, cached))) > len(DEGREES) * 4


def plain(times):
    return times.kinds, times.kind_of, dict(times.edges), times.once, times.whole


def forward_kernels(*, fused, tensor):
    """Kernels of the products that may be fused."""
    model = Llama(dim=128, layers=1, heads=4, kv_heads=2, ffn_dim=256, vocab_size=64, fused=fused)
    share = Share(element_bytes=2, tensor=tensor, sequence_parallel=False)
    plan = model.account().plan
    part = RankWork(
        share=share, dtype="bfloat16", attention="flash", fused=False, plan=plan, prefix="layers.0.", products={}
    )
    operations = model.block_operations(batch=2, seq_len=256)
    names = ("wq", "wk", "wv", "wqkv", "w1", "w3", "w13")
    chosen = [each for each in operations if each.name.rpartition(".")[2] in names]
    return [kernel for work in work_of(chosen, part) for kernel in work[2]]


@pytest.mark.parametrize("tensor", [1, 2])
def test_fused_projections_are_fewer_products_and_a_copy_of_their_weights(tensor):
    apart, fused = (forward_kernels(fused=fused, tensor=tensor) for fused in (False, True))
    products, copies = [kernel for kernel in fused if kernel.flops], [kernel for kernel in fused if not kernel.flops]
    assert (len(apart), len(products), len(copies)) == (5, 2, 2)
    rows = 128 + 64 + 64 + 256 + 256
    assert sum(kernel.moved for kernel in copies) == 2 * 2 * rows * 128 / tensor
    # Tiles at the edges are counted whole, so that one product computes no more than several.
    assert sum(kernel.flops for kernel in products) <= sum(kernel.flops for kernel in apart)


def test_emulated_float8_multiplies_in_32_bits():
    """An A100 emulates rowwise float8, which was planned as fast as bfloat16; no device emulates faster than it."""
    a100 = {"compiled": True, "shard": 8, "device": "NVIDIA A100-SXM4-80GB"}
    assert seconds(made(**a100, precision=Float8Rowwise())) > 3 * seconds(made(**a100))
    native, emulated = (
        seconds(made(shard=8, precision=Float8Rowwise(emulate=emulate))) for emulate in ("auto", "true")
    )
    assert emulated > 3 * native


def test_muon_orthogonalises():
    adamw, muon = made(shard=8), dataclasses.replace(made(shard=8), optimizer=Muon())
    machine = machine_of(adamw)
    more = step_time(muon, machine).parts["optimizer"] - step_time(adamw, machine).parts["optimizer"]
    # By matrix: five iterations of 4·m²·n + 2·m³ FLOPs, a rank has an eighth of them.
    shapes = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    flops = 32 * sum(5 * (4 * m * m * n + 2 * m**3) for m, n in shapes) / 8
    assert more > 0.5 * flops / machine.product_rate("bfloat16")


def test_chosen_options_without_a_price_are_said():
    recipe = made(shard=8, cpu_offload=True)
    training = dataclasses.replace(recipe.training, deterministic=True)
    model = dataclasses.replace(recipe.model, attention="math")
    lines = not_priced(dataclasses.replace(recipe, training=training, model=model))
    assert [line.partition(":")[0] for line in lines] == [
        *("training.deterministic=true", "model.attention=math", "parallelism.cpu_offload=true"),
    ]
    assert not_priced(made(shard=8)) == []
