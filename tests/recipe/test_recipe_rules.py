"""Rules that cross the groups of a recipe: kernels, layouts of models of other packages, and this host's memory.

tests/cli/test_refusals.py has the lines of other layouts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import replace

import pytest

from tests import tiny
from tests.prove.test_experts import MODELS
from tests.refusals import refusal
from titanlab.costs import Layout, ModelAccount
from titanlab.data import Synthetic
from titanlab.distributed import Host
from titanlab.errors import ConfigError
from titanlab.parallelism import Parallelism
from titanlab.recipe import Cluster, Recipe, Training, check, check_host_memory, resolve
from titanlab.recipe.recipe import needs_whole_logits
from titanlab.recipe.recipe_rules import PROCESS_BYTES, check_context, check_pipeline, check_tensor
from titanlab.records import identify
from titanlab.techniques.model import attention as flash3
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.precision.float8_schema import Mxfp8
from titanlab.techniques.schedule.published_schema import GPipe


def resolved(made: Recipe, **given: object) -> Recipe:
    return resolve(replace(made, world=None, **given), world=None, accelerator="cpu", device="cpu")


@pytest.mark.parametrize(
    ("attention", "context", "is_refused"),
    [
        *((kernel, 1, False) for kernel in ("auto", "math", "efficient")),
        *((kernel, 1, True) for kernel in ("cudnn", "flash", "flash3")),
        *((kernel, 2, kernel == "cudnn") for kernel in ("auto", "flash", "flash3", "cudnn")),
    ],
)
def test_document_masks_need_a_kernel_that_has_them_on_a_gpu(tmp_path, monkeypatch, attention, context, is_refused):
    monkeypatch.setattr(flash3, "flash3_missing", lambda capability: None)
    made = tiny.recipe(tmp_path, context=context, bf16=True, data=Synthetic(vocab_size=256, document_mask=True))
    cluster = Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")
    made = resolved(made, model=replace(made.model, attention=attention), cluster=cluster)
    rule = f"cannot mask documents with context={context}, and data.document_mask is on; try auto"
    refusal = pytest.raises(ConfigError, match=f"^model.attention={attention}: {rule}")
    with refusal if is_refused else contextlib.nullcontext():
        check(made)


MODEL = ModelAccount(
    parameters={
        "table.weight": (10, 8),
        "layers.0.up.weight": (12, 8),
        "layers.0.down.weight": (8, 12),
        "layers.0.down.bias": (8,),
        "layers.0.norm.weight": (8,),
        "head.weight": (10, 8),
    },
    embedding="table.weight",
    tied={},
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=2,
    dim=8,
    vocab_size=10,
    pieces=("table", "layers.0", "head"),
    attention="attention",
    tensor_plan={
        "table": "embedding",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "layers.*.norm": "norm",
        "head": "head",
    },
)


def check_layout(changes, **degrees):
    model, layout, config = replace(MODEL, **changes), Layout(**degrees), Parallelism(**degrees)
    check_context(layout, model, seq_len=16, kernel="auto")
    check_tensor(layout, config, model, seq_len=16, microbatch=1)
    check_pipeline(layout, config, model, GPipe(), microbatches=1)


@pytest.mark.parametrize(
    ("changes", "degrees", "complaint"),
    [
        (
            {"tensor_plan": {}},
            {"tensor": 2},
            "the model has no plan of how to cut its layers; try parallelism.tensor=1",
        ),
        (
            {"parameters": {"other.weight": (8, 8)}},
            {"tensor": 2},
            "the model's plan says nothing about other.weight; try parallelism.tensor=1, or name it in the model's",
        ),
        (
            {"parameters": {"layers.0.down.weight": (8, 6)}},
            {"tensor": 4},
            "must divide the 6 columns of layers.0.down.weight",
        ),
        ({}, {"tensor": 2, "shard": 3}, "parallelism.shard=3: with tensor=2, cannot cut the 10 rows of table.weight"),
        # The degrees that work are found without trying all smaller ones.
        (
            {},
            {"tensor": 2, "shard": 2_000_000_001},
            "nor its 8 columns into 2000000001; try parallelism.shard=4 or 8, or parallelism.tensor=1",
        ),
        ({"attention": ""}, {"context": 2}, "the model does not say where its attention is; try parallelism.context=1"),
        ({"pieces": ()}, {"pipeline": 2}, "the model does not say where it may be cut; try parallelism.pipeline=1"),
    ],
)
def test_a_layout_that_the_model_does_not_allow(changes, degrees, complaint):
    assert complaint in refusal(check_layout, changes, **degrees)


def test_experts_that_neither_they_nor_their_rows_divide(tmp_path):
    narrow = replace(MODELS["mixtral"], ffn_dim=45)
    told = refusal(tiny.recipe, tmp_path, model=narrow, expert=2, shard=4)
    rule = "leaves 3 experts to 2 shards of FSDP2, which do not divide them nor the 45 rows of"
    assert told.startswith(f"parallelism.expert=2: {rule}")


def test_the_axis_of_experts_multiplies_nothing_and_has_its_name(tmp_path):
    made = tiny.recipe(tmp_path, model=MODELS["qwen3"], shard=2, tensor=2, expert=4)
    assert (made.world, made.layout.label, made.layout.expert_shard) == (4, "dp_s2·tp2·ep4", 1)


GIB = 2**30


def with_memory(gib: float) -> Host:
    return Host(accelerator="cpu", device="cpu", count=2, memory_bytes=int(gib * GIB))


def of_size(tmp_path, **given):
    return replace(tiny.recipe(tmp_path), model=Llama(**{**vars(tiny.recipe(tmp_path).model), **given}))


def test_parameters_and_gradients_have_to_fit(tmp_path):
    recipe = of_size(tmp_path, dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008, vocab_size=32000)
    # Llama 2 7B (arXiv 2307.09288): 6.74 billion parameters, in 4 bytes with their gradients 50.2 GiB.
    check_host_memory(recipe, with_memory(51), processes=1)
    with pytest.raises(ConfigError, match="6,738,415,616 parameters and their gradients take at least 50.2 GiB here"):
        check_host_memory(recipe, with_memory(50), processes=1)


def test_sharding_keeps_one_copy_and_replication_makes_several(tmp_path):
    large = {"dim": 2048, "ffn_dim": 8192, "layers": 8}
    recipes = {
        axis: replace(tiny.recipe(tmp_path, **{axis: 4}), model=Llama(**{**vars(tiny.recipe(tmp_path).model), **large}))
        for axis in ("shard", "replicate")
    }
    check_host_memory(recipes["shard"], with_memory(8), processes=4)
    with pytest.raises(ConfigError, match="parameters and their gradients"):
        check_host_memory(recipes["replicate"], with_memory(8), processes=4)
    # torchrun may have started one of four processes here.
    check_host_memory(recipes["replicate"], with_memory(8), processes=1)


def test_processes_have_to_fit(tmp_path):
    recipe = tiny.recipe(tmp_path, shard=12)
    check_host_memory(recipe, with_memory(1), processes=12)
    with pytest.raises(ConfigError, match=r"world=12: processes take at least 0.8 GiB, and this machine has 0.5 GiB"):
        check_host_memory(
            recipe, Host(accelerator="cpu", device="cpu", count=2, memory_bytes=8 * PROCESS_BYTES), processes=12
        )


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"seq_len": 10**9}, "training.seq_len"),
        ({"global_batch": 10**9}, "training.global_batch"),
        ({"global_batch": 10**9, "microbatch": 10**8}, "training.microbatch"),
    ],
)
def test_a_microbatch_has_to_fit(tmp_path, training, key):
    recipe = replace(tiny.recipe(tmp_path), training=Training(**training))
    with pytest.raises(ConfigError, match="one microbatch is .* tokens, which take at least") as refused:
        check_host_memory(recipe, with_memory(24), processes=1)
    assert refused.value.key == key


def test_nothing_is_said_of_a_gpu_and_of_a_host_that_is_not_known(tmp_path):
    recipe = of_size(tmp_path, dim=65536, layers=200)
    check_host_memory(recipe, replace(with_memory(1), memory_bytes=None), processes=1)
    on_gpu = replace(recipe, cluster=Cluster(accelerator="cuda", device="NVIDIA H200"))
    check_host_memory(on_gpu, with_memory(1), processes=1)


# Chunks of the loss in a recipe: the number that it has, and what is refused


def large(folder, **given):
    """A recipe with 1.5 GiB of logits: 4,096 tokens and a vocabulary of 100,000."""
    model = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, vocab_size=100_000)
    data = tiny.Synthetic(vocab_size=100_000)
    return tiny.recipe(folder, model=model, data=data, global_batch=8, seq_len=512, **given)


def hash_of(made):
    return identify(made, data="tiny", hardware="cpu").sha256


def test_a_resolved_recipe_has_the_number(tmp_path):
    assert large(tmp_path).training.loss_chunk == 1024
    # Half of the tokens, or half of the columns, are less than 1 GiB.
    assert large(tmp_path, context=2).training.loss_chunk == 0
    assert large(tmp_path, tensor=2).training.loss_chunk == 0
    assert large(tmp_path, microbatch=4).training.loss_chunk == 0
    assert large(tmp_path, loss_chunk=0).training.loss_chunk == 0
    assert large(tmp_path, loss_chunk=100).training.loss_chunk == 100
    assert tiny.recipe(tmp_path).training.loss_chunk == 0


def test_only_runs_with_chunks_have_other_names(tmp_path):
    small = tiny.recipe(tmp_path)
    assert (
        hash_of(small)
        == hash_of(tiny.recipe(tmp_path, loss_chunk=0))
        == hash_of(tiny.recipe(tmp_path, loss_chunk=None))
    )
    assert "loss_chunk" not in str(identify(small, data="tiny", hardware="cpu").content)
    assert (
        hash_of(large(tmp_path)) == hash_of(large(tmp_path, loss_chunk=1024)) != hash_of(large(tmp_path, loss_chunk=0))
    )


class Headless(Llama):
    """A model from elsewhere whose account does not name the head."""

    def account(self):
        return dataclasses.replace(super().account(), head="")


def test_a_model_without_a_named_head_has_whole_logits(tmp_path):
    made = large(tmp_path, loss_chunk=100)
    model = Headless(**{field.name: getattr(made.model, field.name) for field in dataclasses.fields(Llama)})
    made = dataclasses.replace(made, model=model)
    assert dataclasses.replace(made, training=dataclasses.replace(made.training, loss_chunk=-1)).loss_chunk == 0
    with pytest.raises(ConfigError, match="loss_chunk=100: the model does not name its head"):
        check(made)


def test_whole_logits_that_something_else_needs(tmp_path):
    with pytest.raises(ConfigError, match="loss_chunk=64: loss_parallel=false gathers whole logits"):
        tiny.recipe(tmp_path, tensor=2, loss_parallel=False, loss_chunk=64)
    assert tiny.recipe(tmp_path, tensor=2, loss_parallel=False).loss_chunk == 0
    made = dataclasses.replace(tiny.recipe(tmp_path, loss_chunk=64), precision=Mxfp8(skip=["wk"]))
    assert "computes both of its gradients at once" in needs_whole_logits(made)[0]
    assert needs_whole_logits(dataclasses.replace(made, precision=Mxfp8())) is None
