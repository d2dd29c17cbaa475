"""Tokenizers in tiktoken's format, such as Llama 3's own `original/tokenizer.model`: lines of `base64 rank`.

The file has the bytes and the rank of each token. It has neither the regular expression that splits text first nor the
special tokens: both are taken from Llama 3's `llama/tokenizer.py`. The tokenizers library does the encoding.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import re
from typing import Any

_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIAL = (
    *("<|begin_of_text|>", "<|end_of_text|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(4)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"),
    *(f"<|reserved_special_token_{number}|>" for number in range(5, 251)),
)
# Number of ranks in files of other models, which split text differently: Llama 3's pattern would give wrong tokens.
_OTHERS = {
    50256: "GPT-2 (r50k_base)",
    50280: "Codex (p50k_base)",
    100256: "GPT-4 (cl100k_base)",
    151643: "Qwen",
    163584: "Kimi K2",
    199998: "GPT-4o (o200k_base)",
    200000: "Llama 4",
}
_BYTES = 256
# Largest length of a token in bytes: time and memory to find its merges grow with the square of its length.
_LONGEST = 512


class OtherModelError(Exception):
    """The file belongs to another model than Llama 3."""


def is_tiktoken(content: bytes) -> bool:
    """Whether a file is in this format, by its first line."""
    return _LINE.match(content) is not None


def read_tiktoken(content: bytes) -> Any:
    """Make a tokenizer of the tokenizers library that gives the same ids.

    Raises:
        ValueError: the file is damaged.
        OtherModelError: the file has the number of ranks of a model that splits text differently.
    """
    tokenizers: Any = importlib.import_module("tokenizers")
    ranks = _ranks(content)
    if len(ranks) in _OTHERS:
        raise OtherModelError(f"has the {len(ranks):,} ranks of {_OTHERS[len(ranks)]}")
    # The library's tokens are strings: as in GPT-2, one character stands for each byte.
    characters = _characters()
    texts = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = []
    for token in ranks:
        # Like tiktoken, merge any two tokens whose bytes together are this token's.
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(ranks[first], ranks[last], first, last) for first, last in parts if first in ranks and last in ranks]
        merges += [(texts[first], texts[last]) for _, _, first, last in sorted(known)]
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=True))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return model


def _ranks(content: bytes) -> dict[bytes, int]:
    """Rank of each token, in the order of the ranks 0, 1, 2 …"""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            place = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"line {number} is no token and rank") from error
        if len(token) > _LONGEST:
            raise ValueError(f"line {number} has a token of {len(token)} bytes")
        if place != len(ranks) or not token or token in ranks:
            raise ValueError(f"line {number} has not the next rank, or a token twice")
        ranks[token] = place
    lacking = next((byte for byte in range(_BYTES) if bytes([byte]) not in ranks), None)
    if lacking is not None:
        raise ValueError(f"byte {lacking} has no token")
    return ranks


def _characters() -> list[str]:
    """GPT-2's character for each byte: a printable byte keeps its character, the others get those from 256 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(_BYTES) if byte not in plain]
    return [chr(byte) if byte in plain else chr(_BYTES + others.index(byte)) for byte in range(_BYTES)]
