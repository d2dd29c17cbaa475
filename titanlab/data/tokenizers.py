"""Tokenizers: text to token ids and back, from SentencePiece's or tiktoken's `.model` or an HF `tokenizer.json`.

A file of tiktoken, such as Llama 3's own `original/tokenizer.model`, has lines of `base64 rank`: the bytes and the rank
of each token. The regular expression that first splits text, and the special tokens, are not in the file: both are
taken from Llama 3's `llama/tokenizer.py`. The tokenizers library does the encoding.

This library matches patterns with Oniguruma, which backtracks: a pattern such as `(a+)+$` can run practically for ever,
in native code that cannot be interrupted. So patterns are first tried in a process with a time limit, except patterns
that are known to be harmless. `python -m titanlab.data.tokenizers FILE SECONDS TRIAL_SECONDS` is that process.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import contextlib
import hashlib
import importlib
import json
import os
import re
import signal
import string
import subprocess
import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from titanlab.data.contract import Separators
from titanlab.data.corpus import other_format
from titanlab.distributed import cores
from titanlab.errors import ConfigError
from titanlab.system import module_command, parse_json, write_bytes

_MODEL, _JSON, _CONFIG = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
# This file names the special tokens if the tokenizer_config.json is from before 2023 and does not list added tokens.
_MAP = "special_tokens_map.json"
_GIVE = f"give a .model or {_JSON}"
# Name on the hub of the tokenizer file that Meta released with a model.
ORIGINAL = "original/tokenizer.model"
# Usual names of special tokens, for tokenizers without a `tokenizer_config.json`.
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
_SPACE = "\u2581"
# The trial's text has runs of one repeated character; this is the length of each run.
_RUN = 1000
_PLAIN = "The 1st line, it's naïve: 'x' == \"y\"\n\n  def f(x):\r\n\treturn {x: 中文}\n"
# A line of tiktoken's files.
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
# The fewest tokens that can write text: two letters and a space. A file with fewer tokens is damaged.
_FEWEST_TOKENS = 3
# A vocabulary of n tokens may have at most n + _UNUSED ids without a token.
_UNUSED = 1000
SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
)
# Number of tokens in files of other models, which split text otherwise: Llama 3's pattern would give wrong tokens.
_OTHERS = {
    50256: "GPT-2 (r50k_base)",
    50280: "Codex (p50k_base)",
    100256: "GPT-4 (cl100k_base)",
    151643: "Qwen",
    163584: "Kimi K2",
    199998: "GPT-4o (o200k_base)",
    200000: "Llama 4",
}
# Largest length of a token in bytes; time and memory to find the merges of a token grow with the square of its length.
_LONGEST = 512
# Time limit of the process that tries patterns: SECONDS, and one second for BYTES_PER_SECOND bytes of the file.
SECONDS = 30.0
BYTES_PER_SECOND = 1 << 20
# Limit of CPU seconds for the trial itself; usual patterns take 0.1 s.
TRIAL_SECONDS = 2.0
# Exit code of the process that tries patterns if Oniguruma has reached its own limit on backtracking.
GIVEN_UP = 3
# Llama 3's pattern, from its `llama/tokenizer.py`.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN = frozenset(
    [
        PATTERN,
        # GPT-2, and files that spell its pattern out: https://github.com/openai/gpt-2/blob/master/src/encoder.py
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Qwen 2 and 3.
        PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
        # cl100k: https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
        PATTERN.replace(r"\s*[\r\n]+|", r"\s*[\r\n]|"),
        PATTERN.replace(_CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)"),
        # DeepSeek and other models first split the text with these patterns.
        *(r"\p{N}{1,3}", r"\p{N}", r"[0-9]", r"\d", r"[\r\n]", r"\s", r" ", r" {2,}", r"\s+"),
    ]
)


class Tokenizer(Protocol):
    """Turns text into token ids and back.

    Attributes:
        vocab_size: every id is below this number.
        bos_id: the token that begins a document; None: the tokenizer has no such token, or never adds it to a text.
        eos_id: the token that ends a document; None: the tokenizer has no such token.
        fingerprint: a hash of all that decides the tokens, 32 hexadecimal digits.
        file: the tokenizer's file; files beside it may name its special tokens.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str
    file: Path

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no special tokens are added, and their names in the text are encoded as plain text."""

    @abstractmethod
    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode several texts, on all cores."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids without special tokens; an incomplete character becomes U+FFFD."""


