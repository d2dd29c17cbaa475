"""Makes a recipe from a run's frozen config and overrides: for the run's next attempt, or for a new run.

The next attempt may have another layout, schedule, AC policy or launcher; a new run may change all keys. The global
batch and the order of tokens stay the same under another layout, because the microbatch adapts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from titanlab.costs import divisors, resolve_layout
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe.hydra_errors import value_error
from titanlab.recipe.keys import load
from titanlab.recipe.recipe import Recipe, from_mapping, literal
from titanlab.recipe.recipe_rules import check_pipeline
from titanlab.records import RunFolder, canonical
from titanlab.system import counted

# Groups of which the next attempt may choose another preset: they change a run's results only by rounding.
PRESETS = ("parallelism", "schedule", "ac", "cluster", "tracker", "launch")
# The keys, and prefixes of keys, that say how a step is spread over processes.
LAYOUT = ("world", "parallelism.", "schedule.", "ac.", "training.microbatch", "training.loss_chunk")


def next_recipe(
    config: Mapping[str, Any],
    overrides: Sequence[str],
    changeable: Sequence[str] | None,
    *,
    file: Path,
    branch: str = "",
) -> Recipe:
    """The unresolved recipe of a run's next attempt, or of a new run that begins with this run's config.

    Args:
        overrides: `key=value`, or `group=preset`. For the next attempt, the group must be in PRESETS.
        changeable: the keys that may change, as in `check_changeable`; None: any key, as in a new run.
        file: the config's file, for errors that no override has caused.

    Raises:
        ConfigError: an override sets a key that may not change, or cannot be read; a preset does not exist.
    """
    groups = PRESETS if changeable is not None else tuple(map(str, discover()))
    check_changeable(overrides, changeable, presets=PRESETS, branch=branch)
    chosen = [override for override in overrides if override.partition("=")[0] in groups]
    values = [override for override in overrides if override not in chosen]
    changed = dict(config)
    if chosen:
        # Imported here: most attempts choose no preset, and Hydra takes 0.3 s.
        from titanlab.recipe.compose import Loader
        from titanlab.recipe.flags import read_flags

        composed = Loader(read_flags(chosen), chosen).compose(())
        for group in (override.partition("=")[0] for override in chosen):
            changed[group] = OmegaConf.to_container(composed.config[group], resolve=True)
    keys = [override.partition("=")[0] for override in overrides]
    if "world" not in keys and any(key.partition(".")[0] == "parallelism" for key in keys):
        # The new degrees decide the world. A degree of -1 is computed from the number of processes that the run had.
        degrees = overridden(changed, values, file=file).parallelism.degrees()
        changed["world"] = config.get("world") if -1 in degrees.values() else None
    return overridden(changed, values, file=file)


def adapted(recipe: Recipe, before: Recipe, overrides: Sequence[str] = ()) -> tuple[Recipe, str]:
    """The recipe with a microbatch that fits its layout, and a line that says so, which is empty if nothing changed.

    A process keeps its microbatch if that divides the local batch; otherwise it gets the largest smaller divisor. So
    with fewer processes, each accumulates gradients of more microbatches, and needs no more memory for activations.

    Args:
        before: the resolved recipe that the run had.
        overrides: the user's overrides; if they set the microbatch, it stays.

    Raises:
        ConfigError: the data-parallel processes do not divide the global batch.
    """
    layout = resolve_layout(recipe.parallelism.degrees(), recipe.world)
    batch = recipe.training.global_batch
    if batch % layout.data:
        rule = f"a run keeps it, and it must be a multiple of the {layout.data} data-parallel processes"
        cure = f"replicate × shard may be {', '.join(map(str, divisors(batch)))}"
        raise ConfigError("training.global_batch", batch, rule, cure)
    is_given = any(override.partition("=")[0] == "training.microbatch" for override in overrides)
    grows = batch // layout.data > before.local_batch
    if is_given or layout == before.layout or (before.training.microbatch is None and not grows):
        return recipe, ""
    fits = [count for count in divisors(batch // layout.data) if count <= before.microbatch]
    if layout.pipeline > 1:
        if recipe.training.microbatch is None:
            # In a pipeline the default microbatch is 1, which gives the most microbatches to overlap.
            return recipe, ""
        account, sequences = recipe.model.account(), batch // layout.data
        in_pipeline = []
        for count in fits:
            with contextlib.suppress(ConfigError):
                config, schedule = recipe.parallelism, recipe.schedule
                check_pipeline(layout, config, account, schedule, microbatches=sequences // count)
                in_pipeline.append(count)
        fits = in_pipeline or fits
    chosen = max(fits)
    if chosen == recipe.training.microbatch:
        return recipe, ""
    passes = batch // layout.data // chosen
    line = (
        f"training.global_batch={batch} stays: each data-parallel process, of {layout.data}, has "
        f"{counted(batch // layout.data, 'sequence')} of a step, in {counted(passes, 'microbatch', 'microbatches')} "
        f"of {chosen} (training.microbatch={chosen})"
    )
    return replace(recipe, training=replace(recipe.training, microbatch=chosen)), line


def recipe_changes(config: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The groups and values of the recipe `changed` that differ from a run's config, without names and folders."""
    same = ("runs", "sweep", "name", "launch")
    return {key: value for key, value in changed.items() if key not in same and config.get(key) != value}


