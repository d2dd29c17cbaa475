"""Import, export and import again: the same bits, whatever the sizes of files; and nothing half done looks whole."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.weights.huggingface import made
from titanlab.cli import main
from titanlab.data.tokenizers import load
from titanlab.train import interchange
from titanlab.train.interchange import write_tokenizer_config
from titanlab.train.weights import open_weights


def run(*arguments):
    assert main([str(each) for each in arguments]) == 0


@pytest.mark.parametrize("family", made.FAMILIES)
def test_import_export_import_is_bit_equal(tmp_path, family):
    there = made.folder(tmp_path / "hub", made.FAMILIES[family], torch.bfloat16, files=3)
    run("import", there, "--into", tmp_path / "one", "--shard-size", "40KB")
    run("export", tmp_path / "one", "--into", tmp_path / "back", "--shard-size", "70KB")
    run("import", tmp_path / "back", "--into", tmp_path / "two")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 3
    assert made.equal(made.read(there), made.read(tmp_path / "back"))
    assert made.equal(made.read(tmp_path / "one"), made.read(tmp_path / "two"))
    one, two = (open_weights(tmp_path / name, "x") for name in ("one", "two"))
    assert (one.digest, one.model, one.about) == (two.digest, two.model, two.about)
    # What config.json says beside the model, and how it samples, come through.
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == ([2, 3], 512)
    assert config["torch_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["temperature"] == 0.6
    # Readers find each tensor by the index.
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == made.names(made.FAMILIES[family]).keys()


def test_export_casts(tmp_path):
    run("import", made.folder(tmp_path / "hub"), "--into", tmp_path / "one")
    run("export", tmp_path / "one", "--into", tmp_path / "half", "--dtype", "bfloat16")
    wanted = {name: value.bfloat16() for name, value in made.read(tmp_path / "hub").items()}
    assert made.equal(made.read(tmp_path / "half"), wanted)
    # A folder of theirs needs no import to be written again.
    run("export", tmp_path / "hub", "--into", tmp_path / "direct", "--dtype", "float16", "--shard-size", "1")
    assert json.loads((tmp_path / "direct" / "config.json").read_text())["torch_dtype"] == "float16"
    assert len(list((tmp_path / "direct").glob("*.safetensors"))) == len(wanted)
    run("export", tmp_path / "hub", "--into", tmp_path / "ours", "--format", "titanlab")
    assert made.equal(made.read(tmp_path / "ours"), made.read(tmp_path / "one"))


@pytest.mark.parametrize("how", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_import_leaves_nothing(tmp_path, monkeypatch, how):
    there = made.folder(tmp_path / "hub")
    seen = []

    def stop(piece, dtype, name):
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        if len(seen) == 9:
            raise how("enough")
        return piece

    monkeypatch.setattr(interchange, "_cast", stop)
    if how is KeyboardInterrupt:
        assert main(["import", str(there), "--into", str(tmp_path / "one")]) != 0
    else:
        with pytest.raises(how):
            main(["import", str(there), "--into", str(tmp_path / "one")])
    assert seen[-1] == ["hub", "one.part"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub"]


def test_what_is_there_is_replaced_where_a_person_says_so(tmp_path, capsys):
    first, second = (made.folder(tmp_path / name, seed=seed) for seed, name in enumerate("ab"))
    run("import", first, "--into", tmp_path / "one", "--shard-size", "50KB")
    before = made.read(tmp_path / "one")
    assert main(["import", str(second), "--into", str(tmp_path / "one")]) == 2
    assert "exists; name another folder, or give --force" in capsys.readouterr().err
    assert made.equal(made.read(tmp_path / "one"), before)
    run("import", second, "--into", tmp_path / "one", "--force")
    assert not made.equal(made.read(tmp_path / "one"), before)
    assert len(made.read(tmp_path / "one")) == len(before)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    assert main(["import", str(second), "--into", str(tmp_path / "mine"), "--force"]) == 2
    assert "contains something other than weights" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.txt").exists()


MEASURE = """
import os, resource, sys, threading
import torch, safetensors.torch, torch.distributed.checkpoint
from titanlab.cli import main
def resident():
    with open("/proc/self/status") as file:
        return {line.split()[0]: int(line.split()[1]) for line in file if line.startswith(("RssAnon", "VmRSS"))}
