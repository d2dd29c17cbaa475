"""What tensor parallelism cuts, sends and holds; that it trains right is shown by the parity matrix."""

import os
import warnings
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch.nn.functional as F
from torch._inductor.fx_passes import micro_pipeline_tp, post_grad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import tiny
from titanlab.assemble import assemble
from titanlab.compile.blocks import compile_blocks
from titanlab.compile.schema import Compile
from titanlab.data.source import Batch
from titanlab.initialise import initialise
from titanlab.mesh import build_mesh
from titanlab.model import llama, llama_account
from titanlab.model.llama_schema import Llama
from titanlab.parallelism.loss import IGNORE, SplitLoss, loss_sum
from titanlab.parallelism.tensor import Cut, parallelise
from titanlab.ranks import joined
from titanlab.world import open_world


def placements_of(made):
    """Placements and dtypes of parameters and their gradients after a step, and the widest logits that a rank made."""
    widths = []
    whole = F.linear

    def watched(tensor, weight, bias=None):
        output = whole(tensor, weight, bias)
        widths.append(output.shape[-1])
        return output

    with open_world(joined(os.environ), accelerator="cpu", seed=0, deterministic=False) as world:
        assembled = assemble(made, world, build_mesh(made.layout, "cpu"))
        tokens = torch.zeros(made.local_batch, made.training.seq_len, dtype=torch.int64).numpy()
        with patch.object(F, "linear", watched):
            assembled.forward_backward(assembled.place(Batch(tokens, tokens)))
        found = {}
        for name, parameter in assembled.model.named_parameters():
            assert isinstance(parameter.data, DTensor)
            assert parameter.grad.placements == parameter.data.placements
            assert parameter.grad.to_local().shape == parameter.data.to_local().shape
            found[name] = parameter.data.placements
    return found, max(widths)


def test_matrices_and_their_gradients_are_cut_and_logits_never_whole(pool, tmp_path):
    made = tiny.recipe(tmp_path, tensor=2, vocab_size=1000)
    for found, widest in pool.run(2, placements_of, made):
        rows = {name for name, placements in found.items() if placements == (Shard(0),)}
        columns = {name for name, placements in found.items() if placements == (Shard(1),)}
        assert {name.rpartition("layers.")[2] for name in columns} == {
            f"{layer}.{name}.weight" for layer in range(2) for name in ("attention.wo", "feed_forward.w2")
        }
        assert {"tok_embeddings.weight", "output.weight", "layers.0.attention.wk.weight"} <= rows
        assert {placements for name, placements in found.items() if "norm" in name} == {(Replicate(),)}
        assert widest == 500


def split_loss(vocab_size, seed):
    """(loss, gradient of this rank's columns) with the vocabulary split, and of the whole."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    whole = (30 * torch.randn(3, 7, vocab_size, generator=generator)).requires_grad_()
    labels = torch.randint(0, vocab_size, (3, 7), generator=generator)
    labels[0, :4] = IGNORE
    mine = whole.detach().chunk(ranks, dim=-1)[rank].clone().requires_grad_()
    loss, expected = SplitLoss(dist.group.WORLD, vocab_size=vocab_size)(mine, labels), loss_sum(whole, labels)
    (0.5 * loss).backward()
    (0.5 * expected).backward()
    error = (mine.grad - whole.grad.chunk(ranks, dim=-1)[rank]).abs().max().item()
    return loss.item(), expected.item(), error


@pytest.mark.parametrize(("ranks", "vocab_size"), [(2, 64), (2, 65), (3, 64), (3, 7)])
def test_the_loss_of_split_logits_is_that_of_whole_ones(pool, ranks, vocab_size):
    for loss, expected, error in pool.run(ranks, split_loss, vocab_size, ranks):
        assert loss == pytest.approx(expected, rel=1e-6)
        # Slopes lie between -1 and 1. Logits reach 100, where exponentials overflow and numbers are 2^-17 apart.
        assert error < 2**-17


def fused_operators():
    """Operators of symmetric memory in the compiled forward graph of a block, on a group that is not there."""
    seen = []
    rewrite = micro_pipeline_tp.micro_pipeline_tp_pass

    def counted(graph):
        rewrite(graph)
        seen.append(dict(Counter(str(node.target) for node in graph.nodes if "symm_mem" in str(node.target))))

    # torch 2.11 warns of its own pass.
    warnings.filterwarnings("ignore", message="erase_node")
    # Blocks of other shapes that this process has compiled would make torch write this graph for any shape.
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    config = Llama(dim=64, layers=1, heads=8, kv_heads=4, ffn_dim=192, vocab_size=128)
    with torch.device("meta"):
        model = llama.build(config, seq_len=64)
    cut = Cut(mesh=mesh, seq_len=64, sequence_parallel=True, loss_parallel=True)
    parallelise(model, llama_account.TENSOR_PLAN, cut)
    model.to_empty(device="cpu")
    model.init_buffers()
    initialise(model, llama_account.initial_values(config), 0)
    block = model.layers["0"]
    compile_blocks([block], Compile(blocks=True), async_tensor=True)
    with (
        patch.object(post_grad, "micro_pipeline_tp_pass", counted),
        patch.object(dist, "is_nccl_available", lambda: True),
        symmetric_memory._test_mode(),
        # The graph is all there is: a CPU has no kernels for these operators.
        pytest.raises(NotImplementedError, match="fused_all_gather_matmul"),
    ):
        block(torch.randn(1, 8 * 64 // 4, 64, requires_grad=True), model._rope(64, None))
    return seen[0]


@pytest.mark.full
def test_async_tensor_fuses_every_product_with_its_collective(pool):
    # Before attention and feed-forward, and after each.
    assert pool.run(1, fused_operators, limit_seconds=300.0) == [
        {"symm_mem.fused_all_gather_matmul.default": 2, "symm_mem.fused_matmul_reduce_scatter.default": 2}
    ]
