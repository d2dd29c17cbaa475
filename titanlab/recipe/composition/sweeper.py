"""Schema of `hydra/sweeper: space`, the points of a sweep file. titanlab reads it; Hydra's sweepers do not run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class Space:
    """A space of recipes; `titanlab.sweep.space` parses and checks it.

    Attributes:
        space: a mapping with one of `product`, `zip` and `list`; null: only the values swept on the command line.
        where: conditions that a point must meet, such as `parallelism.tensor <= 8`; null: none.
        repeats: runs of every point, numbered by the recipe's `repeat`.
        control: values of a recipe that runs at the beginning, between the repeats and at the end; `{}`: only what all
            points share. null: none.
    """

    space: Any = None
    where: Any = None
    repeats: Any = 1
    control: Any = None
