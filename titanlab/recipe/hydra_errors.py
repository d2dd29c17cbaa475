"""Turns errors of Hydra and OmegaConf into ConfigErrors: one line with key, value, rule and cure.

Hydra raises ConfigCompositionException for most mistakes in overrides and defaults lists. Only the text of this
exception has the key, the value and the file. `read_message` recognises such texts; no other code depends on the
wording of an error. `tests/cli/test_refusals.py` makes the installed Hydra raise each of these errors. If a later Hydra
words an error differently, our error still shows the override that Hydra quotes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)

from titanlab.errors import ConfigError
from titanlab.options import PLUS, combining_groups, discover
from titanlab.recipe.keys import advice, find_key, unknown_key
from titanlab.recipe.strangers import own_start_error

# Errors while a recipe is composed. For bad overrides Hydra also raises Python's own errors (OverflowError: a float of
# 400 digits). OSError and YAMLError come from reading files.
_COMPOSITION_ERRORS = (
    *(HydraException, OmegaConfBaseException, ValueError, OverflowError, RuntimeError),
    *(OSError, yaml.YAMLError),
)
# An error names at most this many options of a group.
_MOST_SHOWN = 20
_SWEEP = re.compile(r"[^\[{\"'(,]*[(,]")
_FULL_KEY = re.compile(r"^\s+full_key: (\S+)$", re.MULTILINE)
_KEY = re.compile(r"[+~]*[\w./@:-]+")
ARGUMENTS = "arguments"
"""The key of an error that concerns no single key."""
COMPARE = "compare with `titanlab train --cfg job`"
HELP = "see `titanlab train --help`"


@contextlib.contextmanager
def composition_errors(overrides: Sequence[str], flags: Mapping[str, str | None] | None = None) -> Iterator[None]:
    """Turn an error while a recipe is composed into a ConfigError.

    Args:
        overrides: the `key=value` arguments.
        flags: values of the flags that say where configs are, by flag.
    """
    try:
        yield
    except _COMPOSITION_ERRORS as error:
        if isinstance(error, OSError) and error.filename is None and not isinstance(error, HydraException):
            # The error is not about a file; for example, a pipe has no reader any more.
            raise
        raise _translated(error, overrides, flags or {}) from error
    except AttributeError as error:
        # For a key inside a null value, OmegaConf (2.3) raises Python's own error, whose message has the key.
        named = _FULL_KEY.search(str(error))
        if named is None:
            raise
        value = _values(overrides).get(named[1])
        raise ConfigError(named[1], value, "is null, which takes no keys", COMPARE) from error


def _translated(error: Exception, overrides: Sequence[str], flags: Mapping[str, str | None]) -> ConfigError:
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals and not key.startswith("~"):
            return ConfigError(ARGUMENTS, key, "is not an override", "write key=value; " + HELP)
        if not _KEY.fullmatch(key):
            cure = "write key=value without spaces, the key as words with dots between them"
            return ConfigError(ARGUMENTS, error.override, "cannot be read as an override", cure)
        # The cure shows inner quotes for Hydra, and outer quotes for the shell.
        text = value.strip("\"'").replace("'", "")
        return ConfigError(key, value, "cannot be read as an override", f"quote it: \"{key}='{text}'\"")
    if isinstance(error, SearchPathException):
        return ConfigError(
            "--config-dir",
            flags.get("--config-dir") or "",
            "is not a folder",
            "give a folder that has model, data and other groups of options",
        )
    if isinstance(error, MissingConfigException):
        return _missing_config(error, flags)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return value_error(cause, overrides)
    if isinstance(error, OSError):
        return ConfigError("file", error.filename, f"cannot be used ({error.strerror})", "name another")
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f"{error.problem_mark.name}:{error.problem_mark.line + 1}"
        return ConfigError("file", place, f"is not YAML ({error.problem})", "mend that line")
    return read_message(str(error), overrides)


def _missing_config(error: MissingConfigException, flags: Mapping[str, str | None]) -> ConfigError:
    name = error.missing_cfg_file
    if name is None or name == "config":
        rule = "is not a folder of configs" if name is None else "has no config.yaml"
        return ConfigError("--config-path", flags.get("--config-path") or "", rule, "leave it out, or use --config-dir")
    if name == flags.get("--config-name"):
        return ConfigError("--config-name", name, "there is no such config", "leave it out, or give --config-dir too")
    group, _, option = name.rpartition("/")
    # The file whose defaults list names the option; None if an override names it.
    named = re.match(r"In '([^']+)'", str(error)) if error.options is None else None
    file = None if named is None else named[1]
    if file is not None and PLUS in file:
        # The user gave a list of options; see `keys.with_combination`.
        options = sorted(str(kind) for kind in discover().get(group, {}))
    elif file is not None:
        return ConfigError(group, option, f"is no option, but {file} names it", f"correct {file}.yaml")
    else:
        options = list(error.options or [])
    near = difflib.get_close_matches(option, options, n=1)
    if group in ("hydra/launcher", "hydra/sweeper") and not near:
        return own_start_error(group, option)
    cure = f"try {near[0]}; " if near else ""
    known = ", ".join(options) or "none"
    if len(options) > _MOST_SHOWN:
        known = f"{', '.join(options[:_MOST_SHOWN])} and {len(options) - _MOST_SHOWN} more; {HELP}"
    return ConfigError(group or "config", option, "is not an option of this group", f"{cure}known: {known}")


def value_error(cause: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError:
    """The error for a wrong value or key; it shows the value as the user typed it."""
    values = _values(overrides)
    key = _full_key(cause, values)
    value = values.get(key, cause.value)
    if isinstance(cause, InterpolationResolutionError | UnsupportedInterpolationType):
        # With OC_CAUSE=1 or under a debugger, OmegaConf links its errors as causes of each other, even in a circle.
        chain: list[BaseException] = [cause]
        for error in chain:
            if isinstance(error, ConfigError):
                # OmegaConf has wrapped an error of titanlab's own resolver.
                return ConfigError(key, f"${{{error.key}:{error.value}}}", error.rule, error.cure)
            linked = (error.__cause__, error.__context__)
            chain += [each for each in linked if each is not None and each not in chain]
        rule, cure = first_line(cause), "name a key as in ${model.dim}, or a resolver"
        if rule.startswith("RecursionError"):
            # `override_dirname` has the text of all overrides, also of the override that refers to `override_dirname`.
            key = next((name for name, text in values.items() if "override_dirname" in text), key)
            rule, cure = "refers to itself", "leave it out: runs of a sweep are named by what they vary"
        return ConfigError(key, values.get(key, "${…}"), rule, cure)
    if isinstance(cause, ValidationError):
        # A sweep's override has several values: show only the wrong value.
        return _wrong_type(key, cause.value if _SWEEP.match(str(value)) else value, cause)
    if isinstance(cause, MissingMandatoryValue):
        return ConfigError(key, "???", "has no value", f"give {key}=…")
    if isinstance(cause, ConfigTypeError) and "deletion" in str(cause.msg):
        return ConfigError(key, "", "cannot be taken out", f"give it a value: {key}=…")
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return _unknown_key(key, value, values)
    return ConfigError(key, value, first_line(cause), COMPARE)


def _unknown_key(key: str, value: object, values: Mapping[str, str]) -> ConfigError:
    group, _, rest = key.partition(".")
    chosen = values.get(group, "")
    for name in re.findall(r"\w+", chosen) if group in combining_groups() and chosen.startswith("[") else ():
        if find_key(f"{group}.{rest}", None, kind=name) is not None:
            rule = f"is a key of one of the chosen options, {name}"
            return ConfigError(key, value, rule, f"try {group}.{name}.{rest}={value}")
    for given, text in values.items():
        if key.startswith(f"{given}.") and text.startswith("{"):
            # The override's value is a mapping, as in training={stepz:1}.
            rule = f"has {key.removeprefix(f'{given}.')}, which is not a key of this recipe"
            return ConfigError(given, text, rule, unknown_key(key, None).cure)
    return unknown_key(key, value)


def _wrong_type(key: str, value: object, cause: OmegaConfBaseException) -> ConfigError:
    known = find_key(key, cause.object_type)
    if known is None:
        # The key is below a plain value (training.steps.x=1), or is a key of Hydra.
        is_value = find_key(str(cause.full_key)) is not None
        return unknown_key(key, value) if is_value else ConfigError(key, value, first_line(cause), COMPARE)
    if dataclasses.is_dataclass(known.declared):
        first = dataclasses.fields(known.declared)[0].name
        return ConfigError(key, value, "has keys of its own", f"give them one by one: {key}.{first}=…")
    cure = f"try {known.default}" if known.default is not None else f"give {known.accepted_values}"
    return ConfigError(key, value, f"must be {known.accepted_values}", cure)


def _values(overrides: Sequence[str]) -> dict[str, str]:
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~").split("@")[0]: value for key, _, value in pairs}


def _full_key(cause: OmegaConfBaseException, values: Mapping[str, str]) -> str:
    """The key as the user gave it: OmegaConf may name only `trainig` or `steps` of `trainig.steps=3`."""
    # Drop the index of a list's item, as in optimizer.betas[0].
    key = (cause.full_key or str(cause.key or "config")).partition("[")[0]
    if key in values:
        return key
    return next((name for name in values if name.endswith("." + key) or name.startswith(key + ".")), key)


def read_message(message: str, overrides: Sequence[str]) -> ConfigError:
    """The ConfigError for a message of Hydra; `overrides` are the `key=value` arguments."""
    culprit = _culprit(message, overrides)
    key, _, value = culprit.partition("=")
    bare = key.lstrip("+~")
    if message.startswith(("Ambiguous value", "Sweep parameters")):
        in_brackets = f"; a list is [{value}]" if message.startswith("Ambiguous") and "." in bare else ""
        return ConfigError(bare, value, "is several values", f"add -m to run them all{in_brackets}")
    if "is not a subclass of" in message:
        return ConfigError(bare, value, "is two options of different schemas", "name one of them")
    twice = re.match(r"Multiple values for (\S+)\. .*'override \S+: (\S+)'", message)
    # An override of the group without `+` would have replaced both choices, so two defaults lists are the cause.
    if twice is not None and bare != twice[1]:
        cure = f"write - override /{twice[1]}: … there, at the end of the defaults"
        return ConfigError(twice[1], twice[2], "is chosen in a second defaults list, without override", cure)
    if message.startswith(("Multiple values", "Could not append")):
        return ConfigError(key, value, "is in the recipe already", f"try {bare}={value}")
    if message.startswith("Config group override must be a string"):
        # Hydra does not say which group: find the override whose value is neither text nor a list.
        for parsed in OverridesParser.create().parse_overrides(list(overrides)):
            group, chosen = parsed.key_or_group, parsed.value()
            if (group in discover() or not group) and not isinstance(chosen, str | list):
                cure = "`titanlab train --help` lists them"
                return ConfigError(group or ARGUMENTS, chosen, "is not an option of a group", cure)
        return ConfigError(ARGUMENTS, " ".join(overrides), "the option of a group must be text", HELP)
    for override in overrides:
        # The file of a recipe lacks its package line: then Hydra puts the file's keys below its group's name.
        group, _, option = override.lstrip("+").partition("=")
        first = group.partition("/")[0]
        is_below = re.search(rf"full_key: {re.escape(first)}\b|@{re.escape(first)}\.", message) is not None
        if is_below and "." not in group and first not in discover():
            cure = f"make this the first line of {group}/{option}.yaml: # @package _global_"
            return ConfigError(group, option, f"has its keys below {first}, which is not a key of a recipe", cure)
    raised = r"In '([^']+)': Config(?:Key|Attribute)Error raised[^\n]*\n.*\n\s*full_key: (\S+)"
    if (unknown := re.match(raised, message)) is not None:
        file, name = unknown.groups()
        if name.startswith("hydra.sweeper."):
            cure = "space, where, repeats and control go with defaults: [override /hydra/sweeper: space]"
            return ConfigError(name, "", f"is not a key of the sweeper, and {file}.yaml sets it", cure)
        error = unknown_key(name, "")
        return ConfigError(name, "", f"{error.rule}, and {file}.yaml sets it", error.cure)
    if (named := re.match(r"In '?([^':]+)'?: (?:\w+ raised while composing config:\s*)?(.*)", message)) is not None:
        group, _, option = named[1].rpartition("/")
        return ConfigError(
            group or "config", option, f"cannot be composed ({first_line(named[2])})", f"mend {named[1]}.yaml"
        )
    if message.startswith("Could not delete"):
        return ConfigError(key, value, "removes a key or group that this recipe does not have", advice(bare))
    if (added := re.search(r"append to your default list use (\+\w+=\S+)", message)) is not None:
        return ConfigError(key, value, "names a group that not every recipe has", f"try {added[1]}")
    if message.startswith("Could not override"):
        return ConfigError(key, value, "is not a key or group of this recipe", advice(bare.partition("@")[0]))
    if bare:
        return ConfigError(bare, value, first_line(message), COMPARE)
    return ConfigError(ARGUMENTS, " ".join(overrides), first_line(message), HELP)


def _culprit(message: str, overrides: Sequence[str]) -> str:
    """The override that a message quotes; else one whose key or value it quotes, or whose key the message contains."""
    quoted = re.findall(r"'([^']*)'", message)
    given = [(text, text.partition("=")[0].lstrip("+~"), text.partition("=")[2]) for text in overrides]
    given = [each for each in given if each[1]]
    return next(
        itertools.chain(
            (text for text, _, _ in given if text in quoted or f"+{text}" in quoted),
            (text for text, key, value in given if key in quoted or value in quoted),
            (text for text, key, _ in given if re.search(rf"\b{re.escape(key)}\b", message)),
        ),
        "",
    )


def first_line(error: BaseException | str) -> str:
    """The first line of a library's message, without its full stop."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". :") if text else type(error).__name__
