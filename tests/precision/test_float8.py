"""Float8: which modules change and into what, with which scales they multiply, and what a checkpoint has of them."""

import dataclasses
import importlib
import logging
import os
import sys
import tempfile
import warnings

import pytest
import torch
from torch import nn

from tests import tiny
from tests.pool import Pool
from tests.train.test_resume import same_bits
from titanlab.checkpoint import latest
from titanlab.distributed import ALONE, build_mesh, joined, open_world
from titanlab.errors import ConfigError
from titanlab.parallelism import ChunkedLoss
from titanlab.parallelism.pipeline_weights import linear
from titanlab.prove import parity
from titanlab.recipe import Cluster
from titanlab.techniques.model.llama_schema import Qwen3Moe
from titanlab.techniques.model.mixture_of_experts import ExpertLinear
from titanlab.techniques.precision import float8
from titanlab.techniques.precision.cast_schema import Bf16
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise, Mxfp8
from titanlab.techniques.precision.product import product_of
from titanlab.train import assemble, generate
from titanlab.train.recording import work

RECIPES = [Float8Tensorwise, Float8Rowwise, Float8RowwiseWithGwHp, Mxfp8]
# Names of layers in a block, which are all that changes by default.
LAYERS = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo")] + [
    f"feed_forward.w{number}" for number in (1, 2, 3)
]
CPU = torch.device("cpu")


def converted(config, **model):
    """A tiny model on meta, converted; and its account."""
    made = tiny.recipe("runs", precision=config, **model)
    with torch.device("meta"):
        plain = made.model.implementation().build(seq_len=32)
    config.implementation().convert(plain, CPU)
    return plain, made.model.account()


def changed(model):
    """Names of linear layers that are none of torch's, with their types."""
    return {
        name: type(m).__name__
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and type(m) is not nn.Linear
    }


@pytest.mark.parametrize("kind", RECIPES)
def test_linear_layers_of_blocks_change_and_no_others(kind):
    model, account = converted(kind())
    expected = "Mxfp8Linear" if kind is Mxfp8 else "Float8Linear"
    assert changed(model) == {f"layers.{block}.{name}": expected for block in (0, 1) for name in LAYERS}
    assert type(model.output) is nn.Linear
    assert type(model.tok_embeddings) is nn.Embedding
    # What the account says, which rules and tables read.
    assert list(kind().conversion(account).converted) == list(changed(model))
    # Names and shapes are those of the model.
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == account.parameters


@pytest.mark.parametrize(
    ("config", "model", "left"),
    [
        (Float8Rowwise(skip=[]), {}, set()),
        (Float8Rowwise(skip=["output", "wk", "wv"]), {}, {"wk", "wv", "output"}),
        (Float8Rowwise(skip=["attention"]), {}, {"wq", "wk", "wv", "wo"}),
        (Float8Rowwise(skip=["feed_forward.w*", "output"]), {}, {"w1", "w2", "w3", "output"}),
        # 24 rows of keys and values, 200 of the feed-forward: no multiples of 16.
        (Float8Rowwise(), {"dim": 96, "heads": 4, "kv_heads": 1}, {"wk", "wv", "output"}),
        (Float8Rowwise(), {"ffn_dim": 200}, {"w1", "w2", "w3", "output"}),
        (Float8Rowwise(skip=[]), {"vocab_size": 257}, {"output"}),
        (Mxfp8(), {"ffn_dim": 208}, {"w1", "w2", "w3", "output"}),
        (Float8Tensorwise(), {"tied_embeddings": True}, set()),
    ],
)
def test_what_is_left_as_it_is(config, model, left):
    found, account = converted(config, **model)
    plain = {name for name, m in found.named_modules() if type(m) is nn.Linear}
    assert {name.rpartition(".")[2] for name in plain} == left
    told = config.conversion(account)
    assert {*told.skipped, *told.uneven} == plain
    assert set(told.converted) == set(changed(found))


@pytest.mark.parametrize("kind", RECIPES)
def test_experts_multiply_in_bf16(kind):
    config = Qwen3Moe(dim=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn_dim=32, vocab_size=256, experts=8,
                      active_experts=2)  # fmt: skip
    model, _ = converted(kind(), model=config)
    account = config.account()
    attention = [f"layers.{block}.attention.{name}" for block in (0, 1) for name in ("wq", "wk", "wv", "wo")]
    assert list(changed(model)) == list(kind().conversion(account).converted) == attention
    assert {type(part) for name, part in model.named_modules() if name.endswith("experts.w1")} == {ExpertLinear}
    told = kind().describe(account, accelerator="cpu", device="cpu")
    assert told == f"{kind().kind}: 8 linear layers, not output, experts in bfloat16, emulated"