def find(path: Path, key: str = "data.tokenizer") -> Path:
    """The tokenizer's file at a path, which may be a folder that contains one."""
    if path.is_dir():
        # Look for the JSON first: a .model from the hub may have a format that SentencePiece cannot read.
        for name in (_JSON, _MODEL, ORIGINAL):
            if (path / name).is_file():
                return path / name
        raise ConfigError(key, path, f"has neither {_JSON} nor {_MODEL}", "try `titanlab download-tokenizer`, or null")
    if not path.is_file():
        raise ConfigError(key, path, "does not exist", "give a .model or tokenizer.json, or null to train one")
    return path


def load(path: Path, key: str = "data.tokenizer") -> Tokenizer:
    """Read a tokenizer; the file's content decides its kind."""
    path = find(path, key)
    try:
        content = content_of(path)
    except OSError as error:
        raise ConfigError(key, path, f"cannot be read ({error.strerror})", "check its permissions") from error
    if other := other_format(content):
        rule, _, cure = other
        raise ConfigError(key, path, rule, cure)
    is_json, is_tiktoken = content.lstrip()[:1] == b"{", _LINE.match(content)
    kind = HuggingFaceTokenizer if is_json else TiktokenTokenizer if is_tiktoken else SentencePieceTokenizer
    return kind(path, content, key)


def content_of(path: Path) -> bytes:
    """The bytes of a tokenizer's file, without the byte order mark that an editor may have added."""
    return path.read_bytes().removeprefix(codecs.BOM_UTF8)


def keep(file: Path, folder: Path) -> str:
    """Copy a tokenizer's file, and the files beside it that name special tokens, into a folder where `find` finds them.

    Returns the file's new name, which depends only on its content.
    """
    name = _JSON if content_of(file).lstrip()[:1] == b"{" else _MODEL
    beside = [(file.with_name(other), folder / other) for other in (_CONFIG, _MAP)]
    for source, target in ((file, folder / name), *beside):
        if source.is_file() and source != target:
            # Do not copy permissions, because files in the hub's cache may be read-only. If the target is a link, this
            # replaces the link and does not follow it.
            write_bytes(target, content_of(source))
    return name


def separators_of(tokenizer: Tokenizer) -> Separators:
    """The tokens around each document; if the same token begins and ends documents, it is added only at the end."""
    begin = None if tokenizer.bos_id == tokenizer.eos_id else tokenizer.bos_id
    return Separators(begin=begin, end=tokenizer.eos_id)


def separators_in_words(tokenizer: Tokenizer) -> list[str]:
    """One line about the tokens around each document, and warnings about missing ones."""
    tokens = separators_of(tokenizer)
    pairs = (("begins", tokens.begin), ("ends", tokens.end))
    said = [f"{verb} with token {token}" for verb, token in pairs if token is not None]
    lines = [f"a document {' and '.join(said)}"] if said else []
    if isinstance(tokenizer, HuggingFaceTokenizer | SentencePieceTokenizer):
        config = tokenizer.file.with_name(_CONFIG)
        if config.exists() and not declared_in(config):
            lines.append(f"warning: {config} names nothing that can be read: the usual names count")
        for role, name in tokenizer.lacking.items():
            lines.append(f"warning: {role} is {name} beside {tokenizer.file}, whose vocabulary lacks it")
    if not said:
        lines.append("warning: no token begins or ends a document: nothing separates it from the next")
    return lines


class SentencePieceTokenizer:
    """A SentencePiece model.

    Attributes:
        lacking: role and name of each special token that the files beside the model name but the model lacks.
    """

    def __init__(self, path: Path, content: bytes, key: str) -> None:
        sentencepiece: Any = importlib.import_module("sentencepiece")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
            self.vocab_size = int(self._model.vocab_size())
        except (RuntimeError, OSError) as error:
            raise ConfigError(key, path, "is not a SentencePiece model", _GIVE) from error
        if self.vocab_size < 1:
            raise ConfigError(key, path, "is not a SentencePiece model: it has no pieces", _GIVE)
        check_size(self.vocab_size, path, key)
        begin, end = int(self._model.bos_id()), int(self._model.eos_id())
        own = begin if begin >= 0 else None, end if end >= 0 else None
        found = _special_tokens(_declared(path), self._id_of, own, adds_begin=lambda token: True)
        self.bos_id, self.eos_id, self.lacking = found
        if (self.bos_id, self.eos_id) != own:
            content += f"{self.bos_id} {self.eos_id}".encode()
        self.fingerprint = _fingerprint(content)
        self.file = path
        self._space_bytes = self._bytes_of_space()

    def encode(self, text: str) -> list[int]:
        if self._space_bytes and _SPACE in text:
            first, *rest = (self._model.encode(part) for part in text.split(_SPACE))
            return [*first, *(token for part in rest for token in (*self._space_bytes, *part))]
        return list(self._model.encode(text))

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        if self._space_bytes and any(_SPACE in text for text in texts):
            return [self.encode(text) for text in texts]
        ids: list[list[int]] = self._model.encode(list(texts), num_threads=cores())
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode([token for token in map(int, ids) if token < self.vocab_size]))

    def _id_of(self, name: str) -> int | None:
        token = self._model.piece_to_id(name)
        return token if self._model.id_to_piece(token) == name else None

    def _bytes_of_space(self) -> list[int]:
        """Tokens of the bytes of U+2581, which SentencePiece would take for a space; [] if the model alters spaces."""
        pieces = self._model.encode("a", out_type=str)
        if self._model.decode(self._model.encode("  a ")) != "  a " or not pieces or pieces[0].startswith(_SPACE):
            return []
        ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
        return ids if all(self._model.is_byte(token) for token in ids) else []


