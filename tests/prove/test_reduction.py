"""Reduced recipes keep their structure in small layouts and sizes, share them where they train the same, and pass every rule."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import tiny
from tests.prove.parity_rows import SCHEDULES
from tests.prove.test_proof import large
from titanlab.checkpoint.schema import AsyncPinned
from titanlab.costs import AXES, Layout
from titanlab.errors import ConfigError
from titanlab.prove import Candidate, plan_proofs, reduce_all
from titanlab.prove.reduction import folded
from titanlab.techniques.ac.recomputation_schema import SelectiveLayer
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.llama_schema import Qwen3
from titanlab.techniques.optimizer.contract import Schedule
from titanlab.techniques.optimizer.optimizers_schema import AdamW8bit
from titanlab.techniques.precision.contract import Formats, PrecisionConfig
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8Tensorwise
from titanlab.techniques.schedule.csv_schema import CsvSchedule
from titanlab.techniques.schedule.published_schema import DualPipeV, GPipe, Interleaved1F1B


def reduced(*candidates, most=16, inductor=False):
    return plan_proofs(candidates, steps=3, runs="runs", most=most, inductor=inductor)


def changed(candidate, **groups):
    return Candidate(run=candidate.run, recipe=dataclasses.replace(candidate.recipe, **groups))


def test_structure_stays_and_sizes_shrink(tmp_path):
    candidate = large(
        tmp_path, shard=8, tensor=8, pipeline=8, microbatch=1, global_batch=256, pipeline_schedule=Interleaved1F1B()
    )
    ((recipe, notes),) = [(made.recipe, made.notes) for made in reduced(candidate)]
    assert recipe.layout.label == "dp_s2·tp2·pp2"
    assert recipe.schedule == Interleaved1F1B()
    # Two stages a rank, and as many microbatches as the schedule has rounds for.
    assert (recipe.model.layers, recipe.microbatches, recipe.microbatch) == (4, 4, 1)
    # One key/value head a process, as in the real size: 8 of them for 8 processes.
    assert (recipe.model.heads, recipe.model.kv_heads) == (8, 2)
    assert (recipe.model.rope_factor, recipe.model.rope_theta) == (8.0, 500000.0)
    assert recipe.model.account().parameter_count < 1_000_000
    assert recipe.data.gaps
    assert recipe.training.max_grad_norm == 0.1
    assert not notes
    for tensor, kv_heads in ((4, 8), (8, 8)):
        (made,) = reduced(large(tmp_path, tensor=tensor))
        # A process keeps two key/value heads where it has two or more.
        assert (made.recipe.model.kv_heads, made.recipe.layout.tensor) == (kv_heads, tensor)


def test_document_masks_stay_with_a_few_documents_in_a_sequence(tmp_path):
    candidate = large(tmp_path, context=4)
    (plain,) = reduced(candidate)
    (masked,) = reduced(changed(candidate, data=dataclasses.replace(candidate.recipe.data, document_mask=True)))
    assert not plain.recipe.data.document_mask
    assert masked.recipe.data.document_mask
    assert masked.recipe.data.document_tokens == masked.recipe.training.seq_len // 4
    assert masked.recipe.data.gaps


def test_an_uneven_vocabulary_stays_uneven(tmp_path):
    (made,) = reduced(large(tmp_path, tensor=4, vocab_size=128254))
    (even,) = reduced(large(tmp_path, tensor=4))
    assert (made.recipe.model.vocab_size % 2, even.recipe.model.vocab_size % 4) == (1, 0)


def test_recipes_of_one_model_and_data_get_the_same_sizes(tmp_path):
    layouts = [{"shard": 2}, {"tensor": 4}, {"context": 4}, {"pipeline": 4, "microbatch": 1}, {"replicate": 8}]
    made = reduced(*(large(tmp_path, **layout) for layout in layouts))
    assert len({repr(each.recipe.model) for each in made}) == 1
    assert len({(each.recipe.training.seq_len, each.recipe.training.global_batch) for each in made}) == 1
    # Another batch is another training, with sizes of its own.
    other = large(tmp_path, shard=2, global_batch=32)
    assert reduced(large(tmp_path, pipeline=4, microbatch=1), other)[1].recipe.model.layers == 2


def test_gradients_are_reduced_as_often_as_in_the_real_size(tmp_path):
    each, last, other = (
        reduced(large(tmp_path, shard=2, **given))[0].recipe
        for given in ({"microbatch": 1}, {"microbatch": 1, "reduce_gradients": "last"}, {})
    )
    assert (each.microbatches, each.reduces_each) == (2, True)
    assert (last.microbatches, last.reduces_each) == (2, False)
    assert not other.reduces_each


def test_what_a_cpu_lacks_is_replaced_and_said(tmp_path):
    candidate = large(tmp_path, shard=2, tensor=2)
    recipe = candidate.recipe
    candidate = changed(
        candidate,
        model=dataclasses.replace(recipe.model, attention="cudnn"),
        parallelism=dataclasses.replace(recipe.parallelism, async_tensor=True),
        precision=Float8Tensorwise(emulate="false", fp32_parts=["layers.31"], skip=["output", "layers.30"]),
        compile=Compile(blocks=True, loss=True, mode="max-autotune-no-cudagraphs"),
        ac=SelectiveLayer(every=4),
    )
    (made,) = reduced(candidate)
    assert [note.partition(" ")[0] for note in made.notes] == [
        "model.attention=cudnn",
        "parallelism.async_tensor",
        "precision=float8_tensorwise",
        "precision.skip",
        "precision.fp32_parts",
        "ac.every=4",
        "compile.backend=inductor:",
    ]
    assert (made.recipe.compile.backend, made.recipe.compile.mode) == ("aot_eager", "default")
    assert (made.recipe.precision.skip, made.recipe.precision.fp32_parts) == (("output",), ())
    (kept,) = reduced(candidate, inductor=True)
    assert kept.recipe.compile.backend == "inductor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EverySecondBit(PrecisionConfig):
    """A precision of another package, with a field that has the name of another precision's."""

    kind: str = "every_second_bit"
    skip: int = 2

    def formats(self):
        return Formats(master="float32", compute="float32", reduce="float32")

    def reduced(self, *, layers, note):
        note(f"precision.skip={self.skip} for {layers} blocks")
        return dataclasses.replace(self, skip=1)


