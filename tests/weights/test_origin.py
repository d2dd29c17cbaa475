"""Weights to write: what each origin knows of the model's context, tokenizer and special tokens."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.weights import saved
from tests.weights.huggingface import made as folders
from titanlab.errors import ConfigError
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train import from_dcp, from_folder, from_run, write_ours

SIZES = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "vocab_size": 32}
STRETCHED = {"rope_factor": 8.0, "rope_original_context": 1024}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")


def refusal(action, *given, **named):
    with pytest.raises(ConfigError) as caught:
        action(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ours(folder, path):
    """The origin of the folder that an import of `path` makes."""
    into = folder / "imported"
    write_ours(from_folder(path, "k"), into, name="m", dtype=None, shard_bytes=10**9, report=lambda line: None)
    return from_folder(into, "k")


def test_a_folder_of_theirs_says_what_is_beside_the_model(tmp_path):
    path = folders.folder(tmp_path / "theirs")
    origin = from_folder(path, "k")
    assert origin.about == {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": [2, 3]}
    assert (origin.context, origin.title) == (512, "theirs")
    assert (origin.tokenizer, origin.generation) == (path, path / "generation_config.json")


def test_an_imported_folder_says_the_same_and_has_its_tokenizer_beside_it(tmp_path):
    path = folders.folder(tmp_path / "theirs")
    origin = ours(tmp_path, path)
    assert origin.about == from_folder(path, "k").about
    assert origin.tokenizer == tmp_path / "imported" / "tokenizer"


@pytest.mark.parametrize("given", [{}, {"max_position_embeddings": None}])
def test_without_a_context_it_is_that_of_transformers(tmp_path, given):
    config = {name: value for name, value in folders.SMALL.items() if name != "max_position_embeddings"}
    path = folders.folder(tmp_path / "theirs", {**config, **given})
    assert from_folder(path, "k").context == 2048
    assert ours(tmp_path, path).context == 2048


@pytest.mark.parametrize("value", ["512", [512], 2.5, 0, -5, True, 1e400, {}])
def test_a_context_that_is_no_number_of_tokens_is_one_line(tmp_path, value):
    path = folders.folder(tmp_path / "theirs", {**folders.SMALL, "max_position_embeddings": value})
    said = refusal(from_folder, path, "k")
    assert said.startswith("config.json:max_position_embeddings=")
    assert said.endswith(": must be a whole number of at least 1; restore the file")


def test_a_damaged_context_of_an_imported_folder_is_one_line(tmp_path):
    origin = ours(tmp_path, folders.folder(tmp_path / "theirs"))
    manifest = origin.tokenizer.parent / "weights.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "about": {"max_position_embeddings": "long"}}))
    said = refusal(from_folder, manifest.parent, "k")
    rule = "its weights.json cannot be used (ValueError: max_position_embeddings is no whole number of at least 1)"
    assert said == f"k={manifest.parent}: {rule}; import the weights again"


def test_a_path_that_is_neither_is_one_line(tmp_path):
    cure = "give a folder of Hugging Face's, or a model of its hub as owner/name"
    assert refusal(from_folder, tmp_path, "k") == f"k={tmp_path}: has no config.json; {cure}"
    (tmp_path / "file").write_text("")
    assert refusal(from_folder, tmp_path / "file", "k") == f"k={tmp_path}/file: is no folder; {cure}"
    assert refusal(from_folder, tmp_path / "no", "k") == f"k={tmp_path}/no: is no folder; {cure}"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A recipe and its run, with checkpoints of two steps."""
    recipe, run = saved.run_of(tmp_path_factory.mktemp("runs"))
    for step in (2, 4):
        saved.save(run, recipe.model, step=step, seed=step)
    return recipe, run


@pytest.mark.parametrize(("step", "expected"), [(None, 4), (2, 2)])
def test_a_run_s_newest_checkpoint_or_the_one_of_a_step(begun, step, expected):
    recipe, run = begun
    origin = from_run(str(run.path), "runs", step=step)
    assert origin.title == f"{run.path.name}, step-0000000{expected}"
    norm = dict(saved.module(recipe.model, seed=expected).named_parameters())["norm.weight"]
    assert torch.equal(origin.source.read("norm.weight", [0], [64]), norm)


def test_a_run_without_a_tokenizer_names_no_token(begun):
    recipe, run = begun
    origin = from_run(str(run.path), "runs", step=None)
    assert (origin.about, origin.generation) == ({"max_position_embeddings": recipe.training.seq_len}, {})


def test_a_checkpoint_can_be_named_itself(begun):
    _, run = begun
    named = from_run(str(run.checkpoints / "step-00000002"), "runs", step=None)
    assert named.title.endswith(", step-00000002")


def test_a_step_that_was_not_saved_is_one_line(begun):
    _, run = begun
    assert refusal(from_run, str(run.path), "runs", step=3).startswith("--step=3: the run has no whole checkpoint")


def test_a_model_that_was_stretched_has_the_context_of_that(tmp_path):
    """RoPE of Llama 3.1: the run trains shorter sequences than the model can read."""
    recipe, run = saved.run_of(tmp_path, **STRETCHED)
    saved.save(run, recipe.model)
    assert from_run(str(run.path), "runs", step=None).context == 8192


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("model: {kind: llama}\ntraining: {seq_len: 8}\n", "missing"),
        ("training: {seq_len: 8}\n", "'model'"),
        ("model: {}\ntraining: {seq_len: 8}\n", "'kind'"),
        ("model: [1]\ntraining: {seq_len: 8}\n", "list indices"),
        ("MODEL\n", "'training'"),
        ("MODEL\ntraining: {seq_len: .inf}\n", "infinity"),
        ("MODEL\ntraining: {seq_len: .nan}\n", "NaN"),
        ("MODEL\ntraining: {seq_len: long}\n", "invalid literal"),
        ("MODEL\ntraining: [8]\n", "list indices"),
    ],
)
def test_a_run_with_a_damaged_config_is_one_line(begun, tmp_path, config, reason):
    _, run = begun
    copy = tmp_path / "runs" / "copy"
    (copy / "checkpoints").mkdir(parents=True)
    (copy / "checkpoints" / "step-00000002").symlink_to(run.checkpoints / "step-00000002")
    model = "model: {kind: llama, " + ", ".join(f"{name}: {size}" for name, size in SIZES.items()) + "}"
    (copy / "config.yaml").write_text(config.replace("MODEL", model))
    said = refusal(from_run, str(copy), "runs", step=None)
    assert said.startswith(f"run={copy}: its config.yaml has no model (")
    assert reason in said
    assert said.endswith("; restore that file")


def test_a_folder_of_torch_distributed_checkpoint_has_a_model_and_nothing_else(tmp_path):
    model = Llama(**SIZES)
    state = {f"model.{name}": value.detach() for name, value in saved.module(model).named_parameters()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "step-5"), no_dist=True)
    origin = from_dcp(tmp_path / "step-5", model, "k")
    assert (origin.about, origin.generation, origin.title) == ({"max_position_embeddings": 2048}, {}, "step-5")
    assert torch.equal(origin.source.read("norm.weight", [0], [16]), state["model.norm.weight"])
    stretched = Llama(**SIZES, **STRETCHED)
    assert from_dcp(tmp_path / "step-5", stretched, "k").context == 8192