class HuggingFaceTokenizer:
    """A `tokenizer.json` of the Hugging Face tokenizers library.

    Attributes:
        lacking: role and name of each special token that files beside the JSON name but the vocabulary lacks.
    """

    lacking: dict[str, str]

    def __init__(self, path: Path, content: bytes, key: str, *, tried: bool = False) -> None:
        tokenizers: Any = importlib.import_module("tokenizers")
        self.file, self._key = path, key
        self._model, description = self._read(content, tried=tried)
        self._model.no_truncation()
        self._model.no_padding()
        if isinstance(self._model.model, tokenizers.models.BPE):
            # Disable BPE dropout, which merges at random: a text would get other tokens each time.
            self._model.model.dropout = None
        # Encode text that looks like a special token as text.
        self._model.encode_special_tokens = True
        vocabulary: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        check_vocabulary(vocabulary, description, path, key)
        self.vocab_size = max(vocabulary.values()) + 1
        begin, end = (
            next((vocabulary[name] for name in names if name in vocabulary), None) for names in (_BOS_NAMES, _EOS_NAMES)
        )
        found = _special_tokens(_declared(path), vocabulary.get, (begin, end), adds_begin=self._adds)
        self.bos_id, self.eos_id, self.lacking = found
        tokens = separators_of(self)
        self.fingerprint = _fingerprint(content + f"{tokens.begin} {tokens.end}".encode())

    def _read(self, content: bytes, *, tried: bool) -> tuple[Any, Any]:
        """The library's tokenizer, and the content of the tokenizer.json (None for other formats)."""
        tokenizers: Any = importlib.import_module("tokenizers")
        with self._refusing(f"is not a {_JSON}", f"give the {_JSON} of a model, or a .model"):
            text = content.decode()
            description = parse_json(text)
            if not tried and (patterns := unknown_patterns(description)):
                try_patterns(self.file, self._key, patterns)
            return tokenizers.Tokenizer.from_str(text), description

    def _adds(self, token: int) -> bool:
        """Whether the file's post-processor puts this token before every text."""
        with self._refusing("cannot encode the text"):
            return list(self._model.encode("").ids[:1]) == [token]

    @contextlib.contextmanager
    def _refusing(self, rule: str, cure: str = "give the tokenizer of another model") -> Iterator[None]:
        try:
            yield
        # The library raises plain Exception; a panic in its Rust code raises a subclass of BaseException only.
        except BaseException as error:
            known = isinstance(error, Exception) or type(error).__name__ == "PanicException"
            if isinstance(error, ConfigError) or not known:
                raise
            shown = " ".join(str(error).split())[:80]
            raise ConfigError(self._key, self.file, f"{rule} ({shown})", cure) from error

    def encode(self, text: str) -> list[int]:
        with self._refusing("cannot encode the text"):
            return list(self._model.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        with self._refusing("cannot encode the text"):
            encodings = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
            return [list(encoding.ids) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        with self._refusing("cannot decode its tokens"):
            return str(self._model.decode([int(token) for token in ids], skip_special_tokens=True))


class TiktokenTokenizer(HuggingFaceTokenizer):
    """A `tokenizer.model` in tiktoken's format, as Llama 3 has it."""

    def _read(self, content: bytes, *, tried: bool) -> tuple[Any, Any]:
        tokenizers: Any = importlib.import_module("tokenizers")
        try:
            ranks = _ranks(content)
        except ValueError as error:
            rule = f"is in tiktoken's format, and damaged: {error}"
            raise ConfigError(self._key, self.file, rule, f"fetch it again, or the model's {_JSON}") from error
        if len(ranks) in _OTHERS:
            rule = f"is in tiktoken's format and has the {len(ranks):,} ranks of {_OTHERS[len(ranks)]}"
            only = "only Llama 3's can be read"
            raise ConfigError(self._key, self.file, f"{rule}; {only}", f"give the {_JSON} of that model")
        # Tokens of the library are strings, in which each byte is one character, as in GPT-2.
        characters = _characters()
        texts = {token: "".join(characters[byte] for byte in token) for token in ranks}
        merges = []
        for token in ranks:
            # Like tiktoken, merge any two tokens whose joined bytes are this token's bytes.
            parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [(ranks[one], ranks[two], one, two) for one, two in parts if one in ranks and two in ranks]
            merges += [(texts[one], texts[two]) for _, _, one, two in sorted(known)]
        vocabulary = {texts[token]: rank for token, rank in ranks.items()}
        model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=True))
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
        to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
        model.decoder = tokenizers.decoders.ByteLevel()
        model.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
        return model, None

    def _adds(self, token: int) -> bool:
        """True: the format has no post-processor, and the one in the model's `tokenizer.json` adds the token."""
        return True

    def save_json(self, path: Path) -> None:
        """Write the tokenizer as a `tokenizer.json`, which other libraries read."""
        self._model.save(str(path))