torch.ones(8) @ torch.ones(8)
before, peak, over = resident(), {"RssAnon:": 0, "VmRSS:": 0}, threading.Event()
def watch():
    while not over.wait(0.002):
        for name, value in resident().items():
            peak[name] = max(peak[name], value - before[name])
watcher = threading.Thread(target=watch); watcher.start()
code = main(sys.argv[1:])
over.set(); watcher.join()
print("PEAK", peak["RssAnon:"] // 1024, peak["VmRSS:"] // 1024)
sys.exit(code)
"""


@pytest.mark.full
def test_memory_does_not_grow_with_the_model(tmp_path):
    """904 MiB of weights, the largest tensor of 256 MiB, go through at most four pieces of 64 MiB."""
    config = {
        **made.SMALL, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 2,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32768,
    }  # fmt: skip
    there = made.folder(tmp_path / "hub", config, torch.float32, files=2)
    size = sum(path.stat().st_size for path in there.glob("*.safetensors"))
    assert size > 9e8
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for arguments in (
        ["import", there, "--into", tmp_path / "one"],
        ["export", tmp_path / "one", "--into", tmp_path / "back", "--dtype", "bfloat16"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, *map(str, arguments)],
            capture_output=True, text=True, env=environ, check=True,
        )  # fmt: skip
        anonymous, resident = map(int, done.stdout.split("PEAK")[1].split())
        # Pages of the file that is read are mapped beside what is allocated.
        assert anonymous < 4 * 64, done.stdout
        assert resident < 6 * 64, done.stdout


# Tokenizers go through an import and an export


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer of three words."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


WRITTEN = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 64,
    "bos_token": "<s>",
    "add_bos_token": True,
    "eos_token": "</s>",
}


def written(folder):
    write_tokenizer_config(folder, bos_id=0, eos_id=1, context=64)
    return json.loads((folder / "tokenizer_config.json").read_text())


def test_special_tokens_and_the_context_are_written(folder):
    assert written(folder) == WRITTEN


def test_entries_of_an_existing_file_are_kept(folder):
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a", "chat_template": "x"}')
    assert written(folder) == {**WRITTEN, "eos_token": "a", "chat_template": "x"}


@pytest.mark.parametrize("content", [b"{", b"[1]", b"null", b"\xff", b"[" * 100_000], ids=lambda content: content[:4])
def test_a_damaged_file_is_written_anew(folder, content):
    """Reading a tokenizer ignores it, too."""
    (folder / "tokenizer_config.json").write_bytes(content)
    assert written(folder) == WRITTEN


TOKENS = [*(bytes([byte]) for byte in range(256)), *(b" t", b"th", b" th", b"the", b" the", b"12", b"123", b"\n\n")]


def write(folder):
    """Write a tokenizer as Meta's folders have it."""
    (folder / "original").mkdir()
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(TOKENS))
    (folder / "original" / "tokenizer.model").write_bytes(b"".join(lines))


@pytest.mark.full
def test_an_original_tokenizer_is_imported_and_exported(tmp_path, monkeypatch, capsys):
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    folder = made.folder(tmp_path / "there", {**made.LLAMA_3_1, "vocab_size": len(TOKENS) + 256})
    write(folder)
    assert main(["import", str(folder), "--into", "ours"]) == 0
    assert "data.tokenizer=ours/tokenizer" in capsys.readouterr().out
    assert [path.name for path in Path("ours/tokenizer").iterdir()] == ["tokenizer.model"]
    assert main(["export", "ours", "--into", "theirs"]) == 0
    ours, theirs = load(Path("ours/tokenizer")), AutoTokenizer.from_pretrained("theirs")
    text = "I'll return  def f(x):\n\t naïve 中文 12345 the tokens"
    assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert (theirs.bos_token, theirs.bos_token_id) == ("<|begin_of_text|>", ours.bos_id)
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|end_of_text|>", ours.eos_id)
    # A tokenizer.model is SentencePiece's to everybody else.
    assert not Path("theirs/tokenizer.model").exists()
    # Sampling needs no import.
    assert main(["generate", str(folder), "--prompt", "the", "--tokens", "2"]) == 0
