"""A pipeline in the pool's workers, beside one process that computes the same."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from titanlab.parallelism import Pipeline, loss_sum, of_logits
from titanlab.techniques.model import llama
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.schedule.action import Action, Kind
from titanlab.techniques.schedule.published_schema import (
    ZBV,
    DualPipeV,
    GPipe,
    Interleaved1F1B,
    InterleavedZeroBubble,
    LoopedBFS,
    OneFOneB,
)

LAYERS, SEQ, MICROBATCH, DIM = 6, 16, 2, 32
CONFIG = Llama(dim=DIM, layers=LAYERS, heads=4, kv_heads=2, ffn_dim=48, vocab_size=64)
PIECES = ["tok_embeddings", *(f"layers.{index}" for index in range(LAYERS)), "norm", "output"]
SCALE = 0.01
# ‖Δ‖ / ‖reference‖ of a parameter's gradient in float32: another order of the same sums.
TOLERANCE = 1e-5

# Each schedule with its numbers of microbatches for two ranks.
SCHEDULES = {
    "gpipe": (GPipe(), (1, 3, 4)),
    "1f1b": (OneFOneB(), (1, 3, 4)),
    "interleaved_1f1b": (Interleaved1F1B(), (2, 4)),
    "looped_bfs": (LoopedBFS(), (1, 3, 4)),
    "interleaved_zero_bubble": (InterleavedZeroBubble(), (2, 4)),
    "zbv": (ZBV(), (1, 3, 4)),
    "dualpipe_v": (DualPipeV(), (4,)),
}


def written(*orders):
    """Actions by rank of a text such as "0F0 0B0"."""
    return [[Action(int(each[0]), Kind(each[1]), int(each[2])) for each in order.split()] for order in orders]


# What only a list by hand does: microbatches out of order, weights long after inputs.
BY_HAND = (
    written(
        "0F2 0F0 0F1 3F2 3I2 3F0 0I2 3I0 3F1 3I1 0I0 0I1 0W1 3W0 3W1 0W2 3W2 0W0",
        "1F2 1F0 2F2 1F1 2F0 2B2 1I2 2I0 2F1 1B0 2B1 1B1 2W0 1W2",
    ),
    [0, 1, 1, 0],
)


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


def scheduled(name, ranks, microbatches):
    if name == "by_hand":
        return BY_HAND
    config, _ = SCHEDULES[name]
    return config.actions(ranks=ranks, microbatches=microbatches), config.placement(ranks=ranks)


def model():
    torch.manual_seed(0)
    return llama.LlamaModel(CONFIG, seq_len=SEQ)


def stage_of(number, stages):
    """The model with only the pieces of one stage."""
    made = model()
    for index, piece in enumerate(PIECES):
        if index * stages // len(PIECES) != number:
            if piece.startswith("layers."):
                del made.layers[piece.removeprefix("layers.")]
            else:
                setattr(made, piece, None)
    return made


def batch(rows):
    generator = torch.Generator().manual_seed(rows)
    window = torch.randint(0, CONFIG.vocab_size, (rows, SEQ + 1), generator=generator)
    tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    return tokens, labels


@functools.cache
def alone(rows):
    """Gradients by parameter and loss of one process."""
    whole = model()
    tokens, labels = batch(rows)
    loss = loss_sum(whole(tokens), labels)
    (loss * SCALE).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}, loss.item()


class Run:
    """A pipeline over this world: `data` replicas or shards of `world / data` ranks each."""

    def __init__(self, name, microbatches, *, data=1, wrap=None, loss=loss_sum, dtype=torch.float32, scale=SCALE):
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        ranks = dist.get_world_size() // data
        mesh = init_device_mesh("cpu", (ranks, data, 1), mesh_dim_names=("pipeline", "replicate", "shard"))
        self.actions, self.placement = scheduled(name, ranks, microbatches)
        place = mesh["pipeline"].get_local_rank()
        self.stages = {
            number: stage_of(number, len(self.placement)) for number, rank in enumerate(self.placement) if rank == place
        }
        if wrap is not None:
            for each in self.stages.values():
                wrap(each, mesh)
        self.pipeline = Pipeline(
            self.stages,
            actions=self.actions,
            placement=self.placement,
            group=mesh["pipeline"].get_group(),
            device=torch.device("cpu"),
            loss=of_logits(loss),
            scale=scale * data,
            hidden_shape=(MICROBATCH, SEQ, DIM),
            hidden_dtype=dtype,
        )
        self.rows = MICROBATCH * microbatches
        self.mine = slice(mesh["replicate"].get_local_rank() * self.rows, None)
        self.all_rows = self.rows * data
        self.positions = torch.arange(SEQ)

    def local(self):
        return [each[self.mine][: self.rows] for each in batch(self.all_rows)]

    def step(self):
        for each in self.stages.values():
            each.zero_grad()
        return self.pipeline.forward_backward(*self.local(), self.positions)

    def evaluate(self, rows):
        tokens, labels = self.local()
        return self.pipeline.evaluate(tokens[:rows], labels[:rows], self.positions)

    def worst(self):
        """Largest relative error of a gradient of this rank, beside one process."""
        expected, _ = alone(self.all_rows)
        errors = [0.0]
        for each in self.stages.values():
            for name, parameter in each.named_parameters():
                got = parameter.grad
                assert got is not None, name
                got = got.full_tensor() if isinstance(got, DTensor) else got
                errors.append(((got - expected[name]).norm() / expected[name].norm()).item())
        return max(errors)


def total(value):
    dist.all_reduce(value)
    return value.item()


def shard(reshard, policy=None, axis="replicate"):
    """Wraps a stage as assembly does, with FSDP2 over one axis, or both for HSDP."""

    def wrap(stage, mesh):
        given = {"mesh": mesh[axis], "reshard_after_forward": reshard, "mp_policy": policy or MixedPrecisionPolicy()}
        for block in stage.layers.values():
            fully_shard(block, **given)
        fully_shard(stage, **given)

    return wrap
