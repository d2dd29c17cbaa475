"""Text from a checkpoint: the same for a seed, the prompt heeded, and no half of a character ever shown."""

import os
import shutil

import pytest
import torch

from tests import tiny
from titanlab.checkpoint import index as module
from titanlab.checkpoint import latest, remove
from titanlab.data import source
from titanlab.data.schema import Files
from titanlab.data.tokenizers import load
from titanlab.distributed import ALONE, joined, open_world
from titanlab.errors import ConfigError
from titanlab.prove.parity import trace
from titanlab.recipe import from_mapping
from titanlab.train import generate as sampling
from titanlab.train.generate import generate

STEPS = 40


def trained(cache, made, run):
    os.environ["TITANLAB_CACHE"] = cache
    return trace(made, run, joined(os.environ) or ALONE).losses


@pytest.fixture(scope="module")
def run(pool, tmp_path_factory):
    """A run that has learned a little of a small corpus, and its tokenizer."""
    folder = tmp_path_factory.mktemp("generate")
    cache = folder / "cache"
    data = Files(files=str(tiny.corpus(folder) / "*.jsonl"), vocab_size=320, validation_fraction=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITANLAB_CACHE", str(cache))
        source.prepare(data, report=lambda line: None)
        tokenizer = source.tokenizer(data)
    # Rows of the vocabulary that no token has, as where it is padded to a rounder number.
    made = tiny.recipe(folder, data=data, vocab_size=384, steps=STEPS, shard=2, lr=1e-2)
    found = tiny.begin(made)
    found.tokenizer.mkdir()
    shutil.copy(tokenizer.file, found.tokenizer)
    losses = pool.run(2, trained, str(cache), made, found)[0]
    assert losses[-1] < 0.8 * losses[0]
    return found


def text(run, prompt="ab", tokens=30, **how):
    return "".join(generate(run.path, prompt, tokens=tokens, **how))


def test_a_seed_gives_the_same_text_each_time(run):
    first = text(run, seed=1)
    assert len(first) > 10
    assert text(run, seed=1) == first
    assert text(run, seed=2) != first
    # Whatever else has drawn from torch's own generator.
    torch.rand(3)
    assert text(run, seed=1) == first


def test_without_temperature_the_likeliest_is_taken(run):
    greedy = text(run, temperature=0)
    assert text(run, temperature=0, seed=5) == greedy
    assert text(run, temperature=1.0, top_k=1, seed=5) == greedy
    assert text(run, temperature=1e-4, top_k=0, seed=6) == greedy


def test_the_prompt_is_heeded(run):
    # With one seed, nothing but the prompt can make a difference.
    assert len({text(run, prompt, seed=1, temperature=1.0, top_k=0) for prompt in ("ab cd", "hop", "")}) == 3
    assert text(run, "", temperature=0) != ""


def test_it_ends_after_so_many_tokens_and_comes_piece_by_piece(run):
    assert len(list(generate(run.path, "ab", tokens=7))) <= 7
    pieces = list(generate(run.path, "ab", tokens=40, seed=3))
    assert len(pieces) > 20
    # Longer than the 32 tokens that the model was trained on.
    assert len(text(run, tokens=80, seed=3)) > len(text(run, tokens=40, seed=3))


def test_the_checkpoint_is_read_whole_whatever_layout_wrote_it(run):
    """The likeliest token of the model by hand is the one that comes first."""
    with open_world(ALONE, accelerator="cpu", seed=0, deterministic=False):
        model = sampling._load(from_mapping(run.config()), latest(run.checkpoints), torch.device("cpu"))
    tokenizer = load(run.tokenizer)
    ids = [tokenizer.bos_id, *tokenizer.encode("hop")]
    best = int(model(torch.tensor([ids]))[0, -1, :320].argmax())
    assert "".join(generate(run.path, "hop", tokens=1, temperature=0)) == tokenizer.decode([*ids[1:], best])[3:]


class Scripted:
    """A tokenizer of bytes, with a beginning and an end of text, that drops a first space as some do."""

    bos_id, eos_id, vocab_size, file, fingerprint = 256, 257, 258, None, ""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(token for token in ids if token < 256).decode(errors="replace").removeprefix(" ")


@pytest.fixture
def says(run, monkeypatch):
    """What is shown, piece by piece, where the model says just these bytes and then the end of text."""

    def shown(said: bytes, prompt="x", tokens=100, end=257):
        following = iter([*said, end])
        monkeypatch.setattr(sampling.tokenizers, "load", lambda folder, key: Scripted())
        monkeypatch.setattr(sampling, "_load", lambda recipe, checkpoint, device: None)
        monkeypatch.setattr(sampling, "_next", lambda model, ids, *how: next(following))
        return list(generate(run.path, prompt, tokens=tokens))

    return shown


def test_no_half_of_a_character_is_shown(says):
    assert says("é€😀!".encode()) == ["é", "€", "😀", "!"]
    # Cut off in the middle of a character: the rest never comes, and nothing of it is shown.
    assert says("a😀".encode(), tokens=3) == ["a"]
    # Bytes that are not a character are shown as such once that is certain.
    assert "".join(says(b"a\xf0\x9fb")) == "a\ufffdb"


def test_the_space_after_the_prompt_is_kept(says):
    assert "".join(says(b" y")) == " y"
    assert "".join(says(b"y", prompt="")) == "y"
    # The prompt itself comes back without its first space.
    assert "".join(says(b" y", prompt=" x")) == " y"


def test_what_cannot_be_sampled_is_said(run, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"^run=.*holds no complete checkpoint"):
        copy = shutil.copytree(run.path, tmp_path / "empty", ignore=shutil.ignore_patterns("step-*"))
        list(generate(copy, "x", tokens=1))
    with pytest.raises(ConfigError, match=r"^run=.*was trained on data without a tokenizer"):
        copy = shutil.copytree(run.path, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer"))
        list(generate(copy, "x", tokens=1))
    monkeypatch.setattr(Scripted, "bos_id", None)
    monkeypatch.setattr(sampling.tokenizers, "load", lambda folder, key: Scripted())
    with pytest.raises(ConfigError, match=r"^--prompt=: is empty, and this tokenizer has no beginning of text"):
        list(generate(run.path, "", tokens=1))


def test_a_checkpoint_that_the_run_removes_meanwhile_is_replaced_by_the_next(run, tmp_path, monkeypatch):
    copied = shutil.copytree(run.path, tmp_path / run.path.name)
    old, real, said = latest(copied / "checkpoints"), module.read_index, []

    def read(checkpoint):
        if old.exists():
            shutil.copytree(old, old.with_name("step-40"))
            assert remove(old) is None
        return real(checkpoint)

    monkeypatch.setattr(module, "read_index", read)
    assert "".join(generate(copied, "ab", tokens=3, warn=said.append)) == text(run, tokens=3)
    assert said == [f"{old.name} was removed while it was read (checkpoint.keep of its run): the next one is read"]
