"""Conditions on a recipe's values, such as `world <= 64 and precision != "fp32"`.

They are read with Python's grammar and computed here, node by node: names are keys of the recipe, and besides
comparisons, `and`, `or`, `not`, `in` and arithmetic of numbers there is nothing in them. No code is run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titanlab.errors import ConfigError

WHERE = "where"
"""The key of a mistake in a condition."""
_LENGTH = 1000  # characters; a longer one is no condition that a person wrote
_CURE = "write a condition such as parallelism.tensor <= 8 and precision == 'bf16'"
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
# Powers are left out: a short one can take forever.
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "len": len}
# As YAML writes them.
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None}
_MEANT = {
    ast.Call: "calls a function that is not min, max, abs or len",
    ast.Attribute: "takes a part of something that is no key",
    ast.Lambda: "makes a function",
    ast.Subscript: "takes an item of something",
    ast.Pow: "has a power",
    ast.Is: "has `is`: write ==",
    ast.IsNot: "has `is not`: write !=",
}


@dataclass(frozen=True)
class Expression:
    """A condition that has been read.

    Attributes:
        text: as it was written.
        names: keys that it may ask for, in order.
    """

    text: str
    names: tuple[str, ...]
    _body: ast.expr

    def holds(self, value: Callable[[str], Any], label: str) -> bool:
        """Whether a point meets the condition.

        Args:
            value: the point's value by key.
            label: of the point, for messages.

        Raises:
            ConfigError: it cannot be computed, or what comes out is neither true nor false.
        """
        try:
            found = _compute(self._body, value)
        except (TypeError, ValueError, ArithmeticError) as error:
            rule = f"cannot be computed for {label} ({' '.join(str(error).split())})"
            raise ConfigError(WHERE, self.text, rule, "compare numbers with numbers and texts with texts") from error
        if not isinstance(found, bool):
            rule = f"is {found!r} for {label}, neither true nor false"
            raise ConfigError(WHERE, self.text, rule, "compare it with something")
        return found


def read_expression(text: Any) -> Expression:
    """The condition that a text is.

    Raises:
        ConfigError: it is no text, no expression, or has something else in it than conditions have.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(WHERE, text, "is no condition", _CURE)
    if len(text) > _LENGTH:
        raise ConfigError(WHERE, text, f"has {len(text)} characters, and {_LENGTH} are enough", "write several")
    try:
        body = ast.parse(text.strip(), mode="eval").body
        names = tuple(dict.fromkeys(_names(body, text)))
    # Some thousand brackets are too deep for the parser.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise ConfigError(WHERE, text, f"cannot be read ({said})", _CURE) from error
    return Expression(text, names, body)


def _names(node: ast.expr, text: str) -> list[str]:
    """Keys in a condition; whatever no condition has is refused here."""
    match node:
        case ast.Name() | ast.Attribute():
            name = _dotted(node)
            if name is None:
                raise _refused(node, text)
            return [] if name in _WORDS else [name]
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return []
        case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
            pass
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=inner):
            parts = [inner]
        case ast.BinOp(left=left, op=op, right=right):
            if type(op) not in _ARITHMETIC:
                raise _refused(op, text)
            parts = [left, right]
        case ast.Compare(left=left, ops=ops, comparators=others):
            for each in ops:
                if type(each) not in _COMPARISONS:
                    raise _refused(each, text)
            parts = [left, *others]
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS:
            pass
        case _:
            raise _refused(node, text)
    return [name for part in parts for name in _names(part, text)]


def _refused(node: ast.AST, text: str) -> ConfigError:
    what = _MEANT.get(type(node), f"has something in it that no condition has ({type(node).__name__})")
    return ConfigError(WHERE, text, what, _CURE)


def _dotted(node: ast.expr) -> str | None:
    """`parallelism.tensor` of nested attributes of a name; None: of something else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None


def _compute(node: ast.expr, value: Callable[[str], Any]) -> Any:
    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name() | ast.Attribute():
            name = str(_dotted(node))
            return _WORDS[name] if name in _WORDS else value(name)
        case ast.BoolOp(op=op, values=parts):
            wanted = isinstance(op, ast.Or)
            # The first that decides is the last one asked: what comes after may be no key of this point.
            return any(_truth(part, value) is wanted for part in parts) is wanted
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _truth(inner, value)
        case ast.UnaryOp(op=op, operand=inner):
            found = _number(_compute(inner, value))
            return -found if isinstance(op, ast.USub) else found
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(_compute(left, value)), _number(_compute(right, value)))
        case ast.Compare(left=left, ops=ops, comparators=others):
            before = _compute(left, value)
            for each, other in zip(ops, others, strict=True):
                after = _compute(other, value)
                if not _COMPARISONS[type(each)](before, after):
                    return False
                before = after
            return True
        case ast.Call(func=ast.Name(id=name), args=parts):
            return _FUNCTIONS[name](*(_compute(part, value) for part in parts))
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_compute(part, value) for part in parts]
    raise AssertionError(ast.dump(node))


def _truth(node: ast.expr, value: Callable[[str], Any]) -> bool:
    found = _compute(node, value)
    if not isinstance(found, bool):
        raise TypeError(f"{ast.unparse(node)} is {found!r}, neither true nor false")
    return found


def _number(value: Any) -> Any:
    # A text times a large number fills memory.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
