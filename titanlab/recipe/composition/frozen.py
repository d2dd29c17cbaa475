"""Applies overrides to the frozen recipe of an existing run, of which only some keys may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe.composition.errors import value_error
from titanlab.recipe.composition.texts import load
from titanlab.recipe.literal import literal
from titanlab.recipe.recipe import Recipe, from_mapping
from titanlab.records.identity import canonical
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_records import RunRecords

_NOTHING = object()
# Examples in the error for groups whose name alone would not help.
_EXAMPLES = {"parallelism": ", such as parallelism.shard=2", "launch": ", such as launch.threads=1"}


def check_changeable(
    overrides: Sequence[str], changeable: Sequence[str], *, presets: Sequence[str] = (), branch: str = ""
) -> None:
    """Check that overrides set only keys that may change.

    Args:
        overrides: `key=value` arguments.
        changeable: keys, and prefixes of keys, which end in a dot.
        presets: groups of which another preset may be chosen, if any of their keys may change.
        branch: the command that begins a new run with the other keys; empty: there is none.

    Raises:
        ConfigError: an argument is no override, or sets another key.
    """
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError("overrides", override, "is no override", "write key=value")
        is_group = key in discover() and any(name.startswith(f"{key}.") for name in changeable)
        if is_group and key in presets:
            continue
        if is_group:
            rule = "is another preset, and a run that has begun has values"
            raise ConfigError(key, value, rule, f"give keys of {key}{_EXAMPLES.get(key, '')}")
        if not any(key == name or (name.endswith(".") and key.startswith(name)) for name in changeable):
            allowed = ", ".join(name.removesuffix(".") for name in changeable)
            rule = "is not to be changed in a run that has begun"
            cure = f"a new run from its checkpoint: {branch} {override}; " if branch else ""
            raise ConfigError(key, value, rule, f"{cure}changeable: {allowed}")


def check_unedited(run: RunRecords) -> None:
    """Check that a run's config.yaml still says what the run was made with: its folder has the hash of that.

    The keys that no identity covers may be edited: names, folders, the tracker, the launcher, logging.

    Raises:
        ConfigError: a value was changed by hand; or a file is damaged.
    """
    config, identity = run.config(), run.identity()
    made = identity.content.get("recipe") if identity is not None else None
    try:
        recipe = from_mapping(config)
    except ConfigError:
        # The caller reads the config too, and says more about it.
        return
    for key, value, before in _differences(canonical(recipe), made, config) if isinstance(made, Mapping) else ():
        rule = f"the run was made with {before}, by its identity.json"
        cure = f"set it back in {run.path / 'config.yaml'}; another value needs a run of its own: titanlab train --from"
        raise ConfigError(key, value, rule, cure)


def _differences(now: Any, made: Any, written: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key that differs, with both values. A field that a later version has added is not written in the file."""
    if isinstance(now, Mapping) and isinstance(made, Mapping):
        for name in (*made, *(name for name in now if name not in made)):
            inner = written.get(name, _NOTHING) if isinstance(written, Mapping) else _NOTHING
            if name in made or inner is not _NOTHING:
                pair = now.get(name, inner), made.get(name, "another value")
                yield from _differences(*pair, inner, f"{key}.{name}".lstrip("."))
    elif now != made:
        yield key, None if now is _NOTHING else now, made


def frozen_recipe(run: RunFolder, overrides: Sequence[str] = (), *, attempt: int | None = None) -> Recipe:
    """The recipe of a run, or of one of its attempts, with some keys changed.

    Raises:
        ConfigError: an override does not fit; or the config is damaged, or of another version.
    """
    if attempt is None:
        check_unedited(run)
    folder = run.path if attempt is None else run.attempt_folder(attempt)
    return overridden(run.config(attempt), overrides, file=folder / "config.yaml")


def overridden(config: Mapping[str, Any], overrides: Sequence[str], *, file: Path) -> Recipe:
    """The recipe of a run's frozen config, with some keys changed.

    Args:
        file: the config's file, for errors that no override has caused.

    Raises:
        ConfigError: an override cannot be read, or its value does not fit; or the config is of another version.
    """
    changed = dict(config)
    # Merging nothing takes most of the time that `retry` needs for a run.
    if overrides:
        try:
            given = OmegaConf.create()
            for override in overrides:
                key, _, value = override.partition("=")
                OmegaConf.update(given, key, load(value, key))
            merged = OmegaConf.merge(OmegaConf.create(literal(config)), literal(OmegaConf.to_container(given)))
        except (OmegaConfBaseException, YAMLError) as error:
            rule = f"cannot be read ({str(error).splitlines()[0]})"
            raise ConfigError("overrides", " ".join(overrides), rule, "write key=value") from error
        changed = OmegaConf.to_container(merged, resolve=True)  # type: ignore[assignment]
    try:
        return from_mapping(changed)
    except ConfigError as error:
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException) and any(text.startswith(error.key) for text in overrides):
            # The user gave this key, so the error says which values it accepts.
            raise value_error(cause, overrides) from error
        keys = [override.partition("=")[0] for override in overrides]
        if any(key == error.key or key.startswith(f"{error.key}.") for key in keys):
            raise
        cure = "mend that file; if another version of titanlab made it, use that version"
        raise ConfigError(error.key, error.value, f"{error.rule} (in {file})", cure) from error