def test_another_packages_precision_says_itself_how_it_is_reduced(tmp_path):
    (made,) = reduced(changed(large(tmp_path, shard=2), precision=EverySecondBit()))
    assert made.recipe.precision == EverySecondBit(skip=1)
    assert made.notes == ("precision.skip=2 for 2 blocks",)


def test_averages_of_few_bits_stay_so(tmp_path):
    candidate = large(tmp_path, shard=2)
    candidate = changed(candidate, optimizer=AdamW8bit(lr=1e-4, schedule=Schedule(warmup_steps=200)))
    (made,) = reduced(candidate)
    assert made.recipe.optimizer.block_size == 16
    assert made.recipe.optimizer.schedule.warmup_steps == 1


def test_heads_of_their_own_width_stay_so(tmp_path):
    recipe = large(tmp_path, shard=2, tensor=2).recipe
    for heads, dim in ((16, 1024), (32, 4096), (64, 5120)):
        model = Qwen3(dim=dim, layers=28, heads=heads, kv_heads=8, ffn_dim=3072, vocab_size=151936)
        (made,) = reduced(Candidate(run="qwen3", recipe=dataclasses.replace(recipe, model=model)))
        small = made.recipe.model
        assert small.kind == "qwen3"
        assert (small.attention_dim > small.dim) == (model.attention_dim > model.dim)
        assert (small.attention_dim == small.dim) == (model.attention_dim == model.dim)


def test_a_schedule_of_a_file_keeps_its_ranks_and_microbatches(tmp_path):
    given = {"pipeline": 2, "microbatch": 1, "pipeline_schedule": SCHEDULES["csv"]}
    (made,) = reduced(large(tmp_path, shard=4, **given))
    assert made.recipe.layout.label == "dp_s4·pp2"
    assert made.recipe.microbatches == 4
    recipe = dataclasses.replace(made.recipe, schedule=CsvSchedule(file="elsewhere.csv"))
    with pytest.raises(ConfigError, match=r"elsewhere.csv"):
        reduced(Candidate(run="csv", recipe=recipe))


def test_what_cannot_be_folded_or_reduced_is_an_error_of_one_line(tmp_path):
    many = large(tmp_path, pipeline=2, pipeline_schedule=Interleaved1F1B(stages_per_rank=40), layers=90, microbatch=1)
    with pytest.raises(ConfigError, match="schedule=interleaved_1f1b: makes 80 stages of 2 ranks"):
        reduced(many)


def test_a_rehearsal_saves_as_the_recipe_does(tmp_path):
    candidate = large(tmp_path, shard=2, every=500, validate_every=100)
    (rehearsal,) = reduce_all([candidate], steps=3, runs="runs", most=16, saves=True)
    recipe = rehearsal.recipe
    assert (recipe.checkpoint.kind, recipe.checkpoint.every, recipe.training.validate_every) == ("sync", 2, 2)
    pinned = changed(candidate, checkpoint=AsyncPinned(every=500))
    (rehearsal,) = reduce_all([pinned], steps=3, runs="runs", most=16, saves=True)
    assert rehearsal.recipe.checkpoint.kind == "async"
    assert rehearsal.notes == ("checkpoint=async_pinned copies from GPUs: async",)
    elsewhere = changed(candidate, checkpoint=AsyncPinned(every=500, folder="memory://checkpoints"))
    (rehearsal,) = reduce_all([elsewhere], steps=3, runs="runs", most=16, saves=True)
    assert rehearsal.recipe.checkpoint.folder is None
    assert rehearsal.notes[1:] == ("checkpoint.folder is not used: the checkpoint is written beside the run",)
    (proof,) = reduced(candidate)
    assert (proof.recipe.checkpoint.kind, proof.recipe.training.validate_every) == ("off", 0)


