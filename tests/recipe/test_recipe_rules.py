"""Rules that cross the groups of a recipe: what breaks one is refused, with the nearest value that does not."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import pytest

from tests import tiny
from titanlab.data import Synthetic
from titanlab.errors import ConfigError
from titanlab.recipe import Cluster, Recipe, check, resolve
from titanlab.techniques.model import attention as flash3
from titanlab.techniques.precision.contract import Formats, PrecisionConfig


def resolved(made: Recipe, **given: object) -> Recipe:
    return resolve(replace(made, world=None, **given), world=None, accelerator="cpu", device="cpu")


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
