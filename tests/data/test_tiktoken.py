"""tiktoken's format: the same ids as tiktoken and merging by rank give, and damaged files named."""

import base64
import json
import random

import pytest
import tiktoken
import tokenizers

from tests.data.conftest import text
from titanlab.data.tokenizers import SPECIAL, _characters, load
from titanlab.errors import ConfigError


@pytest.fixture(scope="module")
def tokens():
    """Bytes of some 400 tokens in the order of their ranks, trained on a small text."""
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


def reference(tokens):
    """The tiktoken library's tokenizer of these tokens, made as Llama 3's program makes it."""
    # https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {name: len(tokens) + number for number, name in enumerate(SPECIAL)}
    return tiktoken.Encoding("llama 3", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def test_ids_are_those_of_tiktoken(tokens, tmp_path):
    theirs, ours = reference(tokens), load(written(tmp_path / "tokenizer.model", tokens))
    draw = random.Random(1)
    pieces = [*"I'll don't the def return 中 🎉 é ſ K _ ( = 1 23 's 'LL a aa".split(), *(" ", "  ", "\n", "\r\n", "\t")]
    texts = [
        *["", " ", "\n", "I'll we've DON'T it'S o'clock 'sſ K", "123456 7 89 1,000.5", "a\r\n\r\n b\n\n\nc"],
        *["  def f(x):\n\treturn {x: 1}\n", "naïve 中文 🎉 e\u0301 \u2028 ﬁ \u00a0\u200d", "\x00\ufffd\ufeff"],
        *["<|begin_of_text|>a<|eot_id|>", " " * 133 + "x", "=" * 333, "a" * 501, "\n" * 77, "\t \t" * 40, text(300)],
        *("".join(draw.choices(pieces, k=draw.randint(1, 40))) for _ in range(1000)),
        *(draw.choice(pieces) * draw.randint(1, 99) + draw.choice(pieces) * draw.randint(1, 99) for _ in range(200)),
    ]
    assert ours.encode_many(texts) == [theirs.encode_ordinary(each) for each in texts]
    assert [ours.decode(ours.encode(each)) for each in texts] == texts


def test_ids_are_those_of_tiktoken_whatever_the_order_of_ranks(tmp_path):
    # Tokens of few letters can be merged from many pairs, of which the first is to be taken.
    draw = random.Random(2)
    for letters in ("a", "ab", "abc", "ab \n") * 3:
        tokens = [bytes([byte]) for byte in range(256)]
        known = [letter.encode() for letter in letters]
        for _ in range(40):
            token = draw.choice(known) + draw.choice(known)
            if len(token) <= 12 and token not in tokens:
                tokens.append(token)
                known.append(token)
        theirs, ours = reference(tokens), load(written(tmp_path / "tokenizer.model", tokens))
        texts = ["".join(draw.choices(letters, k=draw.randint(1, 40))) for _ in range(100)]
        assert ours.encode_many(texts) == [theirs.encode_ordinary(each) for each in texts]


def test_a_file_of_another_model_is_refused(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([97, *number.to_bytes(2, "big")]) for number in range(50_256 - 256)]
    rule = r"is in tiktoken's format and has the 50,256 ranks of GPT-2 \(r50k_base\); only Llama 3's can be read"
    with pytest.raises(ConfigError, match=rule):
        load(written(tmp_path / "tokenizer.model", tokens))


def test_special_tokens_are_left_out_of_text(tokens, tmp_path):
    tokenizer = load(written(tmp_path / "tokenizer.model", tokens))
    first = len(tokens)
    assert tokenizer.decode([first, *tokenizer.encode("a b"), first + 1, first + 255]) == "a b"
    # A model that was tuned to talk says so beside it.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    tuned = load(tmp_path)
    assert (tuned.bos_id, tuned.eos_id) == (first, first + 9)
    assert tuned.fingerprint != tokenizer.fingerprint


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
        (lambda lines: [*lines[:300], b"!!! 300", *lines[301:]], "line 301 has no token and rank"),
        (lambda lines: [*lines[:300], *lines[301:]], "line 301 does not have the next rank"),
        (lambda lines: [*lines[:300], lines[0].split()[0] + b" 300", *lines[301:]], "or repeats a token"),
        # Before it was held, 200,000 bytes took 20 GB of memory.
        (
            lambda lines: [*lines[:300], base64.b64encode(b"a" * 200_000) + b" 300"],
            "line 301 has a token of 200000 bytes",
        ),
        (
            lambda lines: [*lines[:300], lines[300].split()[0] + b" -300", *lines[301:]],
            "line 301 does not have the next rank",
        ),
    ],
    ids=["cut", "no base64", "a line lost", "twice", "long", "negative"],
)
def test_a_damaged_file_is_one_line(tokens, tmp_path, change, rule):
    path = written(tmp_path / "tokenizer.model", tokens)
    path.write_bytes(b"\n".join(change(path.read_bytes().splitlines())) + b"\n")
    with pytest.raises(ConfigError, match="is in tiktoken's format, and damaged: ") as refused:
        load(path)
    assert rule in str(refused.value)