def _ranks(content: bytes) -> dict[bytes, int]:
    """The tokens of the file with their ranks, which must be 0, 1, 2 … in the file's order."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            place = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"line {number} has no token and rank") from error
        if len(token) > _LONGEST:
            raise ValueError(f"line {number} has a token of {len(token)} bytes")
        if place != len(ranks) or not token or token in ranks:
            raise ValueError(f"line {number} does not have the next rank, or repeats a token")
        ranks[token] = place
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise ValueError(f"byte {byte} has no token")
    return ranks


def _characters() -> list[str]:
    """GPT-2's character for each byte: printable bytes have their own character, the others get characters from 256."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in range(256)]


def declared_in(path: Path) -> dict[str, Any]:
    """The entries of a tokenizer_config.json; empty if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError):
        content = parse_json(path.read_text(encoding="utf-8-sig"))
        if isinstance(content, dict):
            return content
    return {}


def _declared(file: Path) -> dict[str, Any]:
    """The special tokens that the files beside a tokenizer's file name, chosen as transformers 5 does."""
    declared = declared_in(file.with_name(_CONFIG))
    return declared if "added_tokens_decoder" in declared else {**declared, **declared_in(file.with_name(_MAP))}


def _special_tokens(
    declared: dict[str, Any],
    id_of: Callable[[str], int | None],
    usual: tuple[int | None, int | None],
    *,
    adds_begin: Callable[[int], bool],
) -> tuple[int | None, int | None, dict[str, str]]:
    """The tokens that begin and end a document, and by role the names of declared tokens that the vocabulary lacks.

    Args:
        usual: the tokens with usual names, for roles that `declared` does not have.
        adds_begin: tells whether transformers puts a declared token before a text. An entry `add_bos_token` overrules
            this, as in transformers 4. `add_eos_token` is ignored, because some token must separate documents.
    """
    roles = ("bos_token", "eos_token")
    names = {role: name for role in roles if (name := _name(declared.get(role))) is not None}
    known = {role: id_of(name) for role, name in names.items()}
    begin, end = (known.get(role) if role in declared else other for role, other in zip(roles, usual, strict=True))
    if begin is not None and begin != end:
        adds = declared.get("add_bos_token")
        if not isinstance(adds, bool):
            adds = end is None or "bos_token" not in declared or adds_begin(begin)
        begin = begin if adds else None
    return begin, end, {role: names[role] for role, token in known.items() if token is None}


def _name(declared: Any) -> str | None:
    """The text of a declared token; None: no token is declared."""
    # In older files the token is an object whose `content` is the text.
    name = declared.get("content") if isinstance(declared, dict) else declared
    return name if isinstance(name, str) else None


def check_vocabulary(vocabulary: Mapping[str, int], description: Any, path: Path, key: str) -> None:
    """Check that no two tokens share an id, that few ids are unused, and that added tokens have the file's ids.

    Args:
        vocabulary: id of each token, as the tokenizers library has read it.
        description: the content of the tokenizer.json; None for other formats.
    """
    check_size(len(vocabulary), path, key)
    again = "fetch the file again"
    # The library gives added tokens new ids if their ids do not follow the ids of the other tokens.
    for token in (description or {}).get("added_tokens", []):
        name, declared, actual = token["content"], token["id"], vocabulary.get(token["content"])
        if actual != declared:
            rule = f"gives its added token {name!r} the id {declared}, and the tokenizers library gives it {actual}"
            raise ConfigError(key, path, rule, again)
    number, count = Counter(vocabulary.values()).most_common(1)[0]
    if count > 1:
        raise ConfigError(key, path, f"gives the id {number} to two tokens", again)
    highest = max(vocabulary.values())
    if highest >= 2 * len(vocabulary) + _UNUSED:
        rule = f"has ids up to {highest} and only {len(vocabulary)} tokens: a model would need a row for every id"
        raise ConfigError(key, path, rule, "number the tokens from 0 without gaps")


