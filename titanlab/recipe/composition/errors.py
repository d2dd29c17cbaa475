"""Hydra's and OmegaConf's errors as one line with key, value, rule and cure."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
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
from titanlab.options import discover
from titanlab.recipe.composition.keys import advice, find_key
from titanlab.recipe.composition.sweeper import Space

ARGUMENTS = "arguments"
"""The key of a mistake that belongs to no key."""
_COMPARE = "compare with `titanlab train --cfg job`"
_HELP = "see `titanlab train --help`"
# Hydra also raises plain errors for what a person typed (OverflowError: 400 digits for a number with a fraction); files
# bring errors of their own.
_OF_COMPOSITION = (
    *(HydraException, OmegaConfBaseException, ValueError, OverflowError, RuntimeError),
    *(OSError, yaml.YAMLError),
)
# Options of a group that one line can name.
_SHOWN = 20
_SPACE = tuple(f"hydra.sweeper.{field.name}" for field in dataclasses.fields(Space))
_SWEEP = re.compile(r"[^\[{\"'(,]*[(,]")
_KEY = re.compile(r"[+~]*[\w./@:-]+")
_QUOTED = re.compile(r"'([^']*)'")


@contextlib.contextmanager
def composition_errors(overrides: Sequence[str], flags: Mapping[str, str | None] | None = None) -> Iterator[None]:
    """Turn what goes wrong while a recipe is composed into a ConfigError.

    Args:
        overrides: the `key=value` arguments.
        flags: values of the flags that say where configs are, by flag.
    """
    try:
        yield
    except _OF_COMPOSITION as error:
        if isinstance(error, OSError) and error.filename is None and not isinstance(error, HydraException):
            # Of no file: a pipe that nobody reads any more, say.
            raise
        raise _translated(error, overrides, flags or {}) from error


def _translated(error: Exception, overrides: Sequence[str], flags: Mapping[str, str | None]) -> ConfigError:
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals and not key.startswith("~"):
            return ConfigError(ARGUMENTS, key, "is no override", "write key=value; " + _HELP)
        if not _KEY.fullmatch(key):
            cure = "write key=value without spaces, the key as words with dots between them"
            return ConfigError(ARGUMENTS, error.override, "cannot be read as an override", cure)
        return ConfigError(key, value, "cannot be read as an override", f"quote it: {_quoted(key, value)}")
    if isinstance(error, SearchPathException):
        return ConfigError("--config-dir", flags.get("--config-dir") or "", "is no folder", "give a folder of groups")
    if isinstance(error, MissingConfigException):
        return _missing_config(error, flags)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        return value_error(cause, overrides)
    if isinstance(error, OSError):
        return ConfigError("file", error.filename, f"cannot be used ({error.strerror})", "name another")
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f"{error.problem_mark.name}:{error.problem_mark.line + 1}"
        return ConfigError("file", place, f"is no YAML ({error.problem})", "mend that line")
    return _of_composition(str(error), overrides)


def _quoted(key: str, value: str) -> str:
    """The override with quotes for Hydra inside and, around them, for the shell."""
    text = value.strip("\"'").replace("'", "")
    return f"\"{key}='{text}'\""


def _missing_config(error: MissingConfigException, flags: Mapping[str, str | None]) -> ConfigError:
    name = error.missing_cfg_file
    if name is None:
        path = flags.get("--config-path") or ""
        return ConfigError("--config-path", path, "is no folder of configs", "leave it out, or use --config-dir")
    if name == "config":
        path = flags.get("--config-path") or ""
        return ConfigError("--config-path", path, "has no config.yaml", "leave it out, or use --config-dir")
    if name == flags.get("--config-name"):
        return ConfigError("--config-name", name, "there is no such config", "leave it out, or give --config-dir too")
    group, _, option = name.rpartition("/")
    if error.options is None and (named := re.match(r"In '([^']+)'", str(error))) is not None:
        return ConfigError(group, option, f"there is no such config, which {named[1]} names", f"mend {named[1]}.yaml")
    options = [each for each in (error.options or []) if not each.endswith("schema")]
    near = difflib.get_close_matches(option, options, n=1)
    cure = f"try {near[0]}; " if near else ""
    known = ", ".join(options) or "none"
    if len(options) > _SHOWN:
        known = f"{', '.join(options[:_SHOWN])} and {len(options) - _SHOWN} more; {_HELP}"
    return ConfigError(group or "config", option, "is no option of this group", f"{cure}known: {known}")


def value_error(cause: OmegaConfBaseException, overrides: Sequence[str]) -> ConfigError:
    """The error for a value or a key that does not fit, given what a person typed."""
    given = _values(overrides)
    key = _full_key(cause, given)
    value = given.get(key, cause.value)
    if isinstance(cause, InterpolationResolutionError | UnsupportedInterpolationType):
        refusal = _refusal(cause)
        if refusal is not None:
            return ConfigError(key, f"${{{refusal.key}:{refusal.value}}}", refusal.rule, refusal.cure)
        return ConfigError(key, given.get(key, "${…}"), _told(cause), "name a key as in ${model.dim}, or a resolver")
    if isinstance(cause, ValidationError):
        # In a sweep the override has all values, and one of them is wrong.
        return _wrong_type(key, cause.value if _SWEEP.match(str(value)) else value, cause)
    if isinstance(cause, MissingMandatoryValue):
        return ConfigError(key, "???", "has no value", f"give {key}=…")
    if isinstance(cause, ConfigTypeError) and "deletion" in str(cause.msg):
        return ConfigError(key, "", "cannot be taken out", f"give it a value: {key}=…")
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return unknown_key(key, value)
    return ConfigError(key, value, _told(cause), _COMPARE)


def _refusal(error: BaseException | None) -> ConfigError | None:
    """What a resolver of ours said, which OmegaConf has wrapped."""
    while error is not None and not isinstance(error, ConfigError):
        error = error.__cause__ or error.__context__
    return error


def unknown_key(key: str, value: object) -> ConfigError:
    """The error for a key that the recipe does not have."""
    if key.partition(".")[0].partition("/")[0] == "hydra":
        if key in _SPACE:
            return ConfigError(key, value, "is a key of a sweep's file", f"add hydra/sweeper=space to have {key}")
        return ConfigError(key, value, "is no key of Hydra's", "see `titanlab train --cfg hydra`")
    return ConfigError(key, value, "is no key of this recipe", advice(key))


def _wrong_type(key: str, value: object, cause: OmegaConfBaseException) -> ConfigError:
    known = find_key(key, cause.object_type)
    if known is None:
        # A key of something that has none, as in training.steps.x=1, or one of Hydra's.
        is_value = find_key(str(cause.full_key)) is not None
        return unknown_key(key, value) if is_value else ConfigError(key, value, _told(cause), _COMPARE)
    if dataclasses.is_dataclass(known.declared):
        first = dataclasses.fields(known.declared)[0].name
        return ConfigError(key, value, "has keys of its own", f"give them one by one: {key}.{first}=…")
    cure = f"try {known.default}" if known.default is not None else f"give {known.wanted}"
    return ConfigError(key, value, f"must be {known.wanted}", cure)


def _of_composition(message: str, overrides: Sequence[str]) -> ConfigError:
    culprit = _culprit(message, overrides)
    key, _, value = culprit.partition("=")
    bare = key.lstrip("+~")
    if message.startswith(("Ambiguous value", "Sweep parameters")):
        in_brackets = f"; a list is [{value}]" if message.startswith("Ambiguous") and "." in bare else ""
        return ConfigError(bare, value, "is several values", f"add -m to run them all{in_brackets}")
    if "is not a subclass of" in message:
        return ConfigError(bare, value, "is two options of different schemas", "name one of them")
    if message.startswith("Sweeping over Hydra"):
        return ConfigError(bare, value, "is Hydra's own, which is one for all points", "give one value")
    if message.startswith(("Multiple values", "Could not append")):
        return ConfigError(key, value, "is in the recipe already", f"try {bare}={value}")
    if message.startswith("Config group override must be a string"):
        return _no_option_name(overrides)
    if (misplaced := re.match(r"In '?([^':]+)'?: Override '(\S+) : (\S+)' is defined before", message)) is not None:
        cure = f"put what overrides at the end of the defaults of {misplaced[1]}.yaml"
        return ConfigError(f"override /{misplaced[2]}", misplaced[3], "comes before what it is to override", cure)
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
        return ConfigError(bare, value, _told(message), _COMPARE)
    return ConfigError(ARGUMENTS, " ".join(overrides), _told(message), _HELP)


def _unknown_in_file(key: str, file: str) -> ConfigError:
    """A YAML sets a key that is not there."""
    if key.startswith("hydra.sweeper."):
        rule = f"is no key of the sweeper, and {file}.yaml sets it"
        return ConfigError(key, "", rule, "space, where and repeats go with defaults: [override /hydra/sweeper: space]")
    error = unknown_key(key, "")
    return ConfigError(key, "", f"{error.rule}, and {file}.yaml sets it", error.cure)


def _no_option_name(overrides: Sequence[str]) -> ConfigError:
    """A group was given a value that is no name; Hydra does not say which."""
    groups = discover()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        if (key in groups or not key) and not isinstance(value, str | list):
            return ConfigError(key or ARGUMENTS, value, "is no option of a group", "`titanlab train --help` lists them")
    return ConfigError(ARGUMENTS, " ".join(overrides), "an option of a group is named by text", _HELP)


def _culprit(message: str, overrides: Sequence[str]) -> str:
    """The override that a message is about: it quotes it whole, its key or its value, or has its key; empty if none."""
    quoted = _QUOTED.findall(message)
    for fits in (
        lambda text, key: text in quoted or f"+{text}" in quoted,
        lambda text, key: key in quoted or text.partition("=")[2] in quoted,
        lambda text, key: re.search(rf"\b{re.escape(key)}\b", message) is not None,
    ):
        for override in overrides:
            key = override.partition("=")[0].lstrip("+~")
            if key and fits(override, key):
                return override
    return ""


def _values(overrides: Sequence[str]) -> dict[str, str]:
    """Value by key, without the signs `+`, `++` and `~`."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~").split("@")[0]: value for key, _, value in pairs}


def _full_key(cause: OmegaConfBaseException, given: Mapping[str, str]) -> str:
    """The key as it was given: of `trainig.steps=3` OmegaConf names `trainig`, of a group merged alone `steps`."""
    # An item of a list is numbered: optimizer.betas[0].
    key = (cause.full_key or str(cause.key or "config")).partition("[")[0]
    if key in given:
        return key
    return next((each for each in given if each.endswith("." + key) or each.startswith(key + ".")), key)


def _told(error: BaseException | str) -> str:
    """The first line of what a library said, without its full stop."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". :") if text else type(error).__name__
