"""Reads a pickle without running any code of it: what it would import and call is recorded, and never done.

A pickle is a program: it names functions of any module and calls them. Here every name gives a class of this module
that keeps the arguments it is called with, and names that are not on the caller's list are refused. Nothing is
imported, and no class that lives longer than one reading can be changed. torch is not imported.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from typing import Any


class UnreadablePickle(ValueError):
    """The bytes are no pickle, or one that asks for what its reader does not expect."""


class Inert:
    """Represents an object of another class: its constructor's arguments, and the state that it would be given.

    Attributes:
        name: module and name of the class or function, joined by a dot.
        args: arguments that it would be called with.
        state: what would be given to `__setstate__`; None: nothing.
    """

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_inert(content: bytes, names: Collection[tuple[str, str]]) -> Any:
    """What a pickle holds: plain values, and an `Inert` in place of every other object.

    A name that is not called, such as that of a dtype, gives a subclass of Inert.

    Args:
        content: the pickle.
        names: pairs of module and name that it may ask for.

    Raises:
        UnreadablePickle: it asks for another name, or is damaged.
    """
    try:
        return _Unpickler(content, names).load()
    except UnreadablePickle:
        raise
    except Exception as error:
        # Damaged bytes are read as any opcode, which fails with any exception.
        raise UnreadablePickle(f"is damaged ({type(error).__name__})") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, names: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names
        self._classes: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> type[Inert]:
        """Every opcode that imports comes here."""
        if (module, name) not in self._names:
            raise UnreadablePickle(f"asks for {module}.{name}, which could run code")
        # A new class for each reading: what the pickle does to it has no effect elsewhere.
        return self._classes.setdefault((module, name), type("Named", (Inert,), {"name": f"{module}.{name}"}))
