"""Layers that are computed as one product give the outputs, gradients and parameters of separate ones."""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests import tiny
from titanlab.costs import Joined, meter
from titanlab.data import Synthetic
from titanlab.parallelism import join_products
from titanlab.parallelism.pipeline_weights import JoinedProjections
from titanlab.prove.parity import compare
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing
from titanlab.techniques.model.language_model import Projections
from titanlab.techniques.model.llama_schema import Qwen3, Qwen3Moe
from titanlab.techniques.optimizer.optimizers_schema import Muon
from titanlab.techniques.schedule.published_schema import ZBV
from titanlab.train.conformance import faults

BAR = 1e-5
COMMON = {"steps": 3, "global_batch": 4, "eps": 1e-6}
QWEN3 = Qwen3(dim=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn_dim=192, vocab_size=256)
EXPERTS = Qwen3Moe(
    dim=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn_dim=64, vocab_size=256, experts=4, active_experts=2
)


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 6, bias=False), nn.Linear(8, 4, bias=False)
        self.projections, self.layers = Projections(), ("a", "b")

    def forward(self, x):
        return self.projections(x, *(getattr(self, name) for name in self.layers))


def outputs_and_gradients(owner, x, *, twice=True):
    first, second = owner(x)
    # Both outputs are used, and one also in another way than the other.
    total = (first.sin().sum() + second.square().sum()) if twice else second.square().sum()
    return [first, second, *torch.autograd.grad(total, [x, *owner.parameters()], materialize_grads=True)]


@pytest.mark.parametrize("twice", [True, False])
def test_outputs_and_gradients(twice):
    torch.manual_seed(0)
    owner, x = Owner(), torch.randn(2, 3, 8, requires_grad=True)
    expected = outputs_and_gradients(owner, x, twice=twice)
    before = dict(owner.named_parameters())
    join_products(owner, [Joined(caller="projections", layers=("a", "b"), copied=("b",))], None)
    assert isinstance(owner.projections, JoinedProjections)
    assert all(parameter is before[name] for name, parameter in owner.named_parameters())
    torch.testing.assert_close(outputs_and_gradients(owner, x, twice=twice), expected)
    first, second = owner(x)
    # Of `b` only its own output is kept.
    assert first.untyped_storage().nbytes() == 2 * 3 * (6 + 4) * 4
    assert second.untyped_storage().nbytes() == 2 * 3 * 4 * 4


@pytest.mark.parametrize("layers", [("a", "b"), ("a", "b", "c")])
@pytest.mark.parametrize("reason", ["no_grad", "frozen"])
def test_compiled_products_that_need_no_gradient(layers, reason):
    """torch's dynamo calls an autograd function's forward in another way then."""
    torch.manual_seed(0)
    owner, x = Owner(), torch.randn(2, 3, 8)
    owner.c, owner.layers = nn.Linear(8, 5, bias=False), layers
    expected = owner(x)
    join_products(owner, [Joined(caller="projections", layers=layers, copied=("b",))], None)
    compiled = torch.compile(owner, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    owner.requires_grad_(reason != "frozen")
    with torch.no_grad() if reason == "no_grad" else contextlib.nullcontext():
        found = compiled(x)
    assert not any(output.requires_grad for output in found)
    torch.testing.assert_close(found, expected)


# What the rows of the parity matrix do not have. Muon orthogonalises each matrix by itself.
ROWS = {
    "muon": ({"optimizer": Muon(lr=1e-3)}, {}),
    "head norms": ({"model": QWEN3}, {"shard": 2, "tensor": 2}),
    "experts": ({"model": EXPERTS}, {"tensor": 2}),
    "compiled, split backward": ({}, {"pipeline": 2, "pipeline_schedule": ZBV(), "layers": 4, "backend": "aot_eager", "blocks": True}),
    "compiled by inductor": ({}, {"tensor": 2, "blocks": True}),
}  # fmt: skip
DEFAULT = ("muon",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.full]) for name in ROWS]
)
def test_training_is_the_same(traces, name):
    common, others = ROWS[name]
    fused = (
        {**common, "model": replace(common["model"], fused=True)} if "model" in common else {**common, "fused": True}
    )
    layers = {key: value for key, value in others.items() if key == "layers"}
    # Muon computes in bfloat16, whose rounding of nearly equal inputs may differ.
    bar = 1e-2 if name == "muon" else BAR
    difference = compare(*(traces(**{**COMMON, **keys}) for keys in (common | layers, fused | others)))
    assert max(difference.loss, difference.grad_norm, difference.gradient[0]) <= BAR, difference
    assert difference.largest <= bar, difference


