"""The choice of validation documents, by a hash of their content, so that copies of a document stay together."""

from __future__ import annotations

import hashlib


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to validation.

    Args:
        text: the whole document.
        fraction: part of all documents to hold out, in [0, 1); 0 holds out none.
    """
    if fraction <= 0:
        return False
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64
