"""Describes a model's parameters in another library, for modules that convert between the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """One parameter in another library.

    Attributes:
        name: the parameter's name in that library.
        head: width w of a head if the order of its rows differs: rotary pairs are (0, w/2), (1, w/2 + 1), … there
            and (0, 1), (2, 3), … here; 0: the same order.
    """

    name: str
    head: int = 0
