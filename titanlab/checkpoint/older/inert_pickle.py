"""Reads a pickle without running its code: imports and calls in it are recorded, and never done.

A pickle is a program that can call functions of any module. Here every name becomes a class of this module that
records its arguments, and names that are not on the caller's list are refused. Nothing is imported, torch included,
and the pickle can change only classes that exist for one reading.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from typing import Any


class UnreadablePickle(ValueError):
    """The bytes are not a pickle, or it asks for a name that its reader does not expect."""


class Inert:
    """Records how a pickle would make an object: the constructor's arguments and the state.

    Attributes:
        name: module and name of the class or function, joined by a dot.
        args: arguments of the call.
        state: argument of `__setstate__`; None: it is not called.
    """

    name = ""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        """Record the arguments."""
        instance = super().__new__(cls)
        instance.args, instance.state = args, None
        return instance

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_inert(content: bytes, names: Collection[tuple[str, str]]) -> Any:
    """Read a pickle: plain values, and an `Inert` in place of every other object.

    A name that is not called, such as that of a dtype, becomes a subclass of Inert.

    Args:
        content: the pickle.
        names: pairs of module and name that the pickle may ask for.

    Raises:
        UnreadablePickle: the pickle asks for another name, or is damaged.
    """
    try:
        return _Unpickler(content, names).load()
    except UnreadablePickle:
        raise
    except Exception as error:
        # Damaged bytes can be any opcodes, which can raise any exception.
        raise UnreadablePickle(f"is damaged ({type(error).__name__})") from error


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, names: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(content))
        self._names = names
        self._classes: dict[tuple[str, str], type[Inert]] = {}

    def find_class(self, module: str, name: str) -> type[Inert]:
        """Called by every opcode that imports."""
        if (module, name) not in self._names:
            raise UnreadablePickle(f"asks for {module}.{name}, which could run code")
        # A new class for each reading, so that the pickle cannot change a class for later readings.
        return self._classes.setdefault((module, name), type("Named", (Inert,), {"name": f"{module}.{name}"}))
