"""The recipe of a run's next attempt: the run's own, with another layout, schedule, AC policy or launcher.

`new_recipe` is that of a new run, which may change the rest too.

The global batch stays, and so does the order of tokens, which depends on no layout: the microbatch adapts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from titanlab.costs.layout import Layout, divisors, resolve_layout
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe.composition.frozen import check_changeable, overridden
from titanlab.recipe.layout_rules import check_pipeline
from titanlab.recipe.recipe import Recipe
from titanlab.system.text import counted

# Groups of which another preset may be chosen. None of them changes what a run computes, except by rounding.
PRESETS = ("parallelism", "schedule", "ac", "cluster", "tracker", "launch")
# The keys that say how a step is spread over processes.
LAYOUT = ("world", "parallelism.", "schedule.", "ac.", "training.microbatch", "training.loss_chunk")


def next_recipe(
    config: Mapping[str, Any], overrides: Sequence[str], changeable: Sequence[str], *, file: Path, branch: str = ""
) -> Recipe:
    """The unresolved recipe of the next attempt.

    Args:
        config: of the run, as plain values.
        overrides: `key=value` for single keys, and `group=preset` for groups of PRESETS.
        changeable: the keys that may change, see `check_changeable`.
        file: the config's file, for errors that no override has caused.
        branch: the command that begins a new run with keys that may not change here.

    Raises:
        ConfigError: an override sets a key that may not change, or cannot be read; a preset does not exist.
    """
    check_changeable(overrides, changeable, presets=PRESETS, branch=branch)
    return _overridden(config, overrides, PRESETS, file=file)


def new_recipe(config: Mapping[str, Any], overrides: Sequence[str], *, file: Path) -> Recipe:
    """The unresolved recipe of a new run that changes another one's: any key, and any preset.

    Args:
        config: of the other run, as plain values.
        overrides: `key=value` for single keys, and `group=preset` for groups.
        file: the config's file, for errors that no override has caused.

    Raises:
        ConfigError: an override cannot be read; a key or a preset does not exist.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError("overrides", override, "is no override", "write key=value")
    return _overridden(config, overrides, tuple(map(str, discover())), file=file)


def _overridden(config: Mapping[str, Any], overrides: Sequence[str], groups: Sequence[str], *, file: Path) -> Recipe:
    chosen = [override for override in overrides if override.partition("=")[0] in groups]
    values = [override for override in overrides if override not in chosen]
    changed = {**config, **_presets(chosen)}
    keys = [override.partition("=")[0] for override in overrides]
    if "world" not in keys and any(key.partition(".")[0] == "parallelism" for key in keys):
        # The new degrees give the world; one that is "the rest" is the rest of the processes that the run had.
        degrees = overridden(changed, values, file=file).parallelism.degrees()
        changed["world"] = config.get("world") if -1 in degrees.values() else None
    return overridden(changed, values, file=file)


def adapted(recipe: Recipe, before: Recipe, overrides: Sequence[str] = ()) -> tuple[Recipe, str]:
    """The recipe with a microbatch that fits its layout, and a line about it; the line is empty if nothing changed.

    A process keeps its microbatch if that divides its part of the global batch; else it gets the largest smaller one
    that does. So a process needs no more memory for activations on fewer processes: it accumulates more gradients.

    Args:
        before: the resolved recipe of the run.
        overrides: what the user has given; their microbatch is left alone.

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
            # A pipeline's own default is 1, the most microbatches that it can overlap.
            return recipe, ""
        fits = [count for count in fits if _fits_pipeline(recipe, layout, batch // layout.data // count)] or fits
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


def changes(config: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """The groups and values of a recipe that differ from the run's; names and folders are left out."""
    same = ("runs", "sweep", "name", "launch")
    return {key: value for key, value in changed.items() if key not in same and config.get(key) != value}


def _fits_pipeline(recipe: Recipe, layout: Layout, microbatches: int) -> bool:
    try:
        check_pipeline(layout, recipe.parallelism, recipe.model.account(), recipe.schedule, microbatches=microbatches)
    except ConfigError:
        return False
    return True


def _presets(overrides: Sequence[str]) -> dict[str, Any]:
    """The content of the presets that were chosen, by group."""
    if not overrides:
        return {}
    # Imported here: most attempts choose no preset, and Hydra takes 0.3 s.
    from titanlab.recipe.composition.flags import read_flags
    from titanlab.recipe.composition.loader import Loader

    composed = Loader(read_flags(overrides), overrides).compose(())
    groups = [override.partition("=")[0] for override in overrides]
    return {group: OmegaConf.to_container(composed.config[group], resolve=True) for group in groups}
