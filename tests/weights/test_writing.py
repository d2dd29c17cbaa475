"""The folders that an import and an export write: numbers, the option, the command, and folders that are whole."""

from __future__ import annotations

import hashlib
import json
import os
import shlex

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import load_file
from torch import nn

from tests.refusals import refusal
from tests.weights import saved
from tests.weights.conftest import FORMATS, Tensors
from tests.weights.huggingface import made as folders
from titanlab.errors import ConfigError
from titanlab.system import StoreFault
from titanlab.techniques.model.contract import Foreign
from titanlab.train import (
    check_apart,
    check_target,
    checkpoint_of,
    from_folder,
    from_run,
    weights,
    whole_folder,
    write_hf,
    write_ours,
)
from titanlab.train.initialise import fill
from titanlab.train.interchange import write_weights
from titanlab.train.weights import in_halves, open_weights

SIZES = {"dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 24, "vocab_size": 32}
STRETCHED = {"rope_factor": 8.0, "rope_original_context": 1024}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
A, B = torch.arange(12.0).view(4, 3), torch.ones(5, dtype=torch.bfloat16)


def written(folder, source, *, foreign=None, dtype=None, shard_bytes=10**9):
    folder.mkdir()
    names = {name: Foreign(name=name) for name in source.entries} | (foreign or {})
    return write_weights(
        source, folder, stem="w", index="w.index.json", foreign=names, dtype=dtype, shard_bytes=shard_bytes
    )


def read(folder):
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def test_the_digest_is_of_names_shapes_formats_and_contents(tmp_path):
    first = written(tmp_path / "1", Tensors(a=A, b=B))
    hashes = [
        [name, FORMATS[tensor.dtype], list(tensor.shape), hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest()]
        for name, tensor in (("a", A), ("b", B))
    ]
    assert first == hashlib.sha256(json.dumps(hashes).encode()).hexdigest()
    assert written(tmp_path / "2", Tensors(b=B, a=A), shard_bytes=1) == first
    others = [
        Tensors(a=A + 1, b=B), Tensors(a=A.view(3, 4), b=B), Tensors(a=A), Tensors(a=A, c=B), Tensors(a=A, b=B.half()),
    ]  # fmt: skip
    found = {written(tmp_path / f"other-{number}", source) for number, source in enumerate(others)}
    assert len({first, *found}) == 6


def test_large_tensors_are_read_in_pieces_of_whole_heads(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "CHUNK_BYTES", 24)
    rows = torch.arange(16.0).view(8, 2)
    source = Tensors(a=A, wq=rows)
    written(tmp_path / "c", source, foreign={"wq": Foreign(name="q", head=4)})
    reads = [("a", [0, 0], [2, 3]), ("a", [2, 0], [2, 3]), ("wq", [0, 0], [4, 2]), ("wq", [4, 0], [4, 2])]
    assert source.reads == reads
    found = read(tmp_path / "c")
    assert torch.equal(found["a"], A)
    assert torch.equal(found["q"], in_halves(rows, 4))


def test_numbers_that_a_format_makes_infinite_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        written(tmp_path / "c", Tensors(a=torch.tensor([1.0, 70000.0])), dtype="float16")
    assert str(caught.value) == "--dtype=float16: a has numbers beyond its 65,504; try bfloat16"
    # What is infinite already stays so.
    infinite = torch.tensor([float("inf"), float("-inf"), 65504.0])
    written(tmp_path / "d", Tensors(a=infinite), dtype="float16")
    assert torch.equal(read(tmp_path / "d")["a"], infinite.half())


def test_a_stage_reads_its_own_parameters_only_and_casts_them(monkeypatch):
    monkeypatch.setattr(weights, "CHUNK_BYTES", 36)
    source = Tensors(**{"layers.0.weight": A, "layers.1.weight": A / 3, "norm.weight": B})
    stage = nn.ModuleDict({"layers": nn.ModuleDict({"1": nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)})})
    parameter = stage["layers"]["1"].weight
    fill(stage, source)
    # In place: the optimizer keeps its parameters, and nothing is differentiated.
    assert stage["layers"]["1"].weight is parameter
    assert torch.equal(parameter, (A / 3).bfloat16())
    assert parameter.grad_fn is None
    assert source.reads == [("layers.1.weight", [0, 0], [3, 3]), ("layers.1.weight", [3, 0], [1, 3])]


