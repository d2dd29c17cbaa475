"""The folders that an import and an export write: numbers, the option, the command, and folders that are whole."""

from __future__ import annotations

import hashlib
import json
import os
import shlex

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from tests.weights import saved
from tests.weights.conftest import FORMATS, Tensors
from tests.weights.huggingface import made as folders
from titanlab.errors import ConfigError
from titanlab.system import StoreFault
from titanlab.techniques.model.contract import Foreign
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train import (
    check_apart,
    check_target,
    from_dcp,
    from_folder,
    from_run,
    is_weights,
    weights,
    whole_folder,
    write_hf,
    write_ours,
)
from titanlab.train.initialise import fill
from titanlab.train.interchange import write_weights
from titanlab.train.weights import in_halves, open_hf, open_weights

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


def test_each_tensor_keeps_its_numbers_and_format(tmp_path):
    written(tmp_path / "c", Tensors(a=A, b=B, e=torch.zeros(0, 3)))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["w.safetensors"]
    found = read(tmp_path / "c")
    assert torch.equal(found["a"], A)
    assert torch.equal(found["b"], B)
    assert (found["b"].dtype, found["e"].shape) == (torch.bfloat16, (0, 3))
    with safe_open(tmp_path / "c" / "w.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    header = int.from_bytes((tmp_path / "c" / "w.safetensors").read_bytes()[:8], "little")
    assert header % 8 == 0


def test_files_are_bounded_and_have_an_index(tmp_path):
    written(tmp_path / "c", Tensors(a=A, b=B), shard_bytes=50)
    names = [f"w-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [*names, "w.index.json"]
    index = json.loads((tmp_path / "c" / "w.index.json").read_text())
    assert index == {"metadata": {"total_size": 58}, "weight_map": {"a": names[0], "b": names[1]}}


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


def test_a_stack_becomes_its_tensors(tmp_path):
    stack = torch.arange(12.0).view(3, 2, 2)
    written(tmp_path / "c", Tensors(w=stack), foreign={"w": Foreign(name="experts", stack=("e.0", "e.1", "e.2"))})
    found = read(tmp_path / "c")
    assert list(found) == ["e.0", "e.1", "e.2"]
    assert all(torch.equal(found[f"e.{number}"], stack[number]) for number in range(3))


def test_numbers_are_cast_and_those_that_the_format_makes_infinite_are_refused(tmp_path):
    for name in ("float32", "bfloat16", "float16"):
        written(tmp_path / name, Tensors(a=A / 3, b=B), dtype=name)
        found, dtype = read(tmp_path / name), getattr(torch, name)
        assert torch.equal(found["a"], (A / 3).to(dtype))
        assert {tensor.dtype for tensor in found.values()} == {dtype}
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


def test_an_import_has_every_number_and_the_model_as_an_option(tmp_path):
    theirs = open_hf(folders.folder(tmp_path / "hub"), "k")
    assert is_weights(tmp_path / "hub")
    command, lines = wrote(from_folder(tmp_path / "hub", "k"), tmp_path / "ours", name="small")
    assert is_weights(tmp_path / "ours")
    assert not is_weights(tmp_path)
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


@pytest.mark.parametrize("value", ["512", [512], 2.5, 0, True, 1e400, {}])
def test_a_context_that_is_not_a_number_of_tokens_is_one_line(tmp_path, value):
    path = folders.folder(tmp_path / "theirs", {**folders.SMALL, "max_position_embeddings": value})
    with pytest.raises(ConfigError, match=r"^config\.json:max_position_embeddings=.*: must be a whole number of at"):
        from_folder(path, "k")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A recipe and its run, with checkpoints of two steps."""
    recipe, run = saved.run_of(tmp_path_factory.mktemp("runs"))
    for step in (2, 4):
        saved.save(run, recipe.model, step=step, seed=step)
    return recipe, run


def test_a_run_s_newest_checkpoint_or_one_of_a_step_or_that_is_named(begun):
    recipe, run = begun
    named = str(run.checkpoints / "step-00000002")
    for text, step, expected in ((str(run.path), None, 4), (str(run.path), 2, 2), (named, None, 2)):
        origin = from_run(text, "runs", step=step)
        assert origin.title == f"{run.path.name}, step-0000000{expected}"
        norm = dict(saved.module(recipe.model, seed=expected).named_parameters())["norm.weight"]
        assert torch.equal(origin.source.read("norm.weight", [0], [64]), norm)
        # It has no tokenizer, and names no token.
        assert (origin.about, origin.generation) == ({"max_position_embeddings": recipe.training.seq_len}, {})
    with pytest.raises(ConfigError, match="^--step=3: the run has no whole checkpoint"):
        from_run(str(run.path), "runs", step=3)


def test_a_model_that_was_stretched_has_the_context_of_that(tmp_path):
    """RoPE of Llama 3.1: the run trains shorter sequences than the model can read."""
    recipe, run = saved.run_of(tmp_path, **STRETCHED)
    saved.save(run, recipe.model)
    assert from_run(str(run.path), "runs", step=None).context == 8192


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
    with pytest.raises(ConfigError) as caught:
        from_run(str(copy), "runs", step=None)
    said = str(caught.value)
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
    assert from_dcp(tmp_path / "step-5", Llama(**SIZES, **STRETCHED), "k").context == 8192


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def made(folder, *files):
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text(name)
    return folder


def is_ours(folder):
    return (folder / "ours").exists()


def test_a_new_or_empty_folder_can_be_written_and_one_with_files_needs_force(tmp_path, monkeypatch):
    for folder in (tmp_path / "new", tmp_path / "a" / "b" / "new", made(tmp_path / "empty")):
        check_target(folder, is_ours, force=False)
    ours, other = made(tmp_path / "w", "ours"), made(tmp_path / "mine", "thesis")
    check_target(ours, is_ours, force=True)
    for folder, force, rule in (
        (ours, False, r"exists; name another folder, or give --force to replace it"),
        (other / "thesis", False, "exists"),
        (other, True, "holds something else than weights; name another folder"),
        (
            other / "thesis" / "a",
            True,
            rf"cannot be written \({other}/thesis is no folder\); name a folder of yours",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^--into=.*: {rule}"):
            check_target(folder, is_ours, force=force)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=r"cannot be written \(no permission\); name a folder of yours$"):
        check_target(tmp_path / "new", is_ours, force=False)


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
