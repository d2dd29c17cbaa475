"""Recognises Hydra's errors by their texts; no other module depends on the wording of an error.

Hydra raises one type, ConfigCompositionException, for most mistakes in overrides and defaults lists, and only its text
has the key, the value and the file. `tests/recipe/composition/test_hydra_texts.py` makes the installed Hydra raise
each of these errors. If a later Hydra words one differently, the error still shows the override that Hydra quotes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe.composition.keys import advice, unknown_key

ARGUMENTS = "arguments"
"""The key of an error that concerns no single key."""
COMPARE = "compare with `titanlab train --cfg job`"
HELP = "see `titanlab train --help`"
_QUOTED = re.compile(r"'([^']*)'")


def read_message(message: str, overrides: Sequence[str]) -> ConfigError:
    """The ConfigError for a message of Hydra, given the `key=value` arguments."""
    culprit = _culprit(message, overrides)
    key, _, value = culprit.partition("=")
    bare = key.lstrip("+~")
    if message.startswith(("Ambiguous value", "Sweep parameters")):
        in_brackets = f"; a list is [{value}]" if message.startswith("Ambiguous") and "." in bare else ""
        return ConfigError(bare, value, "is several values", f"add -m to run them all{in_brackets}")
    if "is not a subclass of" in message:
        return ConfigError(bare, value, "is two options of different schemas", "name one of them")
    twice = re.match(r"Multiple values for (\S+)\. .*'override \S+: (\S+)'", message)
    # An override cannot be the cause without `+`: it would have replaced both.
    if twice is not None and bare != twice[1]:
        cure = f"write - override /{twice[1]}: … there, at the end of the defaults"
        return ConfigError(twice[1], twice[2], "is chosen in a second defaults list, without override", cure)
    if message.startswith(("Multiple values", "Could not append")):
        return ConfigError(key, value, "is in the recipe already", f"try {bare}={value}")
    if message.startswith("Config group override must be a string"):
        return _no_option_name(overrides)
    if (misplaced := re.match(r"In '?([^':]+)'?: Override '(\S+) : (\S+)' is defined before", message)) is not None:
        cure = f"put what overrides at the end of the defaults of {misplaced[1]}.yaml"
        return ConfigError(f"override /{misplaced[2]}", misplaced[3], "comes before what it is to override", cure)
    if (headless := _without_package(message, overrides)) is not None:
        return headless
    if (
        unknown := re.match(r"In '([^']+)': Config(?:Key|Attribute)Error raised[^\n]*\n.*\n\s*full_key: (\S+)", message)
    ) is not None:
        return _unknown_in_file(unknown[2], unknown[1])
    if (named := re.match(r"In '([^']+)': (?:\w+ raised while composing config:\s*)?(.*)", message)) is not None:
        group, _, option = named[1].rpartition("/")
        return ConfigError(group or "config", option, f"cannot be composed ({named[2]})", f"mend {named[1]}.yaml")
    if message.startswith("Could not delete"):
        return ConfigError(key, value, "takes out what is not there", advice(bare))
    if (added := re.search(r"append to your default list use (\+\w+=\S+)", message)) is not None:
        return ConfigError(key, value, "is of a group that is not in every recipe", f"try {added[1]}")
    if message.startswith("Could not override"):
        return ConfigError(key, value, "is no key or group of this recipe", advice(bare.partition("@")[0]))
    if bare:
        return ConfigError(bare, value, first_line(message), COMPARE)
    return ConfigError(ARGUMENTS, " ".join(overrides), first_line(message), HELP)


def _without_package(message: str, overrides: Sequence[str]) -> ConfigError | None:
    """The error for a recipe without a package: Hydra puts its keys below the name of its group."""
    for override in overrides:
        group, _, option = override.lstrip("+").partition("=")
        first = group.partition("/")[0]
        if (
            "." not in group
            and first not in discover()
            and re.search(rf"full_key: {re.escape(first)}\b|@{re.escape(first)}\.", message)
        ):
            cure = f"make this the first line of {group}/{option}.yaml: # @package _global_"
            return ConfigError(group, option, f"has its keys below {first}, which is no key of a recipe", cure)
    return None


def _unknown_in_file(key: str, file: str) -> ConfigError:
    """The error for a key in a YAML file that no schema has."""
    if key.startswith("hydra.sweeper."):
        rule = f"is no key of the sweeper, and {file}.yaml sets it"
        return ConfigError(
            key, "", rule, "space, where, repeats and control go with defaults: [override /hydra/sweeper: space]"
        )
    error = unknown_key(key, "")
    return ConfigError(key, "", f"{error.rule}, and {file}.yaml sets it", error.cure)


def _no_option_name(overrides: Sequence[str]) -> ConfigError:
    """The error for a group whose value is no name; Hydra does not say which group."""
    groups = discover()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        if (key in groups or not key) and not isinstance(value, str | list):
            return ConfigError(key or ARGUMENTS, value, "is no option of a group", "`titanlab train --help` lists them")
    return ConfigError(ARGUMENTS, " ".join(overrides), "an option of a group is named by text", HELP)


def _culprit(message: str, overrides: Sequence[str]) -> str:
    """The override that a message quotes; else one with a key or value that it quotes, or a key that it contains."""
    quoted = _QUOTED.findall(message)
    rules: tuple[Callable[[str, str], bool], ...] = (
        lambda text, key: text in quoted or f"+{text}" in quoted,
        lambda text, key: key in quoted or text.partition("=")[2] in quoted,
        lambda text, key: re.search(rf"\b{re.escape(key)}\b", message) is not None,
    )
    for fits in rules:
        for override in overrides:
            key = override.partition("=")[0].lstrip("+~")
            if key and fits(override, key):
                return override
    return ""


def first_line(error: BaseException | str) -> str:
    """The first line of a library's message, without its full stop."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". :") if text else type(error).__name__


def file_that_names(message: str) -> str | None:
    """The file whose defaults list names a missing config; None if an override names it."""
    named = re.match(r"In '([^']+)'", message)
    return None if named is None else named[1]
