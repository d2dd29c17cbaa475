"""The node `hydra/sweeper: space`: what a sweep's file says of its points. Data only; Hydra starts nothing of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Space:
    """A space of recipes; `titanlab.sweep.study.space` holds the grammar, and says what is wrong with one.

    Attributes:
        space: a mapping with one of `product`, `zip` and `list`; null: only what the command line sweeps.
        where: conditions that a point has to meet, such as `parallelism.tensor <= 8`; null: none.
        repeats: runs of every point, numbered by the recipe's `repeat`.
    """

    space: Any = None
    where: Any = None
    repeats: Any = 1
