"""Describes a model's parameters in another library, for modules that convert between the two."""

from __future__ import annotations

from dataclasses import dataclass

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the small file that a clone without Git LFS has in place of a large one."""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """One parameter in another library.

    Attributes:
        name: the parameter's name in that library.
        head: width w of a head if the order of its rows differs: rotary pairs are (0, w/2), (1, w/2 + 1), … there
            and (0, 1), (2, 3), … here; 0: the same order.
        stack: names of the tensors there whose stack, along a new first dim, is the parameter here; then `name` is for
            people. Empty: one tensor.
    """

    name: str
    head: int = 0
    stack: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all its tensors there."""
        return self.stack or (self.name,)

    def shape_there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of each of these tensors, from that of the parameter."""
        return shape[1:] if self.stack else shape