def test_the_mfu_is_held_against_the_peak_of_bfloat16_and_says_so():
    kind = Float8Rowwise
    cluster = Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")
    recipe = dataclasses.replace(tiny.recipe("runs", precision=kind()), cluster=cluster)
    constants = work(recipe, torch.device("cuda"))
    assert constants.peak_flops == 989e12
    assert constants.peak_source == "NVIDIA H100 80GB HBM3, dense; model FLOPs over the bf16 peak"
    assert constants.may_exceed_peak
    plain = work(dataclasses.replace(recipe, precision=Bf16()), torch.device("cuda"))
    assert (plain.peak_source, plain.may_exceed_peak) == ("NVIDIA H100 80GB HBM3, dense", False)


@pytest.mark.parametrize("kind", RECIPES)
def test_the_product_rounds_as_float8_does(kind):
    """e4m3 has 3 bits behind the point: 2⁻⁴ at most and 0.026 on average, for both factors."""
    torch.manual_seed(0)
    layer, inputs = _layer(kind()), torch.randn(4, 8, 64, dtype=torch.bfloat16)
    plain = nn.functional.linear(inputs, layer.weight)
    assert 0.01 < (layer(inputs) - plain).float().norm() / plain.float().norm() < 0.06


@pytest.mark.parametrize("kind", RECIPES[:3])
def test_a_weight_that_is_multiplied_several_times_is_cast_once(kind, monkeypatch):
    layer = _layer(kind())
    product = product_of(layer)
    torch.manual_seed(0)
    hidden = torch.randn(3, 8, 64).bfloat16().requires_grad_()
    labels = torch.randint(0, 64, (3, 8))
    casts = []
    scaling = importlib.import_module("torchao.float8.float8_scaling_utils")
    plain = scaling.hp_tensor_to_float8_dynamic

    def counted(tensor, *given, gemm_input_role, **named):
        casts.append(gemm_input_role.name)
        return plain(tensor, *given, gemm_input_role=gemm_input_role, **named)

    monkeypatch.setattr(scaling, "hp_tensor_to_float8_dynamic", counted)
    monkeypatch.setattr("torchao.float8.float8_linear.hp_tensor_to_float8_dynamic", counted)

    def trained(product):
        casts.clear()
        layer.product = product
        layer.forward = type(layer).forward.__get__(layer)
        loss = ChunkedLoss(layer, tokens=4, scale=1.0)(lambda: layer(hidden), labels)
        return loss, *torch.autograd.grad(loss, (hidden, layer.weight)), casts.count("WEIGHT")

    *each_chunk, several = trained(dataclasses.replace(product, for_forward=lambda w: w, for_inputs=lambda w: w))
    *once, one = trained(product)
    assert all(map(torch.equal, once, each_chunk))
    # Of 6 chunks; one recipe computes the gradient of the inputs with the weight as the forward pass has it.
    assert one == several / 6
    factor = product.for_inputs(layer.weight.detach())
    assert factor._data.stride() == (1, 64)


