"""Hydra's and OmegaConf's errors as one line with key, value, rule and cure."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterator, Sequence

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe import Recipe


@contextlib.contextmanager
def composition_errors(arguments: Sequence[str]) -> Iterator[None]:
    """Turn what goes wrong while the arguments are composed into a ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise _translate(error, _overrides(arguments)) from error


def _overrides(arguments: Sequence[str]) -> dict[str, str]:
    """Value by key of every `key=value` argument, without the signs `+`, `++` and `~`."""
    pairs = (argument.partition("=") for argument in arguments if not argument.startswith("-"))
    return {key.lstrip("+~").split("@")[0]: value for key, _, value in pairs}


def _translate(error: Exception, overrides: dict[str, str]) -> ConfigError:
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        return ConfigError(
            key, value, "cannot be read as an override", "write key=value, and quote what a shell would split"
        )
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, ValidationError | ConfigKeyError | ConfigAttributeError):
        key = _full_key(cause, overrides)
        value = overrides.get(key, cause.value)
        if isinstance(cause, ValidationError):
            return ConfigError(key, value, _first_line(cause), f"give {_type_of(cause)}")
        return ConfigError(key, value, "is no key of this recipe", _like(key))
    if isinstance(cause, MissingMandatoryValue):
        key = cause.full_key or "config"
        return ConfigError(key, "???", "has no value", f"give {key}=…")
    if isinstance(cause, InterpolationResolutionError):
        key = cause.full_key or "config"
        return ConfigError(key, overrides.get(key, "${…}"), _first_line(cause), "mend the interpolation")
    if isinstance(error, ConfigCompositionException):
        for key, value in overrides.items():
            if f"'{key}'" in str(error):
                return ConfigError(key, value, "is no key or group of this recipe", _like(key))
    key, value = next(iter(overrides.items()), ("config", ""))
    return ConfigError(key, value, _first_line(error), "compare with `titanlab train --cfg job`")


def _missing_option(error: MissingConfigException) -> ConfigError:
    group, _, name = (error.missing_cfg_file or "config").rpartition("/")
    options = [option for option in (error.options or []) if not option.endswith("schema")]
    near = difflib.get_close_matches(name, options, n=1)
    cure = f"try {near[0]}; " if near else ""
    return ConfigError(
        group or "config", name, "is no option of this group", f"{cure}known: {', '.join(options) or 'none'}"
    )


def _full_key(cause: OmegaConfBaseException, overrides: dict[str, str]) -> str:
    key = cause.full_key or str(cause.key or "config")
    if key in overrides:
        return key
    # While one group is merged alone, its keys come without the group's name.
    return next((given for given in overrides if given.endswith("." + key)), key)


def _type_of(cause: OmegaConfBaseException) -> str:
    for word, kind in (
        ("Integer", "a whole number"),
        ("Float", "a number"),
        ("Bool", "true or false"),
        ("list", "a list: [a,b]"),
    ):
        if word.lower() in str(cause.msg).lower():
            return kind
    return "a value of the key's type"


def _like(key: str) -> str:
    near = difflib.get_close_matches(key, _known_keys(), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "see `titanlab train --cfg job` for all keys"


def _known_keys() -> list[str]:
    keys = [field.name for field in dataclasses.fields(Recipe)]
    for group, kinds in discover().items():
        for found in kinds.values():
            keys += [f"{group}.{field.name}" for field in dataclasses.fields(found.schema)]
    return [*keys, "optimizer.schedule.warmup_steps", "optimizer.schedule.decay", "optimizer.schedule.decay_fraction"]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
