"""What is text by the type of its key is the text as typed in an override; `null` is still null.

Hydra reads `5e2` as 500.0 and `1_000` as 1000 before anything asks for the type. Its grammar has no public name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from antlr4 import CommonTokenStream, InputStream, ParserRuleContext
from hydra.grammar.gen.OverrideLexer import OverrideLexer
from hydra.grammar.gen.OverrideParser import OverrideParser

from titanlab.recipe.composition.texts import is_group, is_text, types_of

_TOKENS = (OverrideLexer.INT, OverrideLexer.FLOAT, OverrideLexer.BOOL)
# Functions of Hydra that return their arguments as they are; others compute with numbers.
_FUNCTIONS = ("choice", "shuffle", "tag")


def as_typed(override: str) -> str:
    """An override with quotes around what is text and looks like a number or a truth value."""
    key, _, value = override.lstrip("+").partition("=")
    key = key.partition("@")[0]
    is_choice = is_group(key)
    if not (is_choice or str in types_of(key) or value.startswith("{")):
        return override
    lexer = OverrideLexer(InputStream(override))
    parser: Any = OverrideParser(CommonTokenStream(lexer))
    # Hydra parses the override again, and says what is wrong.
    lexer.removeErrorListeners()
    parser.removeErrorListeners()
    for token, name in reversed(list(_tokens(parser.override(), key))):
        if (is_choice and name == key) or is_text(name, token.text):
            # In Hydra's grammar, nothing may follow the quotes at the end.
            override = f"{override[: token.start]}'{token.text}'{override[token.stop + 1 :].lstrip()}"
    return override


def _tokens(node: Any, name: str) -> Iterator[tuple[Any, str]]:
    """The numbers and truth values of an override that stand alone, with the names of their keys."""
    if isinstance(node, OverrideParser.PrimitiveContext):
        tokens = [part.symbol for part in node.children if part.symbol.type != OverrideLexer.WS]
        if len(tokens) == 1 and tokens[0].type in _TOKENS:
            yield tokens[0], name
    elif isinstance(node, OverrideParser.DictKeyValuePairContext):
        yield from _tokens(node.getChild(2), f"{name}.{node.getChild(0).getText()}")
    elif isinstance(node, OverrideParser.FunctionContext) and node.children[0].getText() not in _FUNCTIONS:
        return
    elif isinstance(node, ParserRuleContext):
        for child in node.children or ():
            yield from _tokens(child, name)
