"""Tokenizers: every text comes back exactly, the tokens around documents, training, and foreign files named as such."""

from __future__ import annotations

import base64
import codecs
import json
import shutil
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors
from hypothesis import example, given
from hypothesis import strategies as st

from tests.data.conftest import text
from titanlab.data import download_tokenizer, keep
from titanlab.data.contract import Separators
from titanlab.data.new_tokenizer import train_sentencepiece
from titanlab.data.tokenizers import load, separators_in_words, separators_of
from titanlab.errors import ConfigError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@given(written=TEXTS)
@example("")
@example(" \n\n  def f():\n\treturn\r\n\x00\n  ")
@example("\u2581a \u2581\u2581b\u2581")
@example("<s></s><unk><0x41>")
@example("naïve 中文 🎉\u2028\ufeff")
def test_trained_tokenizer_gives_every_text_back(model_file, written):
    tokenizer = load(model_file)
    ids = tokenizer.encode(written)
    assert tokenizer.decode(ids) == written
    assert all(3 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.encode_many([written, "a", written]) == [ids, tokenizer.encode("a"), ids]


@given(written=TEXTS)
@example("<|begin|>a<|end|>")
@example("  two  spaces \n\t")
def test_json_tokenizer_gives_every_text_back(json_file, written):
    tokenizer = load(json_file)
    ids = tokenizer.encode(written)
    assert tokenizer.decode(ids) == written
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.encode_many([written, "a"]) == [ids, tokenizer.encode("a")]


def test_dropout_of_merges_is_off(json_file, tmp_path):
    content = json.loads(json_file.read_text())
    content["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    written = Path(json.__file__).read_text()
    assert load(tmp_path).encode(written) == load(json_file).encode(written)


WITH_NONE = {"None": 0, "<|endoftext|>": 1, "<s>": 2, "a": 3, "5": 4}
LACKING = "warning: {role} is {name} beside {file}, whose vocabulary lacks it"
NOTHING = "warning: no token begins or ends a document: nothing separates it from the next"


@pytest.mark.parametrize(
    ("config", "special_map", "ids", "separators", "lines"),
    [
        # Qwen: no text begins with a token, also where the vocabulary has the word "None".
        ({"bos_token": None, "eos_token": "<|endoftext|>"}, None, (None, 1), (None, 1), ["a document ends with token 1"]),
        # GPT-2 and SmolLM: one token separates documents, and begins a prompt.
        ({"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_bos_token": False}, None, (1, 1), (None, 1), ["a document ends with token 1"]),
        ({"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": True}, None, (2, 1), (2, 1), ["a document begins with token 2 and ends with token 1"]),
        # Phi-3: the vocabulary has a token that transformers puts before no text.
        ({"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False}, None, (None, 1), (None, 1), ["a document ends with token 1"]),
        ({"bos_token": "<s>", "eos_token": None}, None, (2, None), (2, None), ["a document begins with token 2"]),
        ({"bos_token": "<b>", "eos_token": "</s>"}, None, (None, None), (None, None), [LACKING.format(role="bos_token", name="<b>", file="{file}"), LACKING.format(role="eos_token", name="</s>", file="{file}"), NOTHING]),
        ({"bos_token": "<s>", "eos_token": {"content": "</s>"}}, None, (2, None), (2, None), ["a document begins with token 2", LACKING.format(role="eos_token", name="</s>", file="{file}")]),
        # A value that is not text names no token.
        ({"bos_token": 5, "eos_token": ["a"]}, None, (None, None), (None, None), [NOTHING]),
        # The older file beside it, which counts as long as the config does not list the added tokens.
        (None, {"bos_token": "<s>", "eos_token": {"content": "a"}, "add_bos_token": True}, (2, 3), (2, 3), ["a document begins with token 2 and ends with token 3"]),
        ({"eos_token": "a", "added_tokens_decoder": {}}, {"eos_token": "5"}, (2, 3), (2, 3), ["a document begins with token 2 and ends with token 3"]),
        (None, None, (2, 1), (2, 1), ["a document begins with token 2 and ends with token 1"]),
        ({"add_bos_token": False}, None, (None, 1), (None, 1), ["a document ends with token 1"]),
    ],
    ids=["null", "one token for both", "two tokens", "not added", "no end", "both lacking", "end lacking", "no text", "map", "map not read", "usual names", "usual names not added"],
)  # fmt: skip
def test_the_tokens_around_documents_are_those_of_the_files_beside_the_tokenizer(
    tmp_path, config, special_map, ids, separators, lines
):
    model = {"type": "WordLevel", "vocab": WITH_NONE, "unk_token": "a"}
    file, kept, alone = tmp_path / "tokenizer.json", tmp_path / "kept", tmp_path / "alone"
    file.write_text(json.dumps({"version": "1.0", "model": model}))
    alone.mkdir()
    keep(file, alone)
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special_map)):
        if content is not None:
            (tmp_path / name).write_text(json.dumps(content))
    kept.mkdir()
    keep(file, kept)
    for place in (tmp_path, kept):
        tokenizer = load(place)
        assert (tokenizer.bos_id, tokenizer.eos_id) == ids
        assert separators_of(tokenizer) == Separators(begin=separators[0], end=separators[1])
        assert separators_in_words(tokenizer) == [line.format(file=place / "tokenizer.json") for line in lines]
        # The same file with other tokens around documents is other data. Alone, the usual names count.
        assert (tokenizer.fingerprint == load(alone).fingerprint) == (separators == (2, 1))


@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("post", ["template", "bytes", None])
def test_a_document_begins_as_a_text_does_in_transformers(tmp_path, post, flag):
    from transformers import AutoTokenizer

    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    posts = {
        "template": {
            "type": "TemplateProcessing",
            "single": parts,
            "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [2], "tokens": ["<s>"]}},
        },
        "bytes": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        None: None,
    }
    model = {"type": "WordLevel", "vocab": WITH_NONE, "unk_token": "a"}
    cut = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}
    content = {"version": "1.0", "model": model, "pre_tokenizer": cut, "post_processor": posts[post]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": []}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    if flag is not None:
        config["add_bos_token"] = flag
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    # transformers 5 does not read the flag beside a tokenizer.json, transformers 4 does.
    adds = AutoTokenizer.from_pretrained(tmp_path)("a")["input_ids"][0] == 2 if flag is None else flag
    assert separators_of(load(tmp_path)) == Separators(begin=2 if adds else None, end=1)


@pytest.mark.parametrize(
    ("config", "ids", "lines"),
    [
        (None, (1, 2), ["a document begins with token 1 and ends with token 2"]),
        ({"bos_token": "<s>", "eos_token": "</s>"}, (1, 2), ["a document begins with token 1 and ends with token 2"]),
        ({"bos_token": None}, (None, 2), ["a document ends with token 2"]),
        ({"add_bos_token": False, "add_eos_token": False}, (None, 2), ["a document ends with token 2"]),
        (
            {"eos_token": {"content": "<|end|>"}},
            (1, None),
            ["a document begins with token 1", LACKING.format(role="eos_token", name="<|end|>", file="{file}")],
        ),
        ({"bos_token": "<unk>", "eos_token": "<unk>"}, (0, 0), ["a document ends with token 0"]),
    ],
    ids=["alone", "the same", "null", "not added", "lacking", "one token for both"],
)
def test_the_files_beside_a_sentencepiece_model_name_its_special_tokens(tmp_path, model_file, config, ids, lines):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.model").write_bytes(model_file.read_bytes())
    tokenizer, alone = load(tmp_path), load(model_file)
    assert (tokenizer.bos_id, tokenizer.eos_id) == ids
    assert separators_in_words(tokenizer) == [line.format(file=tmp_path / "tokenizer.model") for line in lines]
    # What is prepared with other tokens around documents is other data; the rest stays what it was.
    assert (tokenizer.fingerprint == alone.fingerprint) == (ids == (1, 2))


def test_a_config_that_cannot_be_read_is_said(tmp_path):
    model = {"type": "WordLevel", "vocab": WITH_NONE, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{")
    warning = f"warning: {config} names nothing that can be read: the usual names count"
    assert warning in separators_in_words(load(tmp_path))
    config.write_text('\ufeff{"bos_token": null, "eos_token": "a"}', encoding="utf-8")
    assert separators_in_words(load(tmp_path)) == ["a document ends with token 3"]


def test_half_a_character_is_shown_as_incomplete(model_file):
    tokenizer = load(model_file)
    ids = tokenizer.encode("🎉")
    assert len(ids) == 4
    assert tokenizer.decode(ids[:2]).endswith("\ufffd")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"not a model at all", "is not a SentencePiece model"),
        (bytes(range(256)) * 20, "is not a SentencePiece model"),
        (base64.b64encode(b"the") + b" 5\n" + base64.b64encode(b"a") + b" 6\n", "tiktoken"),
        (b'{"a": 1}', "is not a tokenizer.json"),
        (b'{"model": ' + b"[" * 100_000, "is not a tokenizer.json"),
        (json.dumps({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}).encode(), "has 2 tokens"),
        (json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}).encode(), "vocabulary"),
        (b"{\xff\xfe", "is not a tokenizer.json"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "is a pointer of Git LFS, .*`git lfs pull`"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, rule):
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rule) as caught:
        load(file)
    assert caught.value.key == "data.tokenizer"
    assert str(file) in str(caught.value)
    assert caught.value.cure


