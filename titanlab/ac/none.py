"""ac=none: nothing is computed twice."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from titanlab.ac.none_schema import NoCheckpointing


def apply(config: NoCheckpointing, blocks: Mapping[int, nn.Module]) -> None:
    """Leave the blocks as they are."""
