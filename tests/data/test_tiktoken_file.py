"""tiktoken's format: the same ids as merging by rank gives, and damaged files named."""

import base64
import random
from itertools import pairwise

import pytest
import tokenizers

from tests.data.conftest import text
from titanlab.data.tiktoken_file import PATTERN, SPECIAL, _characters
from titanlab.data.tokenizer import load
from titanlab.errors import ConfigError


def split(written):
    """Where Llama 3's pattern splits a text."""
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    return [piece for piece, _ in cut.pre_tokenize_str(written)]


def merged(ranks, piece):
    """Ids of a piece, by tiktoken's rule: a piece that is a token is one; else the pair of lowest rank is merged."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while len(parts) > 1:
        rank, place = min((ranks.get(a + b, 1 << 40), place) for place, (a, b) in enumerate(pairwise(parts)))
        if rank == 1 << 40:
            break
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [ranks[part] for part in parts]


@pytest.fixture(scope="module")
def tokens():
    """Bytes of 700 tokens in the order of their ranks, trained on a small text."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = "don't DON'T we'll aaaaa aaaaaaa 1234567 naïve 中文中文 🎉🎉 \n\n\n  x\t\t "
    made.train_from_iterator(
        [*(text(number) for number in range(30)), *[words] * 30],
        tokenizers.trainers.BpeTrainer(
            vocab_size=700,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    byte_of = {character: byte for byte, character in enumerate(_characters())}
    by_rank = sorted(made.get_vocab().items(), key=lambda pair: pair[1])
    return [bytes(byte_of[character] for character in name) for name, _ in by_rank]


def written(path, tokens):
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def test_ids_are_those_of_merging_by_rank(tokens, tmp_path):
    tokenizer = load(written(tmp_path / "tokenizer.model", tokens))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    draw = random.Random(0)
    texts = [text(500), "", "a" * 50, " " * 40, "don't DON'T we'LL 12345\r\n\n x  ", "<|begin_of_text|>a<|eot_id|>"]
    texts += ["".join(draw.choices("aaab \n\t'sdlvTLE019.,中é🎉\u00a0\u2028ſ", k=40)) for _ in range(500)]
    for each in texts:
        assert tokenizer.encode(each) == [rank for piece in split(each) for rank in merged(ranks, piece.encode())]
        assert tokenizer.decode(tokenizer.encode(each)) == each
    assert tokenizer.encode_many(texts[:3]) == [tokenizer.encode(each) for each in texts[:3]]


def test_text_is_split_as_llama_3_splits_it():
    assert split("I'll pay 12345 €\n\n  in DON'T") == [
        *("I", "'ll", " pay", " ", "123", "45", " €\n\n", " ", " in", " DON", "'T"),
    ]


def test_special_tokens_are_llama_3s(tokens, tmp_path):
    tokenizer = load(written(tmp_path / "tokenizer.model", tokens))
    assert tokenizer.vocab_size == len(tokens) + 256
    # 128,000 tokens, and these numbers: https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
    assert [SPECIAL.index(name) for name in ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>")] == [0, 1, 9]
    assert (len(SPECIAL), len(set(SPECIAL)), SPECIAL[-1]) == (256, 256, "<|reserved_special_token_250|>")
    assert (tokenizer.bos_id, tokenizer.eos_id) == (len(tokens), len(tokens) + 1)


def test_a_folder_as_meta_released_it_has_one(tokens, tmp_path):
    (tmp_path / "original").mkdir()
    file = written(tmp_path / "original" / "tokenizer.model", tokens)
    assert load(tmp_path).file == file


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda lines: lines[:100], "byte "),
        (lambda lines: [*lines[:300], b"!!! 300", *lines[301:]], "line 301 is no token and rank"),
        (lambda lines: [*lines[:300], *lines[301:]], "line 301 has not the next rank"),
        (lambda lines: [*lines[:300], lines[0].split()[0] + b" 300", *lines[301:]], "or a token twice"),
        (lambda lines: [*lines[:300], lines[300][:3]], "line 301 is no token and rank"),
    ],
    ids=["cut", "no base64", "a line lost", "twice", "torn"],
)
def test_a_damaged_file_is_one_line(tokens, tmp_path, change, rule):
    path = written(tmp_path / "tokenizer.model", tokens)
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())) + b"\n")
    with pytest.raises(ConfigError, match="is in tiktoken's format, and damaged: ") as refused:
        load(path)
    assert rule in str(refused.value)
