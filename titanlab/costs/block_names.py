"""How the blocks of a model are called in names of modules and parameters: `layers.0`, `layers.0.attention.wq`."""

from __future__ import annotations

BLOCKS = "layers"
"""The module whose children are the blocks."""


def block_name(number: int | str) -> str:
    """The name of a block."""
    return f"{BLOCKS}.{number}"


def is_in_block(name: str) -> bool:
    """Whether a name is a block's, or that of a part of one."""
    return name.startswith(f"{BLOCKS}.")
