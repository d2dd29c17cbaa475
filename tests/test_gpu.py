"""What only a GPU can show: the fused attention kernels, and the same trainer on the device. Left out elsewhere."""

import importlib.util
import math
import statistics
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests import tiny
from tests.model.test_documents import CASES, apart, computed, inputs, largest_error, starts_of
from titanlab.checkpoint.schema import AsyncPinned, Sync
from titanlab.costs import meter, order
from titanlab.data import Synthetic
from titanlab.parallelism import attention_kernels
from titanlab.parallelism.context import ContextAttention
from titanlab.prove import Tracer
from titanlab.prove.parity import compare
from titanlab.recipe import Cluster
from titanlab.records import OutcomeKind
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.attention import InnerAttention, choose_flash, flash3_missing

pytestmark = pytest.mark.gpu
# Lengths of the documents of each sequence.
PACKED = CASES[-1]


# Instead of the CPU's cluster of tests/tiny.py.
GPU = Cluster(accelerator="cuda", device="cuda", peak_tflops=1.0)


def needs(kernel):
    """Leave a kernel out that this machine does not have; it says why."""
    if kernel == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        pytest.xfail("the package flash-attn is not installed")
    reason = flash3_missing(torch.cuda.get_device_capability()) if kernel == "flash3" else None
    if reason is not None:
        pytest.xfail(f"flash3 {reason[0]}")


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("flash", torch.bfloat16),
        ("flash3", torch.bfloat16),
        ("cudnn", torch.bfloat16),
        ("efficient", torch.bfloat16),
        ("efficient", torch.float32),
    ],
)
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_attention_put_together_of_parts_is_that_of_the_whole(alone, name, dtype, kv_heads):
    needs(name)
    torch.manual_seed(0)
    shapes = [(2, 200, heads, 64) for heads in (8, kv_heads, kv_heads, 8)]
    q, k, v, grad = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = ContextAttention("ring", alone, name)(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
    out.backward(grad)
    found = out.detach(), *(x.grad for x in leaves)
    exact = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    whole.backward(grad.double().transpose(1, 2))
    for mine, expected in zip(found, (whole.detach(), *(x.grad for x in exact)), strict=True):
        # Roundings of 8 bits of mantissa, or of 24 with kernels that may take TF32's 11 for products.
        bound = 2**-6 if dtype is torch.bfloat16 else 2**-9
        difference = (mine.double() - expected.transpose(1, 2)).norm() / expected.norm()
        assert difference < bound, (name, float(difference))


def attended(name, qkv, grad, *, compiled=False):
    """Output and gradients of a model's attention by the kernel of that name."""
    module = InnerAttention(name)
    module.prepare(torch.device("cuda"))
    own = [x.detach().clone().requires_grad_() for x in qkv]
    function = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
    out = function(*(x.transpose(1, 2) for x in own))
    out.backward(grad.transpose(1, 2))
    return [out.detach().transpose(1, 2), *(x.grad for x in own)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("name", ["auto", "flash", "flash3", "cudnn", "efficient", "math", "flash_attn"])
def test_every_kernel_gives_the_same_attention(name, kv_heads, compiled):
    needs(name)
    # One function is compiled for few kernels.
    torch._dynamo.reset()
    torch.manual_seed(0)
    shapes = [(2, 256, heads, 64) for heads in (8, kv_heads, kv_heads, 8)]
    *qkv, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    found = attended(name, qkv, grad, compiled=compiled)
    expected = attended("math", [x.double() for x in qkv], grad.double())
    for mine, exact in zip(found, expected, strict=True):
        assert (mine.double() - exact).norm() / exact.norm() < 2**-6, name


def test_the_layout_of_the_gradient_changes_nothing_for_cudnn():
    # Its kernels of a shape are kept, and were used again for gradients of another layout.
    torch.manual_seed(0)
    *qkv, grad = (torch.randn(2, 128, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 4, 4, 4))
    by_token = attended("cudnn", qkv, grad)
    by_head = attended("cudnn", qkv, grad.transpose(1, 2).contiguous().transpose(1, 2))
    for one, other in zip(by_token, by_head, strict=True):
        assert (one.double() - other.double()).norm() < 2**-6 * one.double().norm()


def kernels_of(name, dtype):
    """Names of the CUDA kernels that compute attention."""
    qkv = [torch.randn(1, 512, heads, 128, device="cuda", dtype=dtype) for heads in (8, 2, 2)]
    grad = torch.randn(1, 512, 8, 128, device="cuda", dtype=dtype)
    attended(name, qkv, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        attended(name, qkv, grad)
    return {event.key for event in profile.key_averages() if "scaled_dot_product" in event.key}


def test_auto_is_the_kernel_that_the_order_names_first():
    capability, inputs = torch.cuda.get_device_capability(), {"dtype": "bfloat16", "head_dim": 128, "seq_len": 512}
    first = order("auto", capability, **inputs, has_flash3=choose_flash("auto", capability))[0].removesuffix("3")
    assert f"aten::_scaled_dot_product_{first}_attention" in kernels_of("auto", torch.bfloat16)
    # Only `efficient` of the fused kernels has 32 bits; with shared heads torch alone would write out all scores.
    assert "aten::_scaled_dot_product_efficient_attention" in kernels_of("auto", torch.float32)


def test_compiled_blocks_and_loss_train_as_eager_ones(tmp_path):
    losses = []
    for given in ({}, {"blocks": True, "loss": True}):
        made = replace(tiny.recipe(tmp_path, name=f"run-{len(losses)}", steps=5, **given), cluster=GPU)
        tracer = Tracer()
        assert tiny.as_rank(made, tiny.begin(made), tracer).kind is OutcomeKind.DONE
        losses.append(tracer.trace.losses)
    # fp32, but for the order of sums.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("ac", [NoCheckpointing(), FullCheckpointing()], ids=["whole", "recomputed"])
@pytest.mark.parametrize("microbatch", [12, 4])
def test_recorded_graphs_train_as_eager_blocks(tmp_path, microbatch, ac):
    counters = torch._dynamo.utils.counters["inductor"]
    losses = []
    for given in ({}, {"blocks": True, "loss": True, "mode": "reduce-overhead"}):
        made = tiny.recipe(
            tmp_path, name=f"run-{len(losses)}", steps=6, microbatch=microbatch, validate_every=3, ac=ac, layers=3
        )
        # `tiny` makes recipes for a CPU, whose rules refuse CUDA graphs.
        made = replace(made, compile=Compile(**given), cluster=GPU)
        counters.clear()
        tracer = Tracer()
        assert tiny.as_rank(made, tiny.begin(made), tracer).kind is OutcomeKind.DONE
        losses.append([*tracer.trace.losses, *tracer.trace.grad_norms])
    # inductor records nothing, and counts it, if it finds a reason not to.
    assert counters["cudagraph_skips"] == 0
    # fp32, but for the order of sums.
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_steps_before_and_after_a_pause_last_as_long_as_others(tmp_path):
    made = replace(tiny.recipe(tmp_path, steps=16, validate_every=4, log_every=1), cluster=GPU)
    run = tiny.begin(made)
    assert tiny.as_rank(made, run).kind is OutcomeKind.DONE
    seconds = [row[meter.STEP_SECONDS] for row in run.metrics("train")][4:]
    # The last two steps before a pause are read at once.
    assert min(seconds) > statistics.median(seconds) / 4


def test_the_update_waits_for_nothing_on_the_device(tmp_path):
    class Watching(tiny.story.Observer):
        """No call waits for the device between the gradients and the next step's forward."""

        def with_gradients(self, step, model):
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")

        def after_step(self, step, totals):
            torch.cuda.set_sync_debug_mode("default")

    made = replace(tiny.recipe(tmp_path, steps=6, max_grad_norm=0.1, at_end=False), cluster=GPU)
    try:
        assert tiny.as_rank(made, tiny.begin(made), Watching()).kind is OutcomeKind.DONE
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", ["auto", "efficient", "math"])
def test_documents_are_as_if_alone(kernel, dtype):
    leaves, gradient, exact = packed(dtype)
    attention = InnerAttention(kernel)
    attention.prepare(torch.device("cuda"))
    found = computed(lambda *qkv: attention(*qkv, starts_of(PACKED).cuda()), leaves, gradient)
    # Roundings of 8 bits of mantissa, or of 24 with kernels that may take TF32's 11 for products.
    assert largest_error(found, exact) < (2**-6 if dtype is torch.bfloat16 else 2**-9)


@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_kernels_take_documents_one_by_one(name):
    leaves, gradient, exact = packed(torch.bfloat16)
    rows, kernel, starts = [x.detach() for x in leaves], attention_kernels.KERNELS[name], starts_of(PACKED)
    out, lse = kernel.documents_forward(*rows, starts=starts)
    gradients = kernel.documents_backward(gradient.bfloat16(), *rows, out, lse, starts=starts)
    assert largest_error([out, *gradients], exact) < 2**-6


def packed(dtype):
    """Queries, keys and values of packed documents, a gradient of their attention, and what is exact."""
    leaves = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs(PACKED)]
    gradient = torch.randn(leaves[0].shape, device="cuda").to(dtype).double()
    exact = computed(lambda *qkv: apart(*qkv, PACKED), [x.detach().double().requires_grad_() for x in leaves], gradient)
    return leaves, gradient, exact


@pytest.mark.parametrize(
    ("attention", "masks"),
    [
        *((name, False) for name in ("auto", "flash", "flash3", "cudnn", "efficient")),
        *((name, True) for name in ("auto", "efficient")),
    ],
)
def test_one_gpu_trains_in_bf16_as_a_cpu_does(tmp_path, attention, masks):
    needs(attention)
    losses = []
    data = Synthetic(vocab_size=256, document_mask=masks, document_tokens=8)
    for accelerator in ("cpu", "cuda"):
        made = tiny.recipe(tmp_path, name=f"on-{accelerator}", steps=5, bf16=True, data=data)
        model = replace(made.model, attention=attention if accelerator == "cuda" else "auto")
        made = replace(made, model=model, cluster=Cluster(accelerator=accelerator, device=accelerator, peak_tflops=1.0))
        tracer = Tracer()
        outcome = tiny.as_rank(made, tiny.begin(made), tracer)
        assert outcome.kind is OutcomeKind.DONE
        losses.append(tracer.trace.losses)
    # Both round to 8 bits of mantissa, in another order.
    assert losses[1] == pytest.approx(losses[0], rel=2**-7)


SYMMETRIC = {
    "AsyncTP, compiled": ({"tensor": 2, "blocks": True}, {"async_tensor": True}),
    "FSDP2": ({"shard": 2}, {"symmetric_memory": True}),
    "HSDP": ({"shard": 2, "replicate": 2}, {"symmetric_memory": True}),
}


@pytest.mark.parametrize("row", SYMMETRIC)
def test_symmetric_memory_changes_no_gradient(pool, tmp_path, row):
    layout, given = SYMMETRIC[row]
    world = math.prod(layout.get(axis, 1) for axis in ("tensor", "shard", "replicate", "pipeline"))
    if torch.cuda.device_count() < world:
        pytest.xfail(f"it needs {world} GPUs")
    traces = []
    for options in ({}, given):
        made = tiny.recipe(tmp_path, name=f"run-{len(traces)}", steps=4, at_end=False, **layout)
        # `tiny` makes recipes for a CPU, whose rules refuse these options.
        made = replace(made, parallelism=replace(made.parallelism, **options), cluster=GPU)
        traces.append(pool.run(world, tiny.traced, made, tiny.begin(made), limit_seconds=300.0)[0])
    # fp32, in another order of sums.
    assert compare(*traces).largest < 1e-4


def test_a_copy_to_pinned_memory_has_the_same_bytes(tmp_path):
    tensors = {}
    for mode in (Sync, AsyncPinned):
        made = tiny.recipe(tmp_path / mode.__name__, steps=6)
        made = replace(made, cluster=GPU, checkpoint=mode(every=2, keep=0))
        run = tiny.begin(made)
        assert tiny.as_rank(made, run).kind is OutcomeKind.DONE
        tensors[mode] = [path.read_bytes() for path in sorted(run.checkpoints.glob("step-*/rank-*.safetensors"))]
    assert len(tensors[Sync]) == 3
    assert tensors[Sync] == tensors[AsyncPinned]
