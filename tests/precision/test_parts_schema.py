"""Parts in float32, as a person names them: which there are, which may not be named, and what a smaller model keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import tiny
from titanlab.errors import ConfigError
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.precision.cast_schema import Bf16, check_bf16, check_reduce, parts_within


def checked(parts, **given):
    """The line that refuses the parts; None: they are taken."""
    recipe = tiny.recipe("runs", **given)
    try:
        Bf16(fp32_parts=parts).check(setting(recipe))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        ([], []),
        (["embedding", "norm", "head"], None),
        (["layers.0", "layers.1"], None),
        (["layers.1", "layers.2", "layers.10"], ["layers.1"]),
        (["layers.*"], None),
        (
            ["layers.2.feed_forward.w1", "layers.0.feed_forward.w1", "feed_forward.w1"],
            ["layers.0.feed_forward.w1", "feed_forward.w1"],
        ),
        # Patterns of blocks.
        (["layers.[01]", "layers.[1-9]"], None),
        (["layers.[2-9]", "layers.??", "layers.1?", "layers.?"], ["layers.?"]),
        (["layers.2*", "layers.1*"], ["layers.1*"]),
    ],
)
def test_of_a_smaller_model_only_blocks_that_it_has_are_named(names, kept):
    notes = []
    assert parts_within(2, tuple(names), key="precision.skip", note=notes.append) == tuple(
        names if kept is None else kept
    )
    assert notes == ([] if kept in (None, names) else ["precision.skip names blocks that the reduced model lacks"])


def test_a_reduced_precision_keeps_its_other_fields():
    notes = []
    reduced = Bf16(reduce="bf16", fp32_parts=["norm", "layers.[4-7]"]).reduced(layers=2, note=notes.append)
    assert reduced == Bf16(reduce="bf16", fp32_parts=["norm"])
    assert len(notes) == 1


def test_a_dtype_of_reductions_is_one_of_those_known():
    assert check_reduce("fp32", ("fp32", "bf16"), "why") is None
    with pytest.raises(ConfigError, match="^precision.reduce=fp8: why; try fp32 or bf16$"):
        check_reduce("fp8", ("fp32", "bf16"), "why")


@pytest.mark.parametrize(
    "parts", [[], ["embedding"], ["head"], ["norm"], ["layers.1"], ["layers.*"], ["*"], ["norm", "norm"]]
)
def test_pieces_and_patterns_of_the_model_are_taken(parts):
    assert checked(parts) is None


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (["layers.2"], "no piece of the model is called layers.2"),
        (["norm", "Head"], "no piece of the model is called Head"),
        ([""], "no piece of the model is called nothing"),
        (["layers.[5-9]"], "no piece of the model is called layers.[5-9]"),
    ],
)
def test_what_the_model_lacks_is_one_line_with_what_it_has(parts, shown):
    said = checked(parts)
    assert said.startswith(f"precision.fp32_parts=[{','.join(parts)}]: {shown}; choose from embedding, head, ")
    assert "layers.*" in said


@pytest.mark.parametrize(
    ("parts", "taken"),
    [(["embedding"], False), (["head"], False), (["embedding", "head"], True), (["norm"], True), (["*"], True)],
)
def test_a_shared_table_has_one_dtype(parts, taken):
    said = checked(parts, tied_embeddings=True)
    if taken:
        assert said is None
    else:
        assert said.endswith("; name both, embedding and head, or neither")


def test_a_model_without_pieces_has_no_parts():
    made = setting(tiny.recipe("runs"))
    bare = replace(made, model=replace(made.model, pieces=()))
    Bf16().check(bare)
    with pytest.raises(ConfigError, match=r"^precision.fp32_parts=\[norm\]: the model does not say what .*; try \[\]$"):
        Bf16(fp32_parts=["norm"]).check(bare)


@pytest.mark.parametrize(
    ("accelerator", "device", "taken"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", True),
        ("cuda", "NVIDIA A100-SXM4-80GB", True),
        ("cuda", "Tesla V100-SXM2-16GB", False),
        ("cuda", "Tesla T4", False),
        # Of a device that is not in the table nothing is known.
        ("cuda", "Quantum 9000", True),
        ("cpu", "Tesla T4", True),
    ],
)
def test_bfloat16_needs_a_gpu_that_multiplies_in_it(accelerator, device, taken):
    given = replace(setting(tiny.recipe("runs")), accelerator=accelerator, device=device)
    if taken:
        check_bf16(given, "bf16")
        return
    with pytest.raises(ConfigError) as caught:
        check_bf16(given, "bf16")
    rule = f"{device} has no units for bfloat16: they came with compute capability 8.0"
    assert str(caught.value) == f"precision=bf16: {rule}; try precision=fp16 or precision=fp32"
