"""Rules that cross the groups of a recipe: what breaks one is refused, with the nearest value that does not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest

from tests import tiny
from titanlab.data import Synthetic
from titanlab.errors import ConfigError
from titanlab.parallelism import Parallelism
from titanlab.recipe import Cluster, Recipe, check, check_all_but_data, resolve
from titanlab.recipe.recipe_rules import MOST_PROCESSES, setting
from titanlab.techniques.model import attention as flash3
from titanlab.techniques.precision.contract import Formats, PrecisionConfig


def resolved(made: Recipe, **given: object) -> Recipe:
    return resolve(replace(made, world=None, **given), world=None, accelerator="cpu", device="cpu")


@pytest.mark.parametrize("key", ["name", "sweep"])
@pytest.mark.parametrize(
    ("value", "cure"), [("a+b", "try a-b"), ("a/b", "try a-b"), ("..", "try run"), ("x" * 101, "try xx")]
)
def test_names_become_folders(tmp_path, key, value, cure):
    with pytest.raises(ConfigError) as caught:
        check(resolved(tiny.recipe(tmp_path), **{key: value}))
    assert (caught.value.key, caught.value.value) == (key, value)
    assert caught.value.cure.startswith(cure)


@pytest.mark.parametrize(("key", "value"), [("repeat", -1), ("seed", -1), ("seed", 2**63)])
def test_numbers_of_the_recipe_itself(tmp_path, key, value):
    made = replace(tiny.recipe(tmp_path), **{key: value})
    with pytest.raises(ConfigError, match=f"^{key}={value}: .*; try 0$"):
        check_all_but_data(made)


def test_a_batch_is_split_among_processes_and_microbatches(tmp_path):
    made = tiny.recipe(tmp_path)
    training = replace(made.training, global_batch=6, microbatch=None)
    with pytest.raises(ConfigError, match="^training.global_batch=6: must be a multiple of the 4 .*; try 8$"):
        check(resolved(made, training=training, parallelism=Parallelism(shard=4)))
    training = replace(made.training, global_batch=12, microbatch=5)
    with pytest.raises(ConfigError, match="^training.microbatch=5: must divide the 12 .*; try 4 or 6$"):
        check(resolved(made, training=training, parallelism=Parallelism(shard=1)))


def test_a_layout_has_a_limit_of_processes(tmp_path):
    degrees = Parallelism(replicate=MOST_PROCESSES * 2)
    training = replace(tiny.recipe(tmp_path).training, global_batch=MOST_PROCESSES * 2, microbatch=None)
    with pytest.raises(ConfigError, match="^world=2000000: a layout has at most 1,000,000 processes"):
        check_all_but_data(resolved(tiny.recipe(tmp_path), parallelism=degrees, training=training))


def test_offload_needs_shards(tmp_path):
    layout = Parallelism(shard=1, cpu_offload=True)
    with pytest.raises(ConfigError, match="^parallelism.cpu_offload=true: .*try parallelism.shard=2"):
        check(resolved(tiny.recipe(tmp_path), parallelism=layout))


@pytest.mark.parametrize(
    ("attention", "accelerator", "rule"),
    [
        ("cudnn", "cpu", "needs a GPU"),
        ("efficient", "cpu", "needs a GPU"),
        ("flash3", "cpu", "needs a GPU"),
        ("flash", "cuda", "computes in 16 bits only"),
        ("flash3", "cuda", "computes in 16 bits only"),
    ],
)
def test_kernels_of_attention_have_their_devices(tmp_path, attention, accelerator, rule):
    made = tiny.recipe(tmp_path)
    cluster = Cluster(accelerator=accelerator, device="NVIDIA H100 80GB HBM3" if accelerator == "cuda" else "cpu")
    with pytest.raises(ConfigError, match=f"^model.attention={attention}: {rule}"):
        check(resolved(made, model=replace(made.model, attention=attention), cluster=cluster))


@dataclass(frozen=True, kw_only=True)
class Exact(PrecisionConfig):
    """A precision of another package that computes in 32 bits."""

    kind: str = "exact"

    def formats(self) -> Formats:
        return Formats(master="float32", compute="float32", reduce="float32")


def test_kernels_of_16_bits_are_refused_in_every_precision_of_32(tmp_path):
    made = tiny.recipe(tmp_path)
    cluster = Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")
    with pytest.raises(ConfigError, match=r"^model.attention=flash: computes in 16 bits only"):
        check(resolved(made, model=replace(made.model, attention="flash"), cluster=cluster, precision=Exact()))


@pytest.mark.parametrize(
    ("device", "rule"),
    [
        (
            "NVIDIA H100 80GB HBM3",
            "is a kernel of the package flash_attn_interface, which is not installed; install Fl",
        ),
        ("NVIDIA B200", "is a kernel of Hopper .*, and this device has 10.0; try auto"),
        ("a device of tomorrow", "is a kernel of the package flash_attn_interface, which is not installed"),
    ],
)
def test_flash_attention_3_needs_its_package_and_a_hopper(tmp_path, device, rule):
    made = tiny.recipe(tmp_path, bf16=True)
    cluster = Cluster(accelerator="cuda", device=device)
    with pytest.raises(ConfigError, match=f"^model.attention=flash3: {rule}"):
        check(resolved(made, model=replace(made.model, attention="flash3"), cluster=cluster))


@pytest.mark.parametrize(
    ("attention", "context", "is_refused"),
    [
        ("auto", 1, False),
        ("math", 1, False),
        ("efficient", 1, False),
        ("cudnn", 1, True),
        ("flash", 1, True),
        ("flash3", 1, True),
        ("auto", 2, False),
        ("flash", 2, False),
        ("flash3", 2, False),
        ("cudnn", 2, True),
    ],
)
def test_document_masks_need_a_kernel_that_has_them_on_a_gpu(tmp_path, monkeypatch, attention, context, is_refused):
    monkeypatch.setattr(flash3, "flash3_missing", lambda capability: None)
    made = tiny.recipe(tmp_path, context=context, bf16=True, data=Synthetic(vocab_size=256, document_mask=True))
    cluster = Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")
    made = resolved(made, model=replace(made.model, attention=attention), cluster=cluster)
    rule = f"has no form for documents with context={context}, and data.document_mask is on; try auto"
    refusal = pytest.raises(ConfigError, match=f"^model.attention={attention}: {rule}")
    with refusal if is_refused else contextlib.nullcontext():
        check(made)


@pytest.mark.parametrize(("attention", "context"), [("efficient", 1), ("auto", 2)])
def test_flex_attention_has_no_narrow_heads(tmp_path, attention, context):
    data = Synthetic(vocab_size=256, document_mask=True)
    cluster = Cluster(accelerator="cuda", device="NVIDIA H100 80GB HBM3")
    made = tiny.recipe(tmp_path, context=context, data=data)
    narrow = replace(made.model, dim=32, heads=4, kv_heads=2)
    rule = "is FlexAttention with data.document_mask, which on a GPU needs heads of 16 or more, and this model's have 8"
    one = tiny.recipe(tmp_path, data=data)
    with pytest.raises(ConfigError, match=f"^model.attention=auto: {rule}; try efficient$"):
        check(resolved(one, model=narrow, cluster=cluster))
    check(resolved(made, model=replace(narrow, attention=attention), cluster=cluster))


def test_a_warm_up_longer_than_the_run_is_refused(tmp_path):
    made = tiny.recipe(tmp_path)
    schedule = replace(made.optimizer.schedule, warmup_steps=made.training.steps + 1)
    with pytest.raises(ConfigError, match="^optimizer.schedule.warmup_steps=.* is more than the .* steps of the run"):
        check(resolved(made, optimizer=replace(made.optimizer, schedule=schedule)))


def test_the_setting_is_what_options_see_of_a_recipe(tmp_path):
    made = tiny.recipe(tmp_path)
    seen = setting(made)
    assert (seen.layout, seen.seq_len, seen.microbatch) == (made.layout, made.training.seq_len, made.microbatch)
    assert seen.kinds["model"] == made.model.kind
    assert not seen.splits_backward