TIED = {**folders.SMALL, "tie_word_embeddings": True}


def wrote(origin, into, *, name="m", dtype=None):
    """A weights folder: the command, and the lines that are reported."""
    lines = []
    command = write_ours(origin, into, name=name, dtype=dtype, shard_bytes=10**9, report=lines.append)
    return command, lines


def exported(origin, into, *, dtype=None):
    lines = []
    write_hf(origin, into, dtype=dtype, shard_bytes=10**9, report=lines.append)
    return lines


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


def test_the_digest_is_of_the_biases_too(tmp_path):
    wrote(from_folder(folders.folder(tmp_path / "hub", folders.MIXTRAL), "k"), tmp_path / "ours")
    manifest = tmp_path / "ours" / "weights.json"
    content = json.loads(manifest.read_text())
    content["model"]["balance"] = "bias"
    digests = [content["digest"]]
    for bias in (0.5, 1.0):
        content["biases"] = {f"layers.{layer}": [0.0, bias, 0.0, -0.25] for layer in range(3)}
        manifest.write_text(json.dumps(content))
        wrote(from_folder(tmp_path / "ours", "k"), tmp_path / f"again-{bias}")
        again = open_weights(tmp_path / f"again-{bias}", "k")
        assert again.biases == content["biases"]
        digests.append(again.digest)
    assert len(set(digests)) == 3


def test_a_model_without_a_form_in_transformers_is_one_line(tmp_path, monkeypatch):
    origin = from_folder(folders.folder(tmp_path / "hub"), "k")
    monkeypatch.setattr(type(origin.model), "hugging_face", staticmethod(lambda: None))
    assert (
        refusal(exported, origin, tmp_path / "theirs")
        == "--format=hf: llama has no form in transformers; try --format titanlab"
    )
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
    rule = "its embeddings are tied, but lm_head.weight differs from model.embed_tokens.weight"
    assert str(caught.value) == f"source=other: {rule}; set tie_word_embeddings to what the model was"
    assert sorted(place.name for place in tmp_path.iterdir()) == ["a", "other", "same"]


