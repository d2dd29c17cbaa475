"""Plain values as OmegaConf and Hydra must be given them, so that they read back unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def literal(value: Any) -> Any:
    """The same plain values with `${` escaped: all interpolations are resolved, so OmegaConf must not find any."""
    if isinstance(value, Mapping):
        return {key: literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [literal(inner) for inner in value]
    # OmegaConf halves the backslashes that stand before `${`, and no others.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