@pytest.mark.parametrize("name", ["mine.json", "tokenizer.json"])
def test_a_byte_order_mark_is_no_part_of_a_tokenizer(tmp_path, json_file, name):
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + json_file.read_bytes())
    tokenizer, plain = load(tmp_path / name), load(json_file)
    assert tokenizer.encode("def f(x):") == plain.encode("def f(x):")
    # Other readers than titanlab take no mark.
    (tmp_path / "kept").mkdir()
    assert keep(tmp_path / name, tmp_path / "kept") == "tokenizer.json"
    assert (tmp_path / "kept" / "tokenizer.json").read_bytes() == json_file.read_bytes()


@pytest.mark.parametrize("name", ["mine.json", "mine", "tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_is_kept_where_it_is_found(tmp_path, json_file, name):
    for folder in ("mine", "kept"):
        (tmp_path / folder).mkdir()
    mine = tmp_path / "mine" / name
    mine.write_bytes(json_file.read_bytes())
    mine.with_name("tokenizer_config.json").write_bytes(json_file.with_name("tokenizer_config.json").read_bytes())
    assert keep(mine, tmp_path / "kept") == "tokenizer.json"
    assert sorted(each.name for each in (tmp_path / "kept").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert load(tmp_path / "kept").fingerprint == load(mine).fingerprint == load(json_file).fingerprint


def test_a_model_of_another_name_is_kept_where_it_is_found(tmp_path, model_file):
    (tmp_path / "mine.json").write_bytes(model_file.read_bytes())
    (tmp_path / "kept").mkdir()
    assert keep(tmp_path / "mine.json", tmp_path / "kept") == "tokenizer.model"
    assert load(tmp_path / "kept").fingerprint == load(model_file).fingerprint
    # It is there already.
    assert keep(tmp_path / "kept" / "tokenizer.model", tmp_path / "kept") == "tokenizer.model"


def test_a_link_where_a_tokenizer_is_kept_is_replaced(tmp_path, model_file):
    """A stranger's run may have a link to any file of the user there."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "tokenizer.model").symlink_to(tmp_path / "precious")
    assert keep(model_file, tmp_path / "kept") == "tokenizer.model"
    assert load(tmp_path / "kept").fingerprint == load(model_file).fingerprint
    assert (tmp_path / "precious").read_text() == "precious"


def added(name, number):
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return {"id": number, "content": name, "special": True, **dict.fromkeys(flags, False)}


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "rule"),
    [
        ({"a": 0, "b": 1, "c": 1}, [], "gives the id 1 to two tokens"),
        ({"a": 0, "b": 1, "c": 9_000_000}, [], "has ids up to 9000000 and only 3 tokens"),
        ({"a": 0, "b": 1, "c": -1}, [], r"is not a tokenizer\.json .*expected u32"),
        ({"a": 0, "b": 1, "c": 2}, [added("a", 500)], "'a' the id 500, and the tokenizers library gives it 0"),
        ({"a": 0, "b": 1, "c": 2}, [added("d", 500)], "'d' the id 500, and the tokenizers library gives it 3"),
    ],
    ids=["one id for two", "a gap", "negative", "moved", "beyond"],
)
def test_a_vocabulary_that_no_model_can_use_is_refused(tmp_path, vocabulary, tokens, rule):
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": tokens, "model": model}))
    with pytest.raises(ConfigError, match=rule) as refused:
        load(tmp_path)
    assert refused.value.key == "data.tokenizer"


def test_training_is_repeatable(tmp_path):
    for name in ("a", "b"):
        train_sentencepiece((text(number) for number in range(30)), vocab_size=330, file=tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("texts", "vocab_size", "key", "message"),
    [
        (["a few words"], 400, "data.vocab_size", r"too small for it: it has \d+ pieces; give more text"),
        ([text(n) for n in range(20)], 5000, "data.vocab_size", r"it has \d+ pieces; try \d+"),
        (["".join(map(chr, range(0x4E00, 0x5200)))], 400, "data.vocab_size", r"it needs \d+; try \d+"),
        ([], 400, "data", "no text to train a tokenizer on"),
    ],
)
def test_texts_that_cannot_train_a_tokenizer(tmp_path, texts, vocab_size, key, message):
    with pytest.raises(ConfigError, match=message) as caught:
        train_sentencepiece(texts, vocab_size=vocab_size, file=tmp_path / "t.model")
    assert caught.value.key == key
    assert not (tmp_path / "t.model").exists()


def test_an_error_of_the_texts_is_the_callers_error(tmp_path):
    def broken():
        yield text(1)
        raise ConfigError("data.files", "x", "broke", "mend it")

    with pytest.raises(ConfigError, match=r"^data\.files=x: broke; mend it$"):
        train_sentencepiece(broken(), vocab_size=330, file=tmp_path / "t.model")
    assert not (tmp_path / "t.model").exists()


# Fetching a tokenizer, from a hub that is a folder here


def failed(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid/x"))
    return kind("no", response=response)


class Hub:
    """Stands in for `hf_hub_download`: files of a folder, or an error."""

    def __init__(self, folder=None, error=None):
        self.folder, self.error = folder, error
        self.asked = []

    def __call__(self, *, repo_id, filename, local_dir, token):
        self.asked.append((repo_id, filename, token))
        if self.error is not None:
            raise self.error
        assert self.folder is not None
        if not (self.folder / filename).is_file():
            raise failed(errors.RemoteEntryNotFoundError, 404)
        (Path(local_dir) / ".cache").mkdir(exist_ok=True)
        return str(shutil.copyfile(self.folder / filename, Path(local_dir, filename)))


@pytest.fixture
def hub(monkeypatch):
    def install(**how):
        made = Hub(**how)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("titanlab.system.hub.silence", lambda: None)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", made)
        return made

    return install


def test_fetches_what_the_model_has(hub, json_file, tmp_path):
    fake, lines = hub(folder=json_file.parent), []
    found = download_tokenizer("owner/model", tmp_path / "a" / "b", "secret", report=lines.append)
    assert found == tmp_path / "a" / "b" / "tokenizer.json"
    assert sorted(each.name for each in found.parent.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert (load(found).bos_id, load(found.parent).eos_id) == (0, 1)
    assert {(repo, token) for repo, _, token in fake.asked} == {("owner/model", "secret")}
    assert any(f"{load(found).vocab_size} tokens" in line for line in lines)
    assert not any("secret" in line for line in lines)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (failed(errors.GatedRepoError, 403), "does not let you in: .*; accept its terms .*--token or HF_TOKEN"),
        (failed(errors.RepositoryNotFoundError, 404), "is not a model of the hub, or is private; check its name"),
        (errors.LocalEntryNotFoundError("offline"), r"cannot be fetched \(offline\); check the network"),
        (httpx.ConnectError("no route\nto host"), r"cannot be fetched \(no route to host\); check the network"),
    ],
)
def test_a_hub_that_gives_nothing(hub, tmp_path, error, message):
    hub(error=error)
    with pytest.raises(ConfigError, match=f"^repo=owner/model: {message}") as caught:
        download_tokenizer("owner/model", tmp_path / "out", "secret")
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_tokenizer(hub, tmp_path):
    (tmp_path / "hub").mkdir()
    hub(folder=tmp_path / "hub")
    with pytest.raises(ConfigError, match=r"has neither tokenizer\.json nor tokenizer\.model"):
        download_tokenizer("owner/model", tmp_path / "out")


def test_a_file_that_is_no_tokenizer_replaces_nothing(hub, tmp_path, model_file):
    shutil.copytree(model_file.parent, tmp_path / "out")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "tokenizer.model").write_bytes(b"dGhl 0\nYQ== 1\n")
    hub(folder=tmp_path / "hub")
    with pytest.raises(ConfigError, match=r"tokenizer\.model: is in tiktoken's format"):
        download_tokenizer("owner/model", tmp_path / "out")
    assert load(tmp_path / "out").fingerprint == load(model_file).fingerprint


def test_a_folder_that_cannot_be_written(hub, tmp_path, model_file):
    hub(folder=model_file.parent)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="^--folder=.*: cannot be written"):
        download_tokenizer("owner/model", tmp_path / "file" / "below")