@pytest.mark.parametrize(("given", "context"), [({}, 512), ({"max_position_embeddings": None}, 2048)])
def test_an_origin_knows_the_context_the_tokens_and_the_tokenizer(tmp_path, given, context):
    """Without a context it is that of transformers."""
    path = folders.folder(tmp_path / "theirs", {**folders.SMALL, **given})
    wrote(from_folder(path, "k"), tmp_path / "imported")
    origin, ours = from_folder(path, "k"), from_folder(tmp_path / "imported", "k")
    about = {"max_position_embeddings": context, "bos_token_id": 1, "eos_token_id": [2, 3]}
    assert origin.about == ours.about == about
    assert (origin.context, origin.title, ours.context) == (context, "theirs", context)
    assert (origin.tokenizer, origin.generation) == (path, path / "generation_config.json")
    assert ours.tokenizer == tmp_path / "imported" / "tokenizer"


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A recipe and its run, with checkpoints of two steps."""
    recipe, run = saved.run_of(tmp_path_factory.mktemp("runs"))
    for step in (2, 4):
        saved.save(run, recipe.model, step=step, seed=step)
    return recipe, run


def test_a_model_that_was_stretched_has_the_context_of_that(tmp_path):
    """RoPE of Llama 3.1: the run trains shorter sequences than the model can read."""
    recipe, run = saved.run_of(tmp_path, **STRETCHED)
    saved.save(run, recipe.model)
    checkpoint = checkpoint_of(str(run.path), "runs", step=None)
    assert from_run(str(run.path), "runs", checkpoint).context == 8192


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("training: {seq_len: 8}\n", "'model'"),
        ("model: {}\ntraining: {seq_len: 8}\n", "'kind'"),
        ("model: [1]\ntraining: {seq_len: 8}\n", "list indices"),
        ("MODEL\n", "'training'"),
        ("MODEL\ntraining: {seq_len: .inf}\n", "infinity"),
        ("MODEL\ntraining: {seq_len: long}\n", "invalid literal"),
    ],
)
def test_a_run_with_a_damaged_config_is_one_line(begun, tmp_path, config, reason):
    _, run = begun
    copy = tmp_path / "runs" / "copy"
    (copy / "checkpoints").mkdir(parents=True)
    (copy / "checkpoints" / "step-00000002").symlink_to(run.checkpoints / "step-00000002")
    model = "model: {kind: llama, " + ", ".join(f"{name}: {size}" for name, size in SIZES.items()) + "}"
    (copy / "config.yaml").write_text(config.replace("MODEL", model))
    said = refusal(from_run, str(copy), "runs", copy / "checkpoints" / "step-00000002")
    assert said.startswith(f"run={copy}: its config.yaml has no model (")
    assert reason in said
    assert said.endswith("; restore that file")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def made(folder, *files):
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text(name)
    return folder


def test_a_folder_that_may_not_be_written_is_one_line(tmp_path, monkeypatch):
    check_target(tmp_path / "a" / "b" / "new", lambda folder: False, force=False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"cannot be written \(no permission\); name a folder of yours$"):
        check_target(tmp_path / "new", lambda folder: False, force=False)


@pytest.mark.parametrize(("source", "into"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "b/../a"), ("link", "a")])
def test_what_is_read_is_not_written(tmp_path, source, into):
    made(tmp_path / "a" / "b")
    made(tmp_path / "b")
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(ConfigError, match="is the folder that is read, or lies in it; name another folder"):
        check_apart(tmp_path / source, tmp_path / into)
    for apart in ("b", "ab", "b/a"):
        check_apart(tmp_path / "a", tmp_path / apart)


def test_a_folder_is_replaced_when_the_new_one_is_whole(tmp_path):
    folder = made(tmp_path / "w", "old")
    # What killed processes have left goes.
    made(tmp_path / ".w.old", "older")
    made(tmp_path / "w.part" / "conf", "half")
    with whole_folder(folder) as part:
        assert (part, names(part)) == (tmp_path / "w.part", [])
        made(part / "new", "x")
        assert names(folder) == ["old"]
    assert names(tmp_path) == ["w"]
    assert names(folder) == ["new"]
    for error in (KeyError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), whole_folder(folder) as part:
            (part / "more").write_text("")
            raise error
        assert (names(tmp_path), names(folder)) == (["w"], ["new"])


def test_a_full_disk_is_one_line_and_a_fault_of_the_store_that_is_read_is_not_the_folder_s(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left"), whole_folder(tmp_path / "w"):
        raise OSError(28, "No space left on device")
    with pytest.raises(StoreFault), whole_folder(tmp_path / "w"):
        raise StoreFault("s3://bucket/run", "it does not answer")
    assert names(tmp_path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^--into=.*: cannot be written \("), whole_folder(tmp_path / "file" / "w"):
        pytest.fail("it cannot be made")


def test_two_processes_do_not_write_one_folder(tmp_path):
    with whole_folder(tmp_path / "w") as part:
        (part / "x").write_text("")
        with (
            pytest.raises(ConfigError, match="is being written by another process; wait for it$"),
            whole_folder(tmp_path / "w"),
        ):
            pytest.fail("the other one writes it")
        # The second one has removed nothing of the first.
        assert names(part) == ["x"]
    assert names(tmp_path / "w") == ["x"]