@pytest.mark.parametrize("kind", RECIPES)
def test_tensor_parallel_layers_multiply_what_they_have_as_a_whole_layer_would(kind):
    """Forward and backward, to the bit, for the rows or columns of a rank."""
    torch.manual_seed(0)
    config = kind()
    for rows, columns in ((slice(0, 32), slice(None)), (slice(None), slice(32, 64))):
        whole, part = _layer(config), _layer(config)
        part.weight = nn.Parameter(whole.weight.detach()[rows, columns].clone())
        inputs = torch.randn(2, 32, part.weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
        bias = torch.randn(part.weight.shape[0], dtype=torch.bfloat16)
        found = linear(part, inputs, bias)
        assert torch.equal(found, part(inputs) + bias)
        gradient = torch.randn_like(found)
        assert torch.equal(torch.autograd.grad(found, part.weight, gradient)[0], _gradient(part, inputs, gradient))


def scales(made):
    """The scales of every converted weight: the one computed for all, torchao's two, and the whole weight's own."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp as torchaos

    with open_world(joined(os.environ) or ALONE, accelerator="cpu", seed=0, deterministic=False) as world:
        mesh = build_mesh(made.layout, "cpu")
        built = assemble.assemble(made, world, mesh)
        found = {}
        layers = float8._layers(built.model)
        names = [name for name, module in built.model.named_modules() if module in set(layers)]
        for name, layer in zip(names, layers, strict=True):
            assert layer.weight._local_tensor._precomputed_scale is None
            found[name] = [None, None, None, None]
            if made.layout.tensor == 1 and made.layout.replicate == 1:
                # As a gather without a scale computes it.
                _, (scale,) = layer.weight._local_tensor.fsdp_pre_all_gather(mesh.data_parallel)
                found[name][1] = scale.item()
            largest = layer.weight.detach().full_tensor().abs().max().double()
            found[name][3] = float((448 / largest).float())
        if made.layout.tensor == 1:
            torchaos(built.model)
            for name, layer in zip(names, layers, strict=True):
                found[name][2] = layer.weight._local_tensor._precomputed_scale.item()
        built.after_update()
        for name, layer in zip(names, layers, strict=True):
            found[name][0] = layer.weight._local_tensor._precomputed_scale.item()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        {"shard": 2},
        pytest.param({"shard": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param({"replicate": 2, "shard": 2}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "shard": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_scales_are_those_of_whole_weights(pool, tmp_path, layout):
    made = tiny.recipe(tmp_path, precision=Float8Tensorwise(), **layout)
    told = pool.run(made.world, scales, made)
    assert sum(len(each) for each in told[:: made.world // made.layout.pipeline]) == 14
    for each in told:
        for name, (computed, *others) in each.items():
            assert {computed} == {other for other in others if other is not None}, name


class Beginner(parity.Tracer):
    """Also keeps the parameters that the first step has used."""

    def with_gradients(self, step, model):
        super().with_gradients(step, model)
        if not hasattr(self, "begun"):
            self.begun = parity._everywhere(dict(model.named_parameters()), self._layout)


def begun(made, run):
    """The parameters with which an attempt begins, and its trace."""
    observer = Beginner(made.layout)
    tiny.as_rank(made, run, observer)
    return observer.begun, observer.trace


RESUMES = [
    (Bf16(), {"shard": 2}, Float8Tensorwise(), {"pipeline": 2}),
    (Float8Tensorwise(), {"pipeline": 2}, Float8Rowwise(), {"shard": 2}),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "layout", "after", "other"), RESUMES, ids=lambda each: getattr(each, "kind", str(each))
)
def test_a_run_goes_on_under_another_layout_and_precision(pool, tmp_path, before, layout, after, other):
    """From the very bits that were saved, whichever precision reads them."""
    keys = {"kv_heads": 4, "global_batch": 4, "microbatch": 1, "eps": 1e-6}
    first = tiny.recipe(tmp_path, precision=before, steps=2, name="first", **keys, **layout)
    run = tiny.begin(first)
    saved = pool.run(first.world, tiny.traced, first, run)[0]
    second = tiny.recipe(tmp_path, precision=after, steps=3, name="second", load_from=str(run.path), **keys, **other)
    parameters, trace = pool.run(second.world, begun, second, tiny.begin(second))[0]
    assert len(trace.losses) == 1
    assert same_bits(parameters, saved.parameters)


def test_a_checkpoint_knows_nothing_of_float8(pool, tmp_path):
    made = tiny.recipe(tmp_path, precision=Float8Tensorwise(), steps=2, shard=2)
    run = tiny.begin(made)
    trained = pool.run(2, tiny.traced, made, run)[0]
    folder = latest(run.checkpoints)
    assert not any(b"torchao" in path.read_bytes() for path in folder.iterdir())
    # As `titanlab generate` loads it: a plain model of one process.
    with open_world(ALONE, accelerator="cpu", seed=0, deterministic=False):
        model = generate._load(made, folder, CPU)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(torch.equal(p.detach(), trained.parameters[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("error", [ImportError("No module\nnamed x"), AttributeError("no mx_mm")])
def test_a_torchao_without_the_prototype_is_one_line(monkeypatch, error):
    """A prototype changes its names from version to version."""

    def missing(name):
        raise error

    monkeypatch.setattr(float8, "import_quietly", missing)
    with pytest.raises(ConfigError) as caught:
        Mxfp8().implementation().convert(nn.ModuleDict({"wq": nn.Linear(64, 32)}), CPU)
    said = str(caught.value)
    assert said.startswith("precision=mxfp8: this torchao lacks the prototype (")
    assert "\n" not in said
    assert said.endswith("; pip install torchao>=0.18, or try precision=bf16")


def importing():
    """Whether torchao is imported before it is used and after, what is left disabled of logging, and what is said."""
    with tempfile.TemporaryFile() as said:
        kept = [os.dup(stream) for stream in (1, 2)]
        try:
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                before = "torchao" in sys.modules
                float8._multiplier(emulate=True)
                float8.float8_product(None, None)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
        said.seek(0)
        return before, "torchao" in sys.modules, logging.root.manager.disable, said.read().decode()


def test_importing_is_quiet_and_lazy():
    # In a worker of its own, which has imported torch and titanlab, but nothing that a test imports.
    workers = Pool(1)
    try:
        assert workers.run(1, importing) == [(False, True, 0, "")]
    finally:
        workers.close()


def _layer(config):
    """A layer of 64 × 64, as the recipe exchanges it, in bfloat16 and without FSDP2's kind of weight."""
    holder = nn.ModuleDict({"wq": nn.Linear(64, 64, bias=False, device="meta")})
    if isinstance(config, Float8Tensorwise):
        config = Float8Tensorwise(all_gather=False)
    config.implementation().convert(holder, CPU)
    layer = holder["wq"]
    layer.weight = nn.Parameter(torch.randn(64, 64).bfloat16())
    return layer


def _gradient(layer, inputs, gradient):
    return torch.autograd.grad(layer(inputs), layer.weight, gradient)[0]
