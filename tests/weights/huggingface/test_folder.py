"""A folder of Hugging Face's: what is read of it, and what is refused before a tensor is read."""

from __future__ import annotations

import json
import os

import pytest
import torch

from tests.weights.huggingface import made
from titanlab.errors import ConfigError
from titanlab.weights.huggingface.folder import is_hf_folder, open_hf

TIED = {**made.SMALL, "tie_word_embeddings": True}


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        open_hf(path, "k")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_with_a_config_is_one(tmp_path):
    assert not is_hf_folder(tmp_path)
    (tmp_path / "config.json").mkdir()
    assert not is_hf_folder(tmp_path)
    assert is_hf_folder(made.folder(tmp_path / "a"))


@pytest.mark.parametrize("files", [1, 3])
def test_every_parameter_is_found_in_its_file(tmp_path, files):
    path = made.folder(tmp_path / "a", files=files)
    source = open_hf(path, "k")
    assert list(source.entries) == list(source.model.account().parameters)
    assert {file.name for file in source.files.values()} == {file.name for file in path.glob("*.safetensors")}
    norm = made.read(path)["model.norm.weight"]
    assert torch.equal(source.read("norm.weight", [0], [64]), norm)


def test_values_beside_the_model_are_kept_as_they_are(tmp_path):
    path = made.folder(tmp_path / "a", {**made.SMALL, "pad_token_id": None, "torch_dtype": "float32"})
    about = {"max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
    assert open_hf(path, "k").about == about


def test_the_index_counts_where_there_is_a_single_file_too(tmp_path):
    """As in transformers' own folders that were saved twice."""
    path = made.folder(tmp_path / "a", files=2)
    (path / "model.safetensors").write_bytes(b"older")
    assert len(open_hf(path, "k").files) == len(made.names(made.SMALL))


def test_frequencies_in_files_of_2023_are_left_out(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    path = made.folder(tmp_path / "a", **{name: torch.ones(8, dtype=torch.float64)})
    assert name not in {foreign.name for foreign in open_hf(path, "k").foreign.values()}


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
        (torch.ones(256, 64).to(torch.float8_e4m3fn), "lm_head.weight is kept as F8_E4M3, which is no format of plain"),
    ],
)
def test_a_copy_that_cannot_be_compared_is_one_line(tmp_path, tensor, rule):
    path = made.folder(tmp_path / "a", TIED, **{"lm_head.weight": tensor})
    said = refusal(path)
    assert said.startswith(f"k={path}: ")
    assert rule in said


def test_a_folder_without_weights_is_one_line(tmp_path):
    path = made.folder(tmp_path / "a")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert refusal(path).startswith(
        f"k={path}: keeps its weights in pytorch_model.bin, which runs code when it is read"
    )
    (path / "pytorch_model.bin").unlink()
    rule = "has neither model.safetensors nor model.safetensors.index.json"
    assert refusal(path) == f"k={path}: {rule}; fetch the folder again, whole"


def test_a_pickle_beside_safetensors_is_not_read(tmp_path):
    path = made.folder(tmp_path / "a")
    (path / "pytorch_model.bin").write_bytes(b"\x80")
    assert open_hf(path, "k").entries


def test_a_pipe_in_place_of_the_weights_is_no_file(tmp_path):
    """To open it for reading would wait for a writer."""
    path = made.folder(tmp_path / "a")
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    assert "has neither model.safetensors nor " in refusal(path)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("rope_theta", 10**400, "is too large for a number of 64 bits; restore the file"),
        ("rms_norm_eps", float("nan"), "must lie between 0 and 1"),
        ("rms_norm_eps", float("inf"), "must lie between 0 and 1"),
        ("vocab_size", 1, "must be at least 2"),
        ("head_dim", 0, "must be a whole number of at least 1"),
        ("max_position_embeddings", "512", "must be a whole number of at least 1; restore the file"),
    ],
)
def test_a_value_that_no_model_has_is_one_line(tmp_path, name, value, said):
    path = made.folder(tmp_path / "a")
    (path / "config.json").write_text(json.dumps({**made.SMALL, name: value}))
    assert said in refusal(path)


def test_another_number_of_layers_is_a_disagreement(tmp_path):
    path = made.folder(tmp_path / "a")
    (path / "config.json").write_text(json.dumps({**made.SMALL, "num_hidden_layers": 2}))
    assert "its config and its tensors disagree: model.layers.2." in refusal(path)
    (path / "config.json").write_text(json.dumps({**made.SMALL, "num_hidden_layers": 4}))
    assert "its config and its tensors disagree: model.layers.3." in refusal(path)
