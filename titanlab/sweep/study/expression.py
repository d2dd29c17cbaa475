"""Conditions on a recipe's values, such as `world <= 64 and precision != "fp32"`.

They are parsed with Python's grammar and evaluated here, node by node: names are keys of the recipe; comparisons,
`and`, `or`, `not`, `in`, arithmetic of numbers and a few functions are allowed, and nothing else. No code is run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from titanlab.errors import ConfigError

WHERE = "where"
"""The key of an error in a condition."""
_LENGTH = 1000  # characters; no user writes a longer condition
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
# No powers: a short expression could take forever.
_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs, "len": len}
# The names of constants in YAML.
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
    """A parsed condition.

    Attributes:
        text: as the user wrote it.
        names: keys that it may use, in order.
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
            ConfigError: it cannot be computed, or the result is neither true nor false.
        """
        try:
            result = _compute(self._body, value)
        except (TypeError, ValueError, ArithmeticError) as error:
            rule = f"cannot be computed for {label} ({' '.join(str(error).split())})"
            raise ConfigError(WHERE, self.text, rule, "compare numbers with numbers and texts with texts") from error
        if not isinstance(result, bool):
            rule = f"is {result!r} for {label}, neither true nor false"
            raise ConfigError(WHERE, self.text, rule, "compare it with something")
        return result


def read_expression(text: Any) -> Expression:
    """Parse a condition.

    Raises:
        ConfigError: it is not a text or not an expression, or contains something that conditions do not allow.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(WHERE, text, "is no condition", _CURE)
    if len(text) > _LENGTH:
        raise ConfigError(WHERE, text, f"has {len(text)} characters, and {_LENGTH} are enough", "write several")
    try:
        body = ast.parse(text.strip(), mode="eval").body
        names = tuple(dict.fromkeys(_names(body, text)))
    # The last two: some thousand nested brackets are too deep for the parser.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise ConfigError(WHERE, text, f"cannot be read ({message})", _CURE) from error
    return Expression(text, names, body)


def _names(node: ast.expr, text: str) -> list[str]:
    """The keys in a condition; raises ConfigError for everything that conditions do not allow."""
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
            for operation in ops:
                if type(operation) not in _COMPARISONS:
                    raise _refused(operation, text)
            parts = [left, *others]
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS:
            pass
        case _:
            raise _refused(node, text)
    return [name for part in parts for name in _names(part, text)]


def _refused(node: ast.AST, text: str) -> ConfigError:
    rule = _MEANT.get(type(node), f"has something in it that no condition has ({type(node).__name__})")
    return ConfigError(WHERE, text, rule, _CURE)


def _dotted(node: ast.expr) -> str | None:
    """`parallelism.tensor` for nested attributes of a name; None for other expressions."""
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
            decisive = isinstance(op, ast.Or)
            # Stop at the first decisive part: later parts may use keys that this point does not have.
            return any(_truth(part, value) is decisive for part in parts) is decisive
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return not _truth(inner, value)
        case ast.UnaryOp(op=op, operand=inner):
            operand = _number(_compute(inner, value))
            return -operand if isinstance(op, ast.USub) else operand
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_number(_compute(left, value)), _number(_compute(right, value)))
        case ast.Compare(left=left, ops=ops, comparators=others):
            before = _compute(left, value)
            for operation, other in zip(ops, others, strict=True):
                after = _compute(other, value)
                if not _COMPARISONS[type(operation)](before, after):
                    return False
                before = after
            return True
        case ast.Call(func=ast.Name(id=name), args=parts):
            return _FUNCTIONS[name](*(_compute(part, value) for part in parts))
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_compute(part, value) for part in parts]
    raise AssertionError(ast.dump(node))


def _truth(node: ast.expr, value: Callable[[str], Any]) -> bool:
    result = _compute(node, value)
    if not isinstance(result, bool):
        raise TypeError(f"{ast.unparse(node)} is {result!r}, neither true nor false")
    return result


def _number(value: Any) -> Any:
    # A text times a large number would fill the memory.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return value
