"""A folder of Hugging Face's: what is read of it, and what is refused before a tensor is read."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.refusals import refusal
from tests.weights.huggingface import made
from titanlab.cli import main
from titanlab.train.weights import is_hf_folder, open_hf

TIED = {**made.SMALL, "tie_word_embeddings": True}


def test_a_folder_with_a_config_is_one(tmp_path):
    assert not is_hf_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert not is_hf_folder(tmp_path)
    assert is_hf_folder(made.folder(tmp_path / "a"))


@pytest.mark.parametrize("shards", ["kept", "removed"])
def test_the_single_file_counts_beside_the_index_of_an_earlier_save(tmp_path, shards, capsys):
    """transformers reads the single file, and its save_pretrained leaves the index, and sometimes the shards."""
    path = made.folder(tmp_path / "a", files=2, seed=1)
    newer = made.tensors(made.SMALL)
    if shards == "removed":
        for file in path.glob("*.safetensors"):
            file.unlink()
    save_file(newer, path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert torch.equal(open_hf(path, "k").read("norm.weight", [0], [64]), newer["model.norm.weight"])
    assert torch.equal(theirs["model.norm.weight"], newer["model.norm.weight"])
    assert main(["import", str(path), "--into", str(tmp_path / "ours")]) == 0
    line = f"reading {path}/model.safetensors; model.safetensors.index.json and its files are left of another save"
    assert line in capsys.readouterr().out
    assert main(["export", str(tmp_path / "ours"), "--into", str(tmp_path / "back")]) == 0
    assert made.equal(made.read(tmp_path / "back"), newer)


@pytest.mark.parametrize(
    "config", [made.LLAMA_3_2, {**made.MIXTRAL, "tie_word_embeddings": True}], ids=["llama", "experts"]
)
def test_a_model_that_was_saved_without_its_head_is_read_as_transformers_reads_it(tmp_path, config):
    path = made.folder(tmp_path / "whole", config, **{"model.rotary_emb.inv_freq": torch.ones(8)})
    transformers.AutoModelForCausalLM.from_pretrained(path).model.save_pretrained(tmp_path / "base")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["architectures"][0].endswith("Model")
    assert not any(name.startswith("model.") for name in made.read(tmp_path / "base"))
    one, other = open_hf(path, "k"), open_hf(tmp_path / "base", "k")
    assert one.entries == other.entries
    for name, entry in one.entries.items():
        offsets = [0] * len(entry.shape)
        assert torch.equal(one.read(name, offsets, entry.shape), other.read(name, offsets, entry.shape)), name


def test_a_model_that_has_lost_its_head_is_refused_by_that_name(tmp_path):
    path = made.folder(tmp_path / "a")
    transformers.AutoModelForCausalLM.from_pretrained(path).model.save_pretrained(tmp_path / "base")
    rule = "holds a model without lm_head.weight, its output head, which transformers would begin at random"
    cure = "save the whole model, as AutoModelForCausalLM does"
    assert refusal(open_hf, tmp_path / "base", "k") == f"k={tmp_path / 'base'}: {rule}; {cure}"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_that_is_not_applied_is_said(tmp_path, name, capsys):
    path = made.folder(tmp_path / "a")
    (path / name).write_bytes(b"{}")
    line = f"warning: {path / name} belongs to an adapter, which is not applied; to apply it, save the model again"
    for command in (["import", str(path), "--into", "ours"], ["export", str(path), "--into", "theirs"]):
        assert main([*command[:3], str(tmp_path / command[3])]) == 0
        assert line in capsys.readouterr().out


def test_a_tensor_is_read_from_the_file_that_the_index_names(tmp_path):
    path = made.folder(tmp_path / "a", files=2)
    last, expected = path / "model-00002-of-00002.safetensors", made.read(path)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["model.embed_tokens.weight"] != last.name
    # Beside safetensors a pickle is not read.
    (path / "pytorch_model.bin").write_bytes(b"\x80")
    # It stands in the other file too, as some tools leave it, and that file comes later.
    save_file({**load_file(last), "model.embed_tokens.weight": torch.ones(256, 64)}, last)
    found = open_hf(path, "k").read("tok_embeddings.weight", [0, 0], [256, 64])
    assert torch.equal(found, expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("config", [made.SMALL, made.MIXTRAL], ids=["llama", "experts"])
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace(".self_attn.", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn."),
    ],
    ids=["compile", "DDP", "both", "FSDP"],
)
def test_words_of_wrappers_in_names_are_left_out(tmp_path, config, wrapped):
    plain, path = made.folder(tmp_path / "a", config), made.folder(tmp_path / "b", config)
    save_file({wrapped(name): value for name, value in made.tensors(config).items()}, path / "model.safetensors")
    one, other = open_hf(plain, "k"), open_hf(path, "k")
    assert one.entries == other.entries
    for name, entry in one.entries.items():
        offsets = [0] * len(entry.shape)
        assert torch.equal(one.read(name, offsets, entry.shape), other.read(name, offsets, entry.shape)), name


def test_a_tensor_that_is_there_with_and_without_a_wrapper_is_refused(tmp_path):
    path = made.folder(tmp_path / "a", **{"module.lm_head.weight": torch.ones(256, 64)})
    rule = "holds lm_head.weight twice, as lm_head.weight and as module.lm_head.weight"
    assert refusal(open_hf, path, "k") == f"k={path}: {rule}; save the model again, without wrappers around it"


def test_a_copy_of_tied_embeddings_is_known(tmp_path):
    path = made.folder(tmp_path / "a", TIED, **{"lm_head.weight": torch.ones(256, 64)})
    source = open_hf(path, "k")
    assert source.copies == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "output.weight" not in source.entries
    assert open_hf(made.folder(tmp_path / "b", TIED), "k").copies == {}


@pytest.mark.parametrize(
    ("tensor", "rule"),
    [
        (torch.ones(5), "its config and its tensors disagree: lm_head.weight is 5, not 256×64"),
        (torch.tensor(1.0), "lm_head.weight is a single number, not 256×64"),
        (torch.ones(512, 64), "lm_head.weight is 512×64, not 256×64"),
        (torch.ones(256, 64, 1), "lm_head.weight is 256×64×1, not 256×64"),
        (
            torch.ones(256, 64).to(torch.float8_e4m3fn),
            "lm_head.weight is kept as F8_E4M3, which is not a format of plain",
        ),
    ],
)
def test_a_copy_that_cannot_be_compared_is_one_line(tmp_path, tensor, rule):
    path = made.folder(tmp_path / "a", TIED, **{"lm_head.weight": tensor})
    said = refusal(open_hf, path, "k")
    assert said.startswith(f"k={path}: ")
    assert rule in said


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rope_theta", 10**400, "a number in it is larger than any float"),
        ("rms_norm_eps", float("nan"), "must lie between 0 and 1"),
        ("rms_norm_eps", float("inf"), "must lie between 0 and 1"),
        ("vocab_size", 1, "must be at least 2"),
        ("head_dim", 0, "must be a whole number of at least 1"),
        ("max_position_embeddings", "512", "must be a whole number of at least 1; download the model again"),
    ],
)
def test_a_value_that_no_model_has_is_one_line(tmp_path, name, value, said):
    path = made.folder(tmp_path / "a")
    (path / "config.json").write_text(json.dumps({**made.SMALL, name: value}))
    assert said in refusal(open_hf, path, "k")