def check_size(tokens: int, path: Path, key: str) -> None:
    if tokens < _FEWEST_TOKENS:
        rule = f"has {tokens} tokens, which write no text" if tokens else "has an empty vocabulary"
        raise ConfigError(key, path, rule, "give the tokenizer.json of a model, or a .model")


def _fingerprint(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def unknown_patterns(description: Any) -> list[str]:
    """The regular expressions in a `tokenizer.json` that are not known to be harmless."""
    return sorted({pattern for pattern in _patterns(description) if pattern not in KNOWN})


def _patterns(node: Any) -> Iterator[str]:
    # Skip the vocabulary and the added tokens: they have many entries and no patterns.
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "Regex" and isinstance(value, str):
            yield value
        elif key not in ("model", "added_tokens"):
            yield from _patterns(value)


def try_patterns(path: Path, key: str, patterns: Sequence[str]) -> None:
    """Start a process that reads a `tokenizer.json`, and encodes and decodes text that takes bad patterns very long.

    Raises:
        ConfigError: the process crashes, or a pattern takes too long. Other errors of the file are not raised here, but
        when the file is read in this process.
    """
    seconds = SECONDS + path.stat().st_size / BYTES_PER_SECOND
    code = subprocess.run(
        [*module_command("titanlab.data.tokenizers"), str(path.absolute()), str(seconds), str(TRIAL_SECONDS)],
        stdin=subprocess.DEVNULL,
        # Drop the library's long message about each match on which Oniguruma gives up.
        stderr=subprocess.DEVNULL,
        env={**os.environ, "RUST_BACKTRACE": "0"},
        check=False,
    ).returncode
    took_too_long = {
        GIVEN_UP: "without end",
        -signal.SIGPROF: f"for more than {TRIAL_SECONDS:g} s of computing",
        -signal.SIGALRM: f"for more than {seconds:.0f} s",
    }
    if code in took_too_long:
        rule = f"its regular expression {' or '.join(patterns)[:200]} backtracks {took_too_long[code]} in a trial"
        raise ConfigError(key, path, rule, "give a tokenizer with another pattern")
    if code:
        rule = f"a process that tries it ends with exit code {code}, perhaps for lack of memory"
        raise ConfigError(key, path, rule, "give another tokenizer, or more memory")


def probe(tokenizer: Tokenizer, patterns: Sequence[str]) -> None:
    """Encode and decode long runs of one character, on which regular expressions are slow."""
    characters = dict.fromkeys("a0 \n'=é中" + "".join(filter(str.isprintable, "".join(patterns))))
    runs = [character * _RUN for character in list(characters)[:40]]
    text = _PLAIN + "!".join([*runs, string.ascii_letters * 10, string.punctuation * 10])
    ids = list(range(min(tokenizer.vocab_size, _RUN)))
    with _ending_if_given_up():
        # Ignore other errors: a tokenizer may be unable to encode this text, and its corpus may have no such text.
        ids = tokenizer.encode(text)
    with _ending_if_given_up():
        tokenizer.decode(ids)


@contextlib.contextmanager
def _ending_if_given_up() -> Iterator[None]:
    """End the process if Oniguruma reaches its own limit on backtracking; ignore other errors of tokenizers."""
    try:
        yield
    except ConfigError as error:
        # The tokenizers library reports the limit as a panic with this text.
        if "retry-limit" in str(error.__cause__):
            sys.exit(GIVEN_UP)


def main() -> None:
    """Run the trial in this process, which the kernel ends when its time is over, also in native code."""
    path, seconds, trial_seconds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    signal.setitimer(signal.ITIMER_REAL, seconds)
    content = content_of(path)
    with _ending_if_given_up():
        tokenizer = HuggingFaceTokenizer(path, content, "", tried=True)
        # Limit the CPU time of all threads, not the time of day, so that other load does not shorten the trial.
        signal.setitimer(signal.ITIMER_PROF, trial_seconds)
        probe(tokenizer, unknown_patterns(json.loads(content)))


if __name__ == "__main__":
    main()