# Every technique that has an autograd function or an operator of its own inside compiled blocks.
VALIDATED = {
    "tensor": {"tensor": 2},
    "alone": {},
    "no sequence parallelism, loss in chunks": {"tensor": 2, "sequence_parallel": False, "loss_chunk": 12},
    "split backward": {"pipeline": 2, "layers": 4, "pipeline_schedule": ZBV()},
    "ring": {"context": 2},
    "gathered keys": {"context": 2, "context_method": "all_gather"},
    "recomputed": {"ac": FullCheckpointing(), "shard": 2},
    "documents": {"data": Synthetic(vocab_size=256, document_mask=True, document_tokens=6)},
    "head norms": {"model": QWEN3, "tensor": 2},
    "experts": {"model": EXPERTS, "tensor": 2},
    "expert parallelism": {"model": EXPERTS, "tensor": 2, "expert": 2, "pipeline": 2},
}


COVERING = ([], [pytest.mark.covering])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full, *COVERING[name == "tensor"]]) for name in VALIDATED]
)
def test_compiled_fused_blocks_are_validated(pool, tmp_path, name):
    """The loss of held-out sequences, after each step, is that of one process that neither fuses nor compiles."""
    common = {**COMMON, "validate_every": 1, "validation_sequences": 5, "at_end": False}
    given = {**common, **VALIDATED[name]}
    common |= {key: value for key, value in given.items() if key in ("layers", "model", "data")}
    model = {"model": replace(given["model"], fused=True)} if "model" in given else {"fused": True}
    compiled = {"blocks": True, "loss": "loss_chunk" not in given, "backend": "aot_eager"}
    expected = validated(pool, tmp_path / "expected", common)
    found = validated(pool, tmp_path / "found", given | model | compiled)
    assert [step for step, _ in expected] == [1, 2, 3]
    assert found == [(step, pytest.approx(loss, rel=BAR)) for step, loss in expected]


def validated(pool, folder, keys):
    made = tiny.recipe(folder, **keys)
    run = tiny.begin(made)
    pool.run(made.world, tiny.as_rank, made, run, limit_seconds=300.0)
    return [(row["step"], row[meter.VALIDATION_LOSS]) for row in run.metrics("validation")]


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind(pool, tmp_path, before, after):
    """Its losses are those of a run that was not interrupted."""
    common = {**COMMON, "steps": 4, "at_end": True}
    whole = tiny.recipe(tmp_path / "whole", **common, fused=before)
    expected = pool.run(1, tiny.traced, whole, tiny.begin(whole))[0]
    first = tiny.recipe(tmp_path / "first", **common, fused=before, every=2)
    run = tiny.begin(first)
    pool.run(1, tiny.as_rank, first, run)
    checkpoint = next(path for path in (run.path / "checkpoints").iterdir() if path.name.endswith("2"))
    second = tiny.recipe(tmp_path / "second", **common, fused=after, load_from=str(checkpoint))
    found = pool.run(1, tiny.traced, second, tiny.begin(second))[0]
    assert len(found.losses) == 2
    assert found.losses == pytest.approx(expected.losses[2:], rel=BAR)


@pytest.mark.parametrize("config", [replace(QWEN3, fused=True), replace(EXPERTS, fused=True)])
def test_accounts_name_modules_that_exist(config):
    found = config.account().joined
    assert found[0].caller == "layers.*.attention.projections"
    # Experts are not fused.
    assert len(found) == (1 if config.routed else 2)
    assert not [fault for fault in faults(config) if "joined" in fault]
