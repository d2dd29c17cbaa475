"""Runs of any layout out, and weights into runs of any layout: one process is the reference for all."""

import json
import math
import os
import shutil
from dataclasses import replace

import pytest
import torch

from tests import tiny
from tests.weights.huggingface import made as folders
from titanlab.checkpoint import latest
from titanlab.checkpoint.folders import checkpoints
from titanlab.cli import main
from titanlab.data import source
from titanlab.data.schema import Files
from titanlab.errors import ConfigError
from titanlab.launch import prepare
from titanlab.options import schema_of
from titanlab.prove.parity import compare
from titanlab.techniques.model.llama_schema import Llama
from titanlab.train import check_beginning
from titanlab.train.weights import open_folder

llama_hf = Llama.hugging_face()
# In fp32, relative, as for every layout: docs/parity.md.
BAR = 1e-5
LAYOUTS = {
    "fsdp 2": {"shard": 2},
    "tp 2": {"tensor": 2},
    "pp 2": {"pipeline": 2},
    "fsdp 2, tp 2": {"shard": 2, "tensor": 2},
    "ddp 2": {"replicate": 2},
    "fsdp 2, pp 2": {"shard": 2, "pipeline": 2},
}
ALWAYS = "tp 2"
EACH = [
    pytest.param(keys, id=name, marks=[] if name == ALWAYS else [pytest.mark.full]) for name, keys in LAYOUTS.items()
]


