"""Bad input to import, export, init_from and generate: one line, exit code 2, and nothing is left behind."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.weights.huggingface import made as folders
from titanlab.cli import main
from titanlab.recipe import to_mapping
from titanlab.records import create_run, identify

LINE = re.compile(r"error: (?P<what>[^=\s]+=.*?: .+?); (?P<cure>.+)\n")

IMPORTS = [
    ("nope/deeper/still", "source=nope/deeper/still: there is no such folder", "or a model of its hub as owner/name"),
    ("./nope", "source=./nope: there is no such folder", "owner/name"),
    ("<empty>", "source=<empty>: has no config.json", "owner/name"),
    ("<a-file>", "source=<a-file>: is not a folder", "owner/name"),
    ("<bare>", "source=<bare>: has neither model.safetensors nor model.safetensors.index.json", "fetch the folder again"),
    ("<pickled>", "source=<pickled>: keeps its weights in pytorch_model.bin", "save_pretrained"),
    ("<gguf>", "source=<gguf>: has neither model.safetensors nor model.safetensors.index.json, but model.gguf", "give the model in the"),
    ("<torn>", "source=<torn>/model.safetensors: cannot be read", "fetch the file again"),
    ("<cut>", "source=<cut>/model.safetensors: cannot be read", "fetch the file again"),
    ("<less>", "source=<less>: its config and its tensors disagree: model.norm.weight is absent, not 64", "fetch the folder again"),
    ("<more>", "source=<more>: its config and its tensors disagree: extra.weight is 2, not absent", "fetch the folder again"),
    ("<shapes>", "source=<shapes>: its config and its tensors disagree: model.layers.0.mlp.gate_proj.weight is 96×64, not 100×64", "fetch"),
    ("<integers>", "source=<integers>: model.norm.weight is kept as I8, which is not a format of plain weights", "float32, bfloat16, float16"),
    ("<missing>", "source=<missing>/model.safetensors.index.json: names 3 files, and 1 are missing", "whole"),
    ("<outside>", "source=<outside>/model.safetensors.index.json: names no files of this folder", "fetch the file again"),
    ("<no-json>", "source=<no-json>/config.json: cannot be read", "fetch the file again"),
    ("<list>", "source=<list>/config.json: holds no JSON object", "fetch the file again"),
    ("<mistral>", "config.json:architectures=MistralForCausalLM: is not a supported architecture", "LlamaForCausalLM"),
    ("<odd>", "model.kv_heads=3: must divide 4 query heads", "try 2 or 4"),
    ("<good> --shard-size big", "--shard-size=big: is not a file size", "try 5GB"),
    ("<good> --shard-size 0", "--shard-size=0: is not a file size", "try 5GB"),
    ("<good> --name a/b", "--name=a/b: becomes model=NAME", "try my_model"),
    ("<good> --name llama3_8b", "--name=llama3_8b: is an option of titanlab's own", "try llama3_8b_imported"),
    ("<good> --revision main", "--revision=main: applies to a model of the hub", "leave it out"),
    ("<good> --into <empty-run>", "--into=<empty-run>: exists", "--force"),
    ("<good> --into <empty-run> --force", "--into=<empty-run>: contains something other than weights", "another folder"),
    ("<good> --into <good> --force", "--into=<good>: is the folder that is read", "another folder"),
    ("<good> --into <a-file>/x", "--into=<a-file>/x: cannot be written (<a-file> is not a folder)", "of yours"),
    ("", "arguments=: the following arguments are required: source", "--help"),
]  # fmt: skip
EXPORTS = [
    ("nope --into x", "run=nope: fits no run under runs", "train one first"),
    ("<empty-run> --into x", "run=<empty-run>: holds no complete checkpoint", "that has saved one"),
    ("<good> --into x --format gguf", "--format=gguf: cannot be written", "hf, titanlab"),
    ("<good> --into x --dtype int8", "--dtype=int8: cannot be written", "float32, bfloat16, float16"),
    ("<good> --into x --step 3", "--step=3: applies to a run", "leave it out"),
    ("<good> --into x --step three", "--step=three: must be a whole number", "--help"),
    ("<good>", "arguments=<good>: the following arguments are required: --into", "--help"),
    ("<damaged> --into x", "run=<damaged>: its weights.json cannot be used", "import the weights again"),
    ("<half> --into x", "run=<half>: its config and its tensors disagree: norm.weight is absent", "fetch the folder again"),
]  # fmt: skip
DATA = "data=synthetic model.vocab_size=256"
TRAINS = [
    ("init_from=<nope>", "init_from=<nope>: there is no such folder", "an imported folder"),
    ("init_from=meta-llama/Llama-3.1-8B", "init_from=meta-llama/Llama-3.1-8B: there is no such folder", "`titanlab import meta-llama/Llama-3.1-8B`"),
    ("init_from=<empty>", "init_from=<empty>: holds no complete checkpoint", "give the folder of a run"),
    ("init_from=<imported>", "init_from=<imported>: is of another model: layers is 3 there and 2 here", "model.layers=3"),
    ("init_from=<imported> --config-dir <imported>/conf model=good model.rope_theta=20000", "init_from=<imported>: is of another model: rope_theta is 10000.0 there and 20000.0 here", "model.rope_theta=10000.0"),
    ("init_from=<imported> --config-dir <imported>/conf model=good model.rope_factor=8", "init_from=<imported>: is of another model: rope_factor is 1.0 there and 8.0", "model.rope_factor=1.0"),
    ("init_from=<imported> --config-dir <imported>/conf model=good model.tied_embeddings=true", "init_from=<imported>: is of another model: tied_embeddings is false there and true here", "model.tied_embeddings=false"),
    ("init_from=<imported> --config-dir <imported>/conf model=good checkpoint.load_from=<imported>", "init_from=<imported>: checkpoint.load_from says already", "give one of the two"),
    ("init_from=<tied-twice>", "init_from=<tied-twice>: is of another model", "model.layers=3"),
    ("init_from=<tied-twice> model.layers=3 model.ffn_dim=96 model.tied_embeddings=true", "init_from=<tied-twice>: holds lm_head.weight although its embeddings are tied", "titanlab import"),
    ("init_from=<half>", "init_from=<half>: its config and its tensors disagree", "fetch the folder again"),
    ("init_from=<mistral>", "config.json:architectures=MistralForCausalLM: is not a supported architecture", "LlamaForCausalLM"),
]  # fmt: skip
SAMPLES = [
    ("<imported>", "run=<imported>: has no tokenizer", "import a model whose folder has one"),
    ("<good>", "run=<good>: has neither tokenizer.json nor tokenizer.model", "download-tokenizer"),
    ("<half>", "run=<half>: its config and its tensors disagree", "fetch the folder again"),
]


@pytest.fixture(scope="module")
def things(tmp_path_factory):
    """Folders with something wrong, by the name that stands for them above."""
    place = tmp_path_factory.mktemp("things")

    def hub(name, config=folders.SMALL, **more):
        return folders.folder(place / name, config, **more)

    def changed(name, **change):
        values = load_file(hub(name) / "model.safetensors")
        values.update(change)
        kept = {key: value for key, value in values.items() if value is not None}
        save_file(kept, place / name / "model.safetensors")

    good = hub("good")
    (place / "empty").mkdir()
    (place / "a-file").write_text("")
    (hub("bare") / "model.safetensors").unlink()
    (hub("pickled") / "model.safetensors").rename(place / "pickled" / "pytorch_model.bin")
    (hub("gguf") / "model.safetensors").rename(place / "gguf" / "model.gguf")
    (hub("torn") / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    whole = (hub("cut") / "model.safetensors").read_bytes()
    (place / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    changed("less", **{"model.norm.weight": None})
    changed("more", **{"extra.weight": torch.ones(2)})
    changed("integers", **{"model.norm.weight": torch.ones(64, dtype=torch.int8)})
    (hub("shapes") / "config.json").write_text(json.dumps({**folders.SMALL, "intermediate_size": 100}))
    next(hub("missing", files=3).glob("*-00002-*")).unlink()
    index = hub("outside", files=2) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../good/model.safetensors"}}))
    (hub("no-json") / "config.json").write_text("{")
    (hub("list") / "config.json").write_text("[]")
    for name, change in {
        "mistral": {"architectures": ["MistralForCausalLM"]},
        "odd": {"num_key_value_heads": 3},
    }.items():
        (hub(name) / "config.json").write_text(json.dumps({**folders.SMALL, **change}))
    tied = {**folders.SMALL, "tie_word_embeddings": True}
    hub("tied-twice", tied, **{"lm_head.weight": torch.ones(256, 64)})
    assert main(["import", str(good), "--into", str(place / "imported")]) == 0
    shutil.copytree(place / "imported", place / "damaged")
    (place / "damaged" / "weights.json").write_text('{"schema": 1, "digest": "x", "model": {"kind": "llama"}}')
    shutil.copytree(place / "imported", place / "half")
    values = load_file(place / "half" / "weights.safetensors")
    del values["norm.weight"]
    save_file(values, place / "half" / "weights.safetensors")
    made = tiny.recipe(place)
    run = create_run(place, name="empty", identity=identify(made, data="", hardware="cpu"), config=to_mapping(made))
    run.path.rename(place / "empty-run")
    return place


@pytest.fixture
def refused(things, tmp_path, monkeypatch, capsys):
    """`refused("import <torn>")`: what its one line says, and the cure there; it has left nothing behind."""
    monkeypatch.chdir(tmp_path)

    def listing():
        return sorted(str(path.relative_to(things)) for path in things.rglob("*"))

    def refusal(line):
        before = listing()
        capsys.readouterr()
        code = main(shlex.split(re.sub(r"<([\w-]+)>", lambda match: str(things / match[1]), line)))
        out, err = capsys.readouterr()
        found = LINE.fullmatch(re.sub(rf"{re.escape(str(things))}/([\w-]+)", r"<\1>", err))
        assert (code, found is not None) == (2, True), (out, err)
        assert (listing(), list(Path(tmp_path).iterdir())) == (before, [])
        return found["what"], found["cure"]

    return refusal


@pytest.mark.parametrize(("words", "begins", "cure"), IMPORTS, ids=[words for words, *_ in IMPORTS])
def test_an_import_that_cannot_be(refused, words, begins, cure):
    into = "" if "--into" in words else " --into imported"
    what, told = refused(f"import {words}{into if words else ''}")
    assert what.startswith(begins)
    assert cure in told


@pytest.mark.parametrize(("words", "begins", "cure"), EXPORTS, ids=[words for words, *_ in EXPORTS])
def test_an_export_that_cannot_be(refused, words, begins, cure):
    what, told = refused(f"export {words}")
    assert what.startswith(begins)
    assert cure in told


@pytest.mark.parametrize(("words", "begins", "cure"), TRAINS, ids=[words for words, *_ in TRAINS])
def test_a_beginning_that_cannot_be(refused, words, begins, cure):
    what, told = refused(f"train {DATA} {words}")
    assert what.startswith(begins)
    assert cure in told


@pytest.mark.parametrize(("words", "begins", "cure"), SAMPLES, ids=[words for words, *_ in SAMPLES])
def test_a_sample_that_cannot_be(refused, words, begins, cure):
    what, told = refused(f"generate {words} --prompt a")
    assert what.startswith(begins)
    assert cure in told
