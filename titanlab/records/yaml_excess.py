"""Finds YAMLs that no reader survives: nine lines with aliases can stand for a billion values, and libyaml's loader
overflows the stack of the process on deep nesting (PyYAML 6).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

MOST_VALUES = 100_000
MOST_DEPTH = 200
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def excess(text: str) -> str | None:
    """What is too much in a YAML, in words; None if it can be read.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    if is_too_deep(text):
        return "it is nested too deeply"
    return "its aliases stand for too many values" if expands(text) else None


def is_too_deep(text: str) -> bool:
    """Whether a YAML is nested more than MOST_DEPTH deep.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    # Every level takes a bracket, or a column of a line.
    if text.count("[") + text.count("{") + max(map(len, text.splitlines()), default=0) <= MOST_DEPTH:
        return False
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEPTH:
            return True
    return False


def expands(text: str) -> bool:
    """Whether the values of a YAML are more than MOST_VALUES once each alias is replaced, or contain themselves.

    Args:
        text: not nested too deeply.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    if "&" not in text or "*" not in text:
        return False
    root = yaml.compose(text, Loader=_LOADER)
    sizes: dict[int, int] = {}
    # Nodes whose values are being counted, each with those of its nodes that are still to be visited.
    path = [(root, _inner(root))] if root is not None else []
    within = {id(root)}
    while path:
        node, left = path[-1]
        inner = next(left, None)
        if inner is None:
            sizes[id(node)] = 1 + sum(sizes[id(each)] for each in _inner(node))
            if sizes[id(node)] > MOST_VALUES:
                return True
            within.discard(id(node))
            path.pop()
        elif id(inner) in within:
            return True
        elif id(inner) not in sizes:
            within.add(id(inner))
            path.append((inner, _inner(inner)))
    return False


def _inner(node: Any) -> Iterator[Any]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value
