"""The folders that an import and an export write: numbers, the option, the command, and what they leave out."""

from __future__ import annotations

import json
import shlex

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.weights.huggingface import made as folders
from titanlab.errors import ConfigError
from titanlab.train import from_folder, is_weights, write_hf, write_ours
from titanlab.train.hub_folders import open_hf
from titanlab.train.weights_folder import open_weights

TIED = {**folders.SMALL, "tie_word_embeddings": True}
MIXTRAL = {
    **folders.SMALL,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def wrote(origin, into, *, name="m", dtype=None):
    """A weights folder: the command, and the lines that are reported."""
    lines = []
    command = write_ours(origin, into, name=name, dtype=dtype, shard_bytes=10**9, report=lines.append)
    return command, lines


def exported(origin, into, *, dtype=None):
    lines = []
    write_hf(origin, into, dtype=dtype, shard_bytes=10**9, report=lines.append)
    return lines


def biased(folder):
    """An imported folder whose routers have biases."""
    wrote(from_folder(folders.folder(folder / "hub", MIXTRAL), "k"), folder / "ours")
    manifest = folder / "ours" / "weights.json"
    content = json.loads(manifest.read_text())
    content["model"]["balance"] = "bias"
    content["biases"] = {f"layers.{layer}": [0.0, 0.5, 0.0, -0.25] for layer in range(3)}
    manifest.write_text(json.dumps(content))
    return from_folder(folder / "ours", "k")


def test_a_folder_of_weights_may_be_replaced_and_no_other(tmp_path):
    assert is_weights(folders.folder(tmp_path / "theirs"))
    wrote(from_folder(tmp_path / "theirs", "k"), tmp_path / "ours")
    assert is_weights(tmp_path / "ours")
    assert not is_weights(tmp_path)
    assert not is_weights(tmp_path / "nothing")


def test_an_import_has_every_number_and_the_model_as_an_option(tmp_path):
    theirs = open_hf(folders.folder(tmp_path / "hub"), "k")
    command, lines = wrote(from_folder(tmp_path / "hub", "k"), tmp_path / "ours", name="small")
    ours = open_weights(tmp_path / "ours", "k")
    assert ours.model == theirs.model
    for name, entry in theirs.entries.items():
        box = [0] * len(entry.shape), entry.shape
        assert torch.equal(ours.read(name, *box), theirs.read(name, *box)), name
    option = yaml.safe_load((tmp_path / "ours" / "conf" / "model" / "small.yaml").read_text())
    assert option.pop("defaults") == ["llama_schema", "_self_"]
    assert type(ours.model)(**option) == ours.model
    assert shlex.split(command) == [
        *("titanlab", "train", "--config-dir", f"{tmp_path}/ours/conf", "model=small", f"init_from={tmp_path}/ours"),
    ]  # fmt: skip
    assert lines == [f"{tmp_path}/ours: 125,376 parameters in 30 tensors, 0.5 MiB in 1 file"]


@pytest.mark.parametrize("name", ["é", "my weights", "a'b", 'a"b', "${x}", "a=b", "a,b", "[a]", "1e3"])
def test_the_command_is_right_for_any_name_of_a_folder(tmp_path, name):
    command, _ = wrote(from_folder(folders.folder(tmp_path / "hub"), "k"), tmp_path / name)
    override = shlex.split(command)[-1]
    value = OverridesParser.create().parse_override(override).value()
    assert value.replace("\\${", "${") == str(tmp_path / name)


def test_a_name_of_several_lines_adds_nothing_to_the_option(tmp_path):
    """The name of a downloaded folder is another person's text."""
    path = folders.folder(tmp_path / "x\nlayers: 99\n# y")
    wrote(from_folder(path, "k"), tmp_path / "ours")
    text = (tmp_path / "ours" / "conf" / "model" / "m.yaml").read_text()
    assert "# From x layers: 99 # y.\n" in text
    assert yaml.safe_load(text)["layers"] == 3


def test_other_dtypes_are_written_on_demand(tmp_path):
    origin = from_folder(folders.folder(tmp_path / "hub"), "k")
    wrote(origin, tmp_path / "ours", dtype="bfloat16")
    assert {entry.dtype for entry in open_weights(tmp_path / "ours", "k").entries.values()} == {"BF16"}
    exported(origin, tmp_path / "theirs", dtype="bfloat16")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_digest_is_of_the_numbers_and_of_the_biases(tmp_path):
    origin = biased(tmp_path)
    wrote(origin, tmp_path / "again")
    first = open_weights(tmp_path / "again", "k")
    assert first.biases == origin.source.biases
    assert first.digest != origin.source.digest  # of the same numbers without biases
    content = json.loads((tmp_path / "ours" / "weights.json").read_text())
    content["biases"]["layers.0"][0] = 1.0
    (tmp_path / "ours" / "weights.json").write_text(json.dumps(content))
    wrote(from_folder(tmp_path / "ours", "k"), tmp_path / "other")
    assert open_weights(tmp_path / "other", "k").digest != first.digest


def test_an_export_says_that_it_leaves_biases_out(tmp_path):
    lines = exported(biased(tmp_path), tmp_path / "theirs")
    assert lines[-1].startswith("left out: the biases of 3 routers")
    assert lines[-1].endswith("; --format titanlab keeps them")


def test_an_export_keeps_what_is_beside_the_model(tmp_path):
    origin = from_folder(folders.folder(tmp_path / "hub"), "k")
    wrote(origin, tmp_path / "ours")
    exported(from_folder(tmp_path / "ours", "k"), tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert {name: config[name] for name in folders.SMALL} == folders.SMALL
    assert folders.equal(folders.read(tmp_path / "theirs"), folders.read(tmp_path / "hub"))
    generation = [(tmp_path / name / "generation_config.json").read_text() for name in ("hub", "ours", "theirs")]
    assert len(set(generation)) == 1


def test_a_model_without_a_form_in_transformers_is_one_line(tmp_path, monkeypatch):
    origin = from_folder(folders.folder(tmp_path / "hub"), "k")
    monkeypatch.setattr(type(origin.source.model), "hugging_face", staticmethod(lambda: None))
    with pytest.raises(ConfigError) as caught:
        exported(origin, tmp_path / "theirs")
    assert str(caught.value) == "--format=hf: llama has no form in transformers; try --format titanlab"
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("write", [wrote, exported])
def test_a_copy_that_differs_in_one_number_is_refused_and_nothing_is_left(tmp_path, write):
    table = folders.tensors(TIED)["model.embed_tokens.weight"]
    folders.folder(tmp_path / "same", TIED, **{"lm_head.weight": table.clone()})
    write(from_folder(tmp_path / "same", "k"), tmp_path / "a")
    table[-1, -1] += 1e-3
    path = folders.folder(tmp_path / "other", TIED, **{"lm_head.weight": table})
    with pytest.raises(ConfigError) as caught:
        write(from_folder(path, "k"), tmp_path / "b")
    rule = "its embeddings are tied, and yet lm_head.weight is not model.embed_tokens.weight"
    assert str(caught.value) == f"source=other: {rule}; set tie_word_embeddings to what the model was"
    assert sorted(place.name for place in tmp_path.iterdir()) == ["a", "other", "same"]