def test_a_small_model_of_another_package_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("titanlab.techniques.model.llama_schema.Llama.reduced", lambda self, sizes: None)
    recipe = tiny.recipe(tmp_path, shard=2)
    (made,) = reduced(Candidate(run="small", recipe=recipe))
    assert made.recipe.model == recipe.model
    assert made.recipe.data.vocab_size == recipe.model.vocab_size


@pytest.mark.parametrize(
    ("given", "layers", "microbatches"),
    [
        ({}, 2, 1),
        ({"shard": 8}, 2, 1),
        ({"shard": 2, "tensor": 4}, 2, 1),
        ({"context": 4, "tensor": 2}, 2, 1),
        ({"shard": 3, "global_batch": 12}, 2, 1),
        ({"shard": 8, "tensor": 2, "precision": Float8Rowwise()}, 2, 1),
        ({"shard": 4, "tensor": 2, "precision": Float8Tensorwise()}, 2, 1),
        # Accumulation stays accumulation, of two.
        ({"microbatch": 1}, 2, 2),
        ({"microbatch": 8}, 2, 2),
        # Each stage has a block, and few stages have two; two microbatches for each rank, if there are so many.
        ({"pipeline": 2, "microbatch": 1}, 4, 4),
        ({"pipeline": 4, "microbatch": 1}, 4, 8),
        ({"pipeline": 4, "microbatch": 4}, 4, 4),
        ({"pipeline": 4, "microbatch": 8, "pipeline_schedule": GPipe()}, 4, 2),
        ({"pipeline": 4, "microbatch": 1, "global_batch": 64, "pipeline_schedule": DualPipeV()}, 8, 8),
        ({"pipeline": 2, "microbatch": 1, "pipeline_schedule": Interleaved1F1B(stages_per_rank=4)}, 8, 4),
    ],
)
def test_sizes_are_the_least_that_the_layout_can_cut(tmp_path, given, layers, microbatches):
    (made,) = reduced(large(tmp_path, **given))
    recipe = made.recipe
    model, layout, multiple = recipe.model, recipe.layout, recipe.precision.multiple
    assert (model.layers, recipe.microbatches, model.vocab_size % (layout.tensor * layout.fsdp)) == (
        layers,
        microbatches,
        0,
    )
    assert (model.kv_heads % layout.tensor, model.heads % model.kv_heads, model.dim // model.heads % 2) == (0, 0, 0)
    assert model.dim >= 64
    assert layout.tensor == 1 or model.dim % (layout.fsdp * multiple) == 0
    # Every process's part of a matrix has a multiple of so many rows.
    assert model.dim // model.heads * model.kv_heads // layout.tensor % multiple == 0
    assert model.ffn_dim % (layout.tensor * layout.fsdp * multiple) == 0
    seq_len = recipe.training.seq_len
    assert seq_len % (2 * layout.context) == seq_len % (layout.context * layout.tensor) == 0
    assert recipe.training.global_batch % layout.data == 0
    if given == {}:
        assert (model.kv_heads, model.vocab_size, model.ffn_dim, seq_len) == (2, 256, 2 * model.dim, 32)
        assert recipe.training.global_batch == 4


def test_every_axis_of_a_large_layout_keeps_a_degree_of_two():
    for layout in (Layout(), Layout(shard=3, tensor=4), Layout(pipeline=16)):
        assert folded(layout) == [layout]
    assert folded(Layout(shard=8, tensor=8, pipeline=8)) == [Layout(shard=2, tensor=2, pipeline=2)]
    assert folded(Layout(shard=512)) == [Layout(shard=2)]


def test_axes_that_do_not_fit_together_get_a_second_layout():
    real = Layout(replicate=2, shard=4, context=2, tensor=8, pipeline=4)
    first, second = folded(real)
    assert first == Layout(pipeline=2, tensor=2, context=2, shard=2)
    assert second == Layout(replicate=2, pipeline=2, tensor=2, context=2)
    assert [layout.world for layout in folded(real, most=4)] == [4, 4, 4]


def test_a_degree_that_cannot_be_changed_stays():
    fixed = {"pipeline": "schedule=csv is a file for so many ranks"}
    assert folded(Layout(pipeline=8, shard=4, tensor=4), fixed=fixed) == [
        Layout(pipeline=8, tensor=2),
        Layout(pipeline=8, shard=2),
    ]
    with pytest.raises(ConfigError, match="pipeline=32: cannot be folded to 16 processes: schedule=csv is a file"):
        folded(Layout(pipeline=32), fixed=fixed)
    with pytest.raises(ConfigError, match="pipeline=2: cannot be folded to 1 processes"):
        folded(Layout(pipeline=2), most=1)


@given(st.fixed_dictionaries({axis: st.integers(1, 9) for axis in AXES}), st.integers(2, 40))
def test_folded_layouts_cover_all_axes_within_the_limit(degrees, most):
    real = Layout(**degrees)
    layouts = folded(real, most=most)
    assert all(layout.world <= most for layout in layouts)
    assert all(getattr(layout, axis) <= degrees[axis] for layout in layouts for axis in AXES)
    for axis, degree in degrees.items():
        assert (degree > 1) == any(getattr(layout, axis) > 1 for layout in layouts)
