"""AsyncTP: what inductor fuses on groups that the package has registered, and what a run says that gets none of it."""

import dataclasses
import os
import warnings
from collections import Counter
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._functorch import config as functorch_config
from torch._inductor.fx_passes import micro_pipeline_tp, post_grad
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import tiny
from tests.pool import Pool
from titanlab.distributed import World
from titanlab.errors import ConfigError
from titanlab.options import schema_of
from titanlab.parallelism import TensorParallel, parallelise
from titanlab.techniques.compile import compiler as async_tensor
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model import llama
from titanlab.techniques.model.llama_schema import TENSOR_PLAN, Llama
from titanlab.techniques.precision import float8
from titanlab.train.initialise import initialise

GATHER, SCATTER = "symm_mem.fused_all_gather_matmul.default", "symm_mem.fused_matmul_reduce_scatter.default"
SCALED_SCATTER = "symm_mem.fused_scaled_matmul_reduce_scatter.default"
NOTHING = "inductor has fused no product with its collective"


def with_nccl():
    """inductor's pass asks whether this torch was built with NCCL, which one for a CPU is not."""
    return patch.object(dist, "is_nccl_available", lambda: True)


@pytest.fixture
def in_new_processes(request):
    """`Pool.run` in workers that end with it: torch registers a group's name once in a process, and keeps code."""

    def run(world, function, *arguments):
        workers = Pool(world, warning_filters=request.config.getini("filterwarnings"))
        try:
            return workers.run(world, function, *arguments, limit_seconds=300.0)
        finally:
            workers.close()

    return run


def fused_operators(precision):
    """Operators of symmetric memory in the forward and the backward graph of a block, on a group that is not there."""
    seen = []
    rewrite = micro_pipeline_tp.micro_pipeline_tp_pass

    def counted(graph):
        rewrite(graph)
        seen.append(dict(Counter(str(node.target) for node in graph.nodes if "symm_mem" in str(node.target))))

    # torch 2.11 warns of its own pass.
    warnings.filterwarnings("ignore", message="erase_node")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    group = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    config = Llama(dim=128, layers=1, heads=8, kv_heads=4, ffn_dim=256, vocab_size=128)
    chosen = schema_of("precision", precision)()
    with torch.device("meta"):
        model = llama.LlamaModel(config, seq_len=64)
    # As on a GPU that multiplies in float8.
    with patch.object(float8, "emulates", lambda config, device: False):
        chosen.implementation().convert(model, torch.device("cpu"))
    cut = TensorParallel(mesh=group, seq_len=64, sequence_parallel=True, loss_parallel=True)
    parallelise(model, TENSOR_PLAN, cut)
    model.to_empty(device="cpu")
    model.init_buffers()
    initialise(model, config.initial_values(), 0)
    model.to(torch.bfloat16)
    block = model.layers["0"]
    Compile(blocks=True).implementation().compile_blocks([block], async_group=group.get_group())
    hidden = torch.randn(1, 8 * 64 // 4, 128, dtype=torch.bfloat16, requires_grad=True)
    with (
        patch.object(post_grad, "micro_pipeline_tp_pass", counted),
        functorch_config.patch(force_non_lazy_backward_lowering=True),
        with_nccl(),
        # The graphs are all there is: a CPU has no kernels for these operators.
        pytest.raises(NotImplementedError, match="symm_mem::fused"),
    ):
        block(hidden, model._rope(64, None))
    return seen


# A block gathers before attention and feed-forward and scatters after each; its backward the other way round. There,
# what is scattered is a sum of two or three products, which torch does not fuse. In float8, what is gathered is cast
# before it is multiplied, so only the products that are scattered fuse.
FUSED = {
    "bf16": [{GATHER: 2, SCATTER: 2}, {GATHER: 2}],
    "float8_tensorwise": [{SCALED_SCATTER: 2}, {}],
    "float8_rowwise": [{SCALED_SCATTER: 2}, {}],
}


@pytest.mark.full
@pytest.mark.parametrize("precision", [*list(FUSED)[:2], pytest.param("float8_rowwise", marks=pytest.mark.full)])
def test_products_are_fused_on_a_group_that_the_package_has_registered(in_new_processes, precision):
    assert in_new_processes(1, fused_operators, precision) == [FUSED[precision]]


def trained(made, run, cache, fuses):
    """Losses of a run and calls of fused operators, or the error that ended it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    warnings.filterwarnings("ignore", message="erase_node")
    losses, calls = [], Counter()

    def counting(name, fallback):
        def kernel(*arguments, **named):
            calls[name] += 1
            return fallback(*arguments, **named)

        return kernel

    class Losses(tiny.story.Observer):
        def after_step(self, step, totals):
            losses.append(totals.loss)

    with ExitStack() as stack:
        if fuses:
            stack.enter_context(with_nccl())
        # What torch computes where it is told to do without symmetric memory.
        library = torch.library.Library("symm_mem", "IMPL")
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            library.impl(name, counting(name, getattr(symmetric_memory, f"_{name}_fallback")), "CPU")
        try:
            tiny.as_rank(made, run, Losses())
        except ConfigError as error:
            return str(error), losses
    return losses, dict(calls)


@pytest.mark.full
def test_a_run_gets_what_it_asks_for_or_ends_at_its_first_step(in_new_processes, tmp_path):
    def run(name, made, *, fuses):
        made = dataclasses.replace(made, name=name)
        return in_new_processes(2, trained, made, tiny.begin(made), str(tmp_path / name), fuses)

    plain = tiny.recipe(tmp_path / "runs", tensor=2, steps=2, layers=1, blocks=True, at_end=False)
    # Recipes for a CPU are refused AsyncTP: asked for behind the rule's back.
    made = dataclasses.replace(plain, parallelism=dataclasses.replace(plain.parallelism, async_tensor=True))
    expected = run("plain", plain, fuses=True)[0][0]
    # Forward and backward, of one block and two steps.
    fused = {"fused_all_gather_matmul": 8, "fused_matmul_reduce_scatter": 4}
    for losses, calls in run("fused", made, fuses=True):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert calls == fused
    # A torch without NCCL fuses nothing.
    for error, losses in run("unfused", made, fuses=False):
        assert error.startswith(f"parallelism.async_tensor=true: {NOTHING} on every rank; try false")
        assert losses == []


class Ranks(World):
    """A world whose other ranks have found these numbers."""

    others = (0, 3)

    def gather(self, value):
        return [value, *self.others]


def test_one_rank_without_is_named_on_all():
    world = Ranks(rank=0, world=3, local_rank=0, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=f"{NOTHING} on ranks 0, 1; try false"):
        async_tensor.FusionCheck().check_fused(world.gather)