def keys_of(config):
    """What tiny.recipe takes, of a config of theirs."""
    return {name: getattr(llama_hf.from_hf(config), name) for name in (
        "dim", "layers", "heads", "kv_heads", "ffn_dim", "vocab_size", "norm_eps", "rope_theta", "rope_factor",
        "rope_original_context", "tied_embeddings",
    )}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders of theirs, one imported and one as it is, with tied embeddings and without."""
    path = tmp_path_factory.mktemp("weights")
    for name, config in (("untied", folders.LLAMA_3_1), ("tied", folders.LLAMA_3_2)):
        folders.folder(path / "hub" / name, config, files=2)
        assert main(["import", str(path / "hub" / name), "--into", str(path / name), "--shard-size", "90KB"]) == 0
    return path


@pytest.fixture(scope="module")
def references(pool, place):
    """One process that begins with a folder's weights, by the folder's name; each trained once."""
    known = {}

    def reference(name):
        if name not in known:
            config = folders.LLAMA_3_2 if name == "tied" else folders.LLAMA_3_1
            made = tiny.recipe(place, name=f"one-{name}", steps=3, init_from=str(place / name), **keys_of(config))
            run = tiny.begin(made)
            known[name] = (*pool.run(1, tiny.traced, made, run), run)
        return known[name]

    return reference


@pytest.mark.full
@pytest.mark.parametrize("keys", [{"shard": 2}, {"pipeline": 2, "tensor": 2, "shard": 2}], ids=str)
def test_their_own_folder_will_do(pool, place, references, tmp_path, keys):
    """Rows are turned on the fly, wherever shards cut through a head."""
    reference, _ = references("untied")
    made = tiny.recipe(tmp_path, steps=3, init_from=str(place / "hub" / "untied"), **keys_of(folders.LLAMA_3_1), **keys)
    assert compare(reference, pool.run(made.world, tiny.traced, made, tiny.begin(made))[0]).largest < BAR


@pytest.mark.full
@pytest.mark.parametrize("keys", [{"shard": 2}, {"pipeline": 2, "tensor": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("source", ["untied", "hub/untied", "run"])
def test_weights_that_are_left_out_are_the_same_under_any_layout(pool, place, references, tmp_path, keys, source):
    start = references("untied")[1].path if source == "run" else place / source
    given = {"init_from": str(start), "init_from_exclude": ("output", "layers.0.attention"), "steps": 3}
    given |= keys_of(folders.LLAMA_3_1)
    one, made = tiny.recipe(tmp_path / "one", **given), tiny.recipe(tmp_path, **given, **keys)
    (reference,) = pool.run(1, tiny.traced, one, tiny.begin(one))
    assert compare(reference, pool.run(made.world, tiny.traced, made, tiny.begin(made))[0]).largest < BAR


@pytest.mark.full
@pytest.mark.parametrize("keys", [{"shard": 2}, {"shard": 2, "tensor": 2}], ids=str)
def test_tied_embeddings_are_filled_once(pool, place, references, tmp_path, keys):
    reference, _ = references("tied")
    made = tiny.recipe(tmp_path, steps=3, init_from=str(place / "tied"), **keys_of(folders.LLAMA_3_2), **keys)
    assert compare(reference, pool.run(made.world, tiny.traced, made, tiny.begin(made))[0]).largest < BAR


@pytest.mark.parametrize("keys", EACH)
def test_a_run_of_any_layout_begins_with_the_weights_and_ends_in_an_export(pool, place, references, tmp_path, keys):
    """Losses, first gradients and last parameters are those of one process, and the export is the parameters."""
    reference, _ = references("untied")
    made = tiny.recipe(tmp_path, steps=3, init_from=str(place / "untied"), **keys_of(folders.LLAMA_3_1), **keys)
    run = tiny.begin(made)
    trace = pool.run(made.world, tiny.traced, made, run)[0]
    assert compare(reference, trace).largest < BAR
    # What the seed would have made is something else: it knows nothing, and says so.
    assert abs(trace.losses[0] - math.log(256)) > 0.2
    assert main(["export", str(run.path), "--into", str(tmp_path / "hf"), "--shard-size", "100KB"]) == 0
    source = open_folder(tmp_path / "hf", "x")
    found = {name: source.read(name, [0] * len(entry.shape), entry.shape) for name, entry in source.entries.items()}
    # To the last bit.
    assert folders.equal(found, trace.parameters)
    assert folders.read(tmp_path / "hf").keys() == folders.names(folders.LLAMA_3_1).keys()
    assert llama_hf.difference(source.model, made.model) == ""


def test_another_run_is_a_beginning_too_and_only_its_model(pool, place, references, tmp_path):
    """Not its optimizer, its step or its place in the data: that is checkpoint.load_from."""
    first, run = references("untied")
    keys = keys_of(folders.LLAMA_3_1)
    assert main(["export", str(run.path), "--into", str(tmp_path / "ours"), "--format", "titanlab"]) == 0
    traces = []
    for number, (where, more) in enumerate(
        [(run.path, {}), (latest(run.checkpoints), {"shard": 2}), (tmp_path / "ours", {})]
    ):
        made = tiny.recipe(tmp_path, name=f"next-{number}", steps=2, init_from=str(where), **keys, **more)
        check_beginning(made)
        traces.append(pool.run(made.world, tiny.traced, made, tiny.begin(made))[0])
    assert compare(traces[0], traces[1]).largest < BAR
    assert compare(traces[0], traces[2]).largest == 0
    # It goes on where that one ended, and begins its data anew.
    assert traces[0].losses[0] < first.losses[0]
    assert len(traces[0].losses) == 2


@pytest.mark.full
def test_bf16_is_cast_to_what_is_trained(pool, place, references, tmp_path):
    assert main(["export", str(place / "untied"), "--into", str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    made = tiny.recipe(tmp_path, steps=2, init_from=str(tmp_path / "half"), **keys_of(folders.LLAMA_3_1), shard=2)
    trace = pool.run(2, tiny.traced, made, tiny.begin(made))[0]
    assert {tensor.dtype for tensor in trace.parameters.values()} == {torch.float32}
    # bf16 has 8 bits: the loss moves by less than a hundredth.
    assert trace.losses[0] == pytest.approx(references("untied")[0].losses[0], rel=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bf16", "bf16_full", "fp16", "float8_tensorwise", "float8_rowwise"])
def test_every_precision_begins_with_the_weights_and_is_exported(pool, place, references, tmp_path, kind):
    """What precision wraps parameters in, or keeps them as, neither hides them nor goes out with them."""
    precision = schema_of("precision", kind)(**({"emulate": "true"} if kind.startswith("float8") else {}))
    made = tiny.recipe(
        tmp_path, steps=2, init_from=str(place / "untied"), precision=precision, shard=2, **keys_of(folders.LLAMA_3_1)
    )
    run = tiny.begin(made)
    trace = pool.run(2, tiny.traced, made, run)[0]
    # Three bits of mantissa in the products: the first loss is within one per cent.
    assert trace.losses[0] == pytest.approx(references("untied")[0].losses[0], rel=1e-2)
    assert main(["export", str(run.path), "--into", str(tmp_path / "hf")]) == 0
    (dtype,) = {tensor.dtype for tensor in folders.read(tmp_path / "hf").values()}
    assert dtype == (torch.bfloat16 if kind == "bf16_full" else torch.float32)


def test_a_run_that_has_begun_goes_on_from_its_own_checkpoint(pool, place, tmp_path):
    shutil.copytree(place / "untied", tmp_path / "weights")
    made = tiny.recipe(tmp_path, steps=2, init_from=str(tmp_path / "weights"), **keys_of(folders.LLAMA_3_1))
    run = tiny.begin(made)
    (before,) = pool.run(1, tiny.traced, made, run)
    # The folder is not needed any more.
    shutil.rmtree(tmp_path / "weights")
    made = tiny.changed(made, steps=4)
    (ready,) = prepare([made], print, started=True)
    (after,) = pool.run(1, tiny.traced, ready.recipe, tiny.begin(made, run))
    assert len(after.losses) == 2
    assert after.losses[0] < before.losses[0]
    with pytest.raises(ConfigError, match="there is no such folder"):
        prepare([made], print)


def test_the_weights_are_part_of_the_identity_and_where_they_lie_is_not(place, tmp_path):
    def identity(path, **more):
        made = replace(
            tiny.recipe(tmp_path, steps=2, **keys_of(folders.LLAMA_3_1)), init_from=path and str(path), **more
        )
        (ready,) = prepare([made], print)
        return ready.identity.hash8

    shutil.copytree(place / "untied", tmp_path / "moved")
    folders.folder(tmp_path / "hub", folders.LLAMA_3_1, seed=1)
    assert main(["import", str(tmp_path / "hub"), "--into", str(tmp_path / "other")]) == 0
    # Other sizes of files hold the same weights.
    assert main(["export", str(place / "untied"), "--into", str(tmp_path / "whole"), "--format", "titanlab"]) == 0
    first = identity(place / "untied")
    assert {identity(tmp_path / name) for name in ("moved", "whole")} == {first}
    hashes = {
        first,
        identity(None),
        identity(tmp_path / "other"),
        identity(tmp_path / "hub"),
        identity(place / "hub" / "untied"),
    }
    assert len(hashes) == 5
    shutil.copytree(tmp_path / "hub", tmp_path / "hub-moved")
    assert identity(tmp_path / "hub-moved") == identity(tmp_path / "hub")


@pytest.fixture(scope="module")
def with_tokenizer(pool, tmp_path_factory):
    """A run on text, with checkpoints of two steps and a SentencePiece tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    data = Files(files=str(tiny.corpus(folder) / "*.jsonl"), vocab_size=320, validation_fraction=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITANLAB_CACHE", str(folder / "cache"))
        source.prepare(data, report=lambda line: None)
        tokenizer = source.tokenizer(data)
    made = tiny.recipe(folder, data=data, vocab_size=384, steps=4, every=2, tied_embeddings=True)
    run = tiny.begin(made)
    run.tokenizer.mkdir()
    shutil.copy(tokenizer.file, run.tokenizer)
    pool.run(1, cached, str(folder / "cache"), made, run)
    return run


def cached(cache, made, run):
    os.environ["TITANLAB_CACHE"] = cache
    tiny.traced(made, run)


def test_a_step_is_chosen_and_the_tokenizer_goes_along(with_tokenizer, tmp_path, capsys):
    run = with_tokenizer
    assert [path.name for path in checkpoints(run.checkpoints)] == ["step-00000002", "step-00000004"]
    for name, more in {"last": [], "second": ["--step", "2"], "path": [str(checkpoints(run.checkpoints)[0])]}.items():
        given = more if name == "path" else [str(run.path), *more]
        assert main(["export", *given, "--into", str(tmp_path / name)]) == 0
    last, second, path = (folders.read(tmp_path / name) for name in ("last", "second", "path"))
    assert folders.equal(second, path)
    assert not folders.equal(second, last)
    # Tied: there is one table, with rows that no token has.
    assert "lm_head.weight" not in last
    assert last["model.embed_tokens.weight"].shape == (384, 64)
    config = json.loads((tmp_path / "last" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (1, 2, 384)
    assert config["tie_word_embeddings"] is True
    assert json.loads((tmp_path / "last" / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    capsys.readouterr()
    assert main(["export", str(run.path), "--into", str(tmp_path / "x"), "--step", "3"]) == 2
    assert capsys.readouterr().err == "error: --step=3: the run has no whole checkpoint of this step; it has 2, 4\n"


def test_text_comes_from_a_folder_of_weights_as_from_the_run(with_tokenizer, tmp_path, capsys):
    run = str(with_tokenizer.path)
    assert main(["export", run, "--into", str(tmp_path / "hf")]) == 0
    assert main(["import", str(tmp_path / "hf"), "--into", str(tmp_path / "ours")]) == 0
    said = set()
    for place in (run, tmp_path / "hf", tmp_path / "ours"):
        capsys.readouterr()
        assert main(["generate", str(place), "--prompt", "ab", "--tokens", "20", "--temperature", "0"]) == 0
        said.add(capsys.readouterr().out)
    assert len(said) == 1


@pytest.mark.full
def test_transformers_opens_a_run_with_its_tokenizer(with_tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from titanlab.data.tokenizers import load

    assert main(["export", str(with_tokenizer.path), "--into", str(tmp_path / "hf")]) == 0
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path / "hf"), load(with_tokenizer.tokenizer)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
    for text in ("hop", " a  b\n\n\tc", "é€😀 12 345", "<s> is text"):
        assert theirs.decode(ours.encode(text)) == text
        if "<s>" not in text:
            assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    ids = theirs("ab cd", return_tensors="pt")
    assert ids["input_ids"][0, 0] == ours.bos_id
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generate(**ids, max_new_tokens=5, do_sample=False).shape[1] <= ids["input_ids"].shape[1] + 5
