"""Plain values as OmegaConf and Hydra must be given them, so that they read back unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Text that Hydra reads as itself without quotes. With a slash in it, it is neither a number nor a constant.
_PLAIN = re.compile(r"[\w.+@%-]*/[\w./+@%-]*", re.ASCII)


def literal(value: Any) -> Any:
    """The same plain values with `${` escaped: all interpolations are resolved, so OmegaConf must not find any."""
    if isinstance(value, Mapping):
        return {key: literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [literal(inner) for inner in value]
    # OmegaConf halves the backslashes that stand before `${`, and no others.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def path_override(key: str, path: Path) -> str:
    """`key=path`, in quotes for Hydra's grammar of overrides where it needs them."""
    text = str(path)
    if _PLAIN.fullmatch(text):
        return f"{key}={text}"
    # Imported here: it takes 0.1 s, and most paths need no quotes.
    from hydra.core.override_parser.types import Quote, QuotedString

    return f"{key}={QuotedString(text=literal(text), quote=Quote.double).with_quotes()}"
