"""How another library keeps what a model has: words for the modules that map one to the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """One parameter as another library keeps it.

    Attributes:
        name: there.
        head: width of the heads whose rows are in two halves there, (0, w/2), (1, w/2 + 1), …, and in pairs here,
            (0, 1), (2, 3), …; 0: rows have the same order.
    """

    name: str
    head: int = 0