_NOTHING = object()
# Examples of keys, for errors about groups whose name alone does not help.
_EXAMPLES = {"parallelism": ", such as parallelism.shard=2", "launch": ", such as launch.threads=1"}


def check_changeable(
    overrides: Sequence[str], changeable: Sequence[str] | None, *, presets: Sequence[str] = (), branch: str = ""
) -> None:
    """Check that each argument is an override of a key that may change.

    Args:
        changeable: the keys that may change; a prefix of keys ends in a dot. None: all may change.
        presets: groups of which another preset may be chosen, if any of their keys may change.
        branch: the command that begins a new run, in which other keys may change; empty: there is no such command.
    """
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError("overrides", override, "is not an override", "write key=value")
        if changeable is None:
            continue
        is_group = key in discover() and any(name.startswith(f"{key}.") for name in changeable)
        if is_group and key in presets:
            continue
        if is_group:
            rule = "chooses a preset, which is not possible in a run that has begun"
            raise ConfigError(key, value, rule, f"give keys of {key}{_EXAMPLES.get(key, '')}")
        if not any(key == name or (name.endswith(".") and key.startswith(name)) for name in changeable):
            allowed = ", ".join(name.removesuffix(".") for name in changeable)
            rule = "is not to be changed in a run that has begun"
            cure = f"a new run from its checkpoint: {branch} {override}; " if branch else ""
            raise ConfigError(key, value, rule, f"{cure}changeable: {allowed}")


def check_unedited(run: RunFolder) -> None:
    """Check by a run's identity.json that nobody has edited its config.yaml.

    Keys outside the identity may be edited: names, folders, the tracker, the launcher, logging.

    Raises:
        ConfigError: a value was changed by hand, or a file is damaged.
    """
    config, identity = run.config(), run.identity()
    made = identity.content.get("recipe") if identity is not None else None
    try:
        recipe = from_mapping(config)
    except ConfigError:
        # The caller reads the config too, and gives a better error.
        return
    for key, value, before in _differences(canonical(recipe), made, config) if isinstance(made, Mapping) else ():
        rule = f"the run was made with {before}, by its identity.json"
        cure = f"set it back in {run.path / 'config.yaml'}; another value needs a run of its own: titanlab train --from"
        raise ConfigError(key, value, rule, cure)


def _differences(now: Any, made: Any, written: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key with different values in `now` and `made`, and both values; fields of a later version are skipped."""
    if isinstance(now, Mapping) and isinstance(made, Mapping):
        for name in (*made, *(name for name in now if name not in made)):
            inner = written.get(name, _NOTHING) if isinstance(written, Mapping) else _NOTHING
            if name in made or inner is not _NOTHING:
                pair = now.get(name, inner), made.get(name, "another value")
                yield from _differences(*pair, inner, f"{key}.{name}".lstrip("."))
    elif now != made:
        yield key, None if now is _NOTHING else now, made


def frozen_recipe(run: RunFolder, overrides: Sequence[str] = (), *, attempt: int | None = None) -> Recipe:
    """The recipe of a run, or of one of its attempts, changed by the overrides.

    Raises:
        ConfigError: an override does not fit, or the config is damaged or of another version.
    """
    if attempt is None:
        check_unedited(run)
    folder = run.path if attempt is None else run.attempt_folder(attempt)
    return overridden(run.config(attempt), overrides, file=folder / "config.yaml")


def overridden(config: Mapping[str, Any], overrides: Sequence[str], *, file: Path) -> Recipe:
    """The recipe of a run's frozen config, changed by overrides. Errors name the file unless an override caused them.

    Raises:
        ConfigError: an override cannot be read, its value does not fit, or the config is of another version.
    """
    changed = dict(config)
    # Without overrides skip the merge, which would take most of the time that `retry` needs for a run.
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
