"""`titanlab convert`: job configs of torchtitan as recipes that have the same model, layout, batch, precision and AC."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from titanlab.cli import main
from titanlab.cli.compose import compose
from titanlab.cli.convert import convert, read_job_config
from titanlab.recipe import Recipe, find_key, resolve
from titanlab.recipe.torchtitan import KEYS, OLDER_KEYS, OLDER_SECTIONS, WITHOUT_COUNTERPART, current_name

FILES = Path(__file__).parent / "torchtitan"
PAGE = Path(__file__).parents[2] / "docs" / "from-torchtitan.md"
LLAMA = {"rope_theta": 5e5, "rope_factor": 8.0}


def converted(path: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[Recipe, str]:
    """The recipe of the command that the verb prints, and what it prints below."""
    assert main(["convert", str(path), *flags]) == 0
    command, _, rest = capsys.readouterr().out.partition("\n\n")
    verb, *overrides = shlex.split(command.replace(" \\\n", " "))[1:]
    assert verb == "train"
    (recipe,) = compose(overrides)
    return resolve(recipe, world=None, accelerator="cuda", device="NVIDIA H100 80GB HBM3"), rest


def notes_of(path: Path, text: str, *, model: str | None = None) -> tuple[dict[str, object], str]:
    """Values and notes of a job config, which nothing composes."""
    path.write_text(text)
    made = convert(read_job_config(path), name="x", world=1, model=model)
    return made.values, "\n".join(made.notes)


# file, world, parts of the model, degrees (replicate, shard, tensor), sequences of a step, precision, AC
SIX = [
    (
        ("debug_model", 8),
        {"dim": 256, "layers": 6, "heads": 16, "kv_heads": 16, "ffn_dim": 768, "vocab_size": 2048, **LLAMA},
        (1, 8, 1),
        64,
        ("bf16", "selective_layer"),
    ),
    (
        ("llama3_8b", 64),
        {"dim": 4096, "layers": 32, "ffn_dim": 14336, **LLAMA},
        (1, 64, 1),
        64,
        ("bf16", "selective_op"),
    ),
    (("llama3_70b", 64), {"dim": 8192, "layers": 80, "ffn_dim": 28672, **LLAMA}, (1, 8, 8), 64, ("bf16", "full")),
    (
        ("llama3_405b", 128),
        {"dim": 16384, "layers": 126, "ffn_dim": 53248, **LLAMA},
        (1, 16, 8),
        32,
        ("float8_tensorwise", "full"),
    ),
    (("qwen3_32b", 8), {"dim": 5120, "layers": 64, "heads": 64, "ffn_dim": 25600}, (1, 8, 1), 16, ("bf16", "full")),
    (
        ("qwen3_moe_debug", 4),
        {"dim": 256, "layers": 8, "head_dim": 128, "ffn_dim": 768, "experts": 64, "active_experts": 8},
        (1, 4, 1),
        16,
        ("bf16", "selective_op"),
    ),
]


@pytest.mark.parametrize(("file", "sizes", "degrees", "batch", "kinds"), SIX)
def test_a_job_config_becomes_the_same_recipe(file, sizes, degrees, batch, kinds, capsys):
    name, world = file
    recipe, _ = converted(FILES / f"{name}.toml", "--world", str(world), capsys=capsys)
    assert {key: getattr(recipe.model, key) for key in sizes} == sizes
    layout = recipe.layout
    assert (layout.replicate, layout.shard, layout.tensor) == degrees
    assert (layout.pipeline, layout.context, layout.world) == (1, 1, world)
    assert (recipe.training.global_batch, recipe.microbatches) == (batch, 1)
    assert (recipe.precision.kind, recipe.ac.kind) == kinds
    assert recipe.optimizer.schedule.floor == 0.0
    assert recipe.checkpoint.kind == "off"
    assert (recipe.compile.blocks, recipe.parallelism.async_tensor) == (("405b" in name),) * 2
    if "405b" in name:
        assert (recipe.precision.skip, recipe.precision.all_gather) == (("output",), True)


def test_what_a_file_leaves_out_has_the_defaults_of_torchtitan(tmp_path, capsys):
    (tmp_path / "empty.toml").write_text("")
    recipe, _ = converted(tmp_path / "empty.toml", "--world", "2", capsys=capsys)
    assert (recipe.name, recipe.training.steps, recipe.training.seq_len) == ("empty", 10000, 2048)
    assert (recipe.training.global_batch, recipe.training.gc_every) == (16, 50)
    assert (recipe.optimizer.lr, recipe.optimizer.schedule.decay) == (8e-4, "linear")
    assert (recipe.optimizer.schedule.decay_fraction, recipe.optimizer.schedule.warmup_steps) == (1.0, 200)
    assert (recipe.precision.kind, recipe.ac.kind, recipe.ac.every) == ("bf16", "selective_layer", 2)
    assert recipe.training.first_step_timeout_seconds == 3600


FOUR_AXES = """
[model]
flavor = "8B_flex"
converters = ["quantize.linear.float8"]
[training]
local_batch_size = 4
global_batch_size = 16
dataset = "c4"
[parallelism]
data_parallel_shard_degree = 2
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
context_parallel_degree = 2
pipeline_parallel_schedule = "ZBVZeroBubble"
pipeline_parallel_first_stage_less_layers = 2
fsdp_reshard_after_forward = "always"
[quantize.linear.float8]
recipe_name = "rowwise_with_gw_hp"
filter_fqns = ["output", "attention.wk", "auto_filter_small_kn"]
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = 50
async_mode = "async"
initial_load_path = "/old/step-10"
[metrics]
enable_wandb = true
enable_tensorboard = true
[validation]
enable = true
freq = 20
steps = 3
local_batch_size = 2
[comm]
train_timeout_seconds = 15
"""


def test_axes_float8_saving_and_validation(tmp_path, capsys):
    (tmp_path / "four.toml").write_text(FOUR_AXES)
    into = tmp_path / "recipe" / "four.yaml"
    recipe, notes = converted(tmp_path / "four.toml", capsys=capsys)
    assert recipe.layout.label == "dp_s2·tp2·cp2·pp2" or recipe.layout.world == 16
    assert (recipe.layout.context, recipe.layout.pipeline, recipe.parallelism.context_method) == (2, 2, "all_gather")
    assert (recipe.schedule.kind, recipe.parallelism.reshard_after_forward) == ("zbv", "always")
    assert (recipe.microbatch, recipe.training.global_batch) == (1, 16)
    assert (recipe.precision.kind, recipe.precision.skip) == ("float8_rowwise_with_gw_hp", ("output", "attention.wk"))
    assert (recipe.data.kind, recipe.data.document_mask, recipe.ac.kind) == ("hf", True, "none")
    assert (recipe.checkpoint.kind, recipe.checkpoint.every, recipe.checkpoint.last) == ("async", 50, "model")
    assert recipe.tracker.kind == "wandb+tensorboard"
    assert (recipe.training.validate_every, recipe.training.validation_sequences) == (20, 12)
    assert recipe.training.step_timeout_seconds == 15
    for part in ("first_stage_less_layers=2", "auto_filter_small_kn", "titanlab import /old/step-10", "2 times"):
        assert part in notes
    # The file of --into is the same recipe.
    assert main(["convert", str(tmp_path / "four.toml"), "--into", str(into)]) == 0
    (again,) = compose(["--config-dir", str(tmp_path), "+recipe=four"])
    assert resolve(again, world=None, accelerator="cuda", device="NVIDIA H100 80GB HBM3") == recipe


def test_what_a_job_says_of_itself_and_of_its_profilers(tmp_path, capsys):
    said = 'It\'s a "run" of {8B}, x=[1]: naïve'
    (tmp_path / "said.toml").write_text(
        f"[job]\ndescription = '''{said}'''\n"
        "[profiling]\nenable_profiling = true\nenable_memory_snapshot = true\nprofile_freq = 50\n"
    )
    recipe, _ = converted(tmp_path / "said.toml", "--world", "1", capsys=capsys)
    assert (recipe.notes, recipe.profiler.kind) == (said, "trace+memory")
    assert (recipe.profiler.trace.every, recipe.profiler.trace.skip, recipe.profiler.memory.every) == (50, 49, 50)
    into = str(tmp_path / "recipe" / "a.yaml")
    assert main(["convert", str(tmp_path / "said.toml"), "--world", "1", "--into", into]) == 0
    (again,) = compose(["--config-dir", str(tmp_path), "+recipe=a"])
    assert (again.notes, again.profiler) == (recipe.notes, recipe.profiler)


@pytest.mark.parametrize(
    ("keys", "init_from"),
    [
        ("enable = true\ninitial_load_path = '/hf'", "/hf"),
        # torchtitan reads the weights beside the tokenizer.
        ("enable = true", "assets/8B"),
        ("enable = true\nload_only = true", "assets/8B"),
        # torchtitan reads nothing without checkpoints.
        ("initial_load_path = '/hf'", None),
    ],
)
def test_weights_of_hugging_face(keys, init_from, tmp_path):
    text = f"[model]\nhf_assets_path = './assets/8B'\n[checkpoint]\ninitial_load_in_hf = true\n{keys}\n"
    values, notes = notes_of(tmp_path / "hf.toml", text)
    assert values.get("init_from") == init_from
    assert ("checkpoint.enable=false" in notes) == (init_from is None)


def test_a_key_that_is_on_and_has_no_counterpart_is_named(tmp_path):
    _, notes = notes_of(
        tmp_path / "on.toml",
        "[checkpoint]\nlast_save_in_hf = true\n[fault_tolerance]\nenable = true\ngroup_size = 1\n"
        "[memory_estimation]\nenable = false\n"
        "[model]\nconverters = ['quantize.linear.mx']\n[quantize.linear.mx]\nrecipe_name = 'mxfp8_emulated'\n",
    )
    assert "checkpoint.last_save_in_hf=true: after the run, `titanlab export" in notes
    assert "fault_tolerance.enable=true: " in notes
    assert "quantize.linear.mx.recipe_name=mxfp8_emulated: " in notes
    assert "group_size" not in notes
    assert "memory_estimation" not in notes


def test_keys_of_older_versions(tmp_path, capsys):
    (tmp_path / "old.toml").write_text(
        "[model]\nname = 'llama2'\nflavor = '7B'\nnorm_type = 'rmsnorm'\n"
        "[training]\nbatch_size = 2\nwarmup_steps = 5\ncompile = true\ntensor_parallel_degree = 2\n"
        "[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_split_points = ['layers.9']\n"
        "[float8]\nenable_float8_linear = true\n"
    )
    recipe, notes = converted(tmp_path / "old.toml", "--world", "8", capsys=capsys)
    assert (recipe.model.dim, recipe.layout.shard, recipe.layout.tensor, recipe.layout.pipeline) == (4096, 2, 2, 2)
    assert (recipe.training.global_batch, recipe.optimizer.schedule.warmup_steps) == (4, 5)
    assert (recipe.precision.kind, recipe.precision.skip, recipe.compile.blocks) == (
        "float8_tensorwise",
        ("output",),
        True,
    )
    assert recipe.parallelism.split == ("layers.9",)
    assert "norm_type" in notes


@pytest.mark.parametrize(
    ("text", "flags", "parts"),
    [
        ("[job", (), ("file=", "is not a TOML")),
        ("[training]\nstepz = 3", (), ("training.stepz=3", "training.steps")),
        ("[training]\nsteps = 'x'", (), ("training.steps=x", "expected `int`")),
        ("[checkpoint]\ninitial_load_path = 1", (), ("checkpoint.initial_load_path=1", "expected `str`")),
        ("[lr_scheduler]\ndecay_ratio = 'x'", (), ("lr_scheduler.decay_ratio=x", "expected `float`")),
        ("[parallelism]\nmodule_fqns_per_model_part = [[]]", (), ("module_fqns_per_model_part=[[]]", "length >= 1")),
        ("[experimental]\npipeline_parallel_split_points = 'a'", (), ("split_points=a", "expected `array`")),
        ("", (), ("data_parallel_shard_degree=-1", "--world 8")),
        ("[model]\nname = 'flux'", ("--world", "1"), ("model.flavor=flux", "--model")),
        ("[parallelism]\ntensor_parallel_degree = 3", ("--world", "8"), ("world=8",)),
        ("[parallelism]\ntensor_parallel_degree = 0", ("--world", "8"), ("tensor_parallel_degree=0",)),
        ("", ("--into", "x.yaml"), ("--into=", "recipe/x.yaml")),
    ],
)
def test_what_cannot_be_converted_is_one_line(text, flags, parts, tmp_path, capsys):
    (tmp_path / "bad.toml").write_text(text)
    assert main(["convert", str(tmp_path / "bad.toml"), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert all(part in err for part in parts)


def test_keys_of_code_of_ones_own_are_named_and_not_refused(tmp_path):
    text = "[job]\ncustom_config_module = 'mine.config'\n[mine]\nwidth = 3\nbatch_size = 'x'\n"
    assert "mine.width=3" in notes_of(tmp_path / "own.toml", text, model="debug")[1]


def test_a_recipe_that_is_there_stays_unless_forced(tmp_path, capsys):
    into = tmp_path / "recipe" / "mine.yaml"
    into.parent.mkdir()
    into.write_text("mine")
    command = ["convert", str(FILES / "llama3_8b.toml"), "--world", "8", "--into", str(into)]
    assert main(command) == 2
    assert into.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert "llama3_1_8b" in into.read_text()


def in_words(default: object) -> str:
    if isinstance(default, list):
        return ", ".join(default) or "none"
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default in (None, "") else str(default)


def table() -> str:
    """The tables of the page, from the code's own tables."""
    lines = ["| key of torchtitan | its default | here |", "|---|---|---|"]
    for key, known in KEYS.items():
        remark = f"; {known.remark}" if known.remark else ""
        lines.append(f"| {key} | {in_words(known.default)} | {known.ours}{remark} |")
    lines += ["", "| keys without a counterpart | why, or what to do instead |", "|---|---|"]
    lines += ["| {} | {} |".format(keys.replace("*", r"\*"), why) for keys, why in WITHOUT_COUNTERPART.items()]
    return "\n".join(lines)


def test_the_page_has_the_table_of_the_code():
    assert table() in PAGE.read_text()


def test_older_keys_lead_to_keys_of_this_version():
    for older, newer in OLDER_KEYS.items():
        assert older not in KEYS
        assert current_name(older) == newer
        assert newer == "" or current_name(newer) == newer
    for sections in OLDER_SECTIONS.values():
        assert all(any(key.startswith(f"{section}.") for key in KEYS) for section in sections)


def test_copied_keys_exist():
    assert all(find_key(known.ours) for known in KEYS.values() if known.is_copied)
