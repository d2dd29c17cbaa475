"""The config of a run as a file that `titanlab train` composes, and how it differs from what its recipe is now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.recipe.composition.flags import read_flags
from titanlab.recipe.composition.loader import Loader
from titanlab.recipe.literal import literal
from titanlab.recipe.recipe import Recipe, from_mapping, resolve, to_mapping
from titanlab.records.config_file import config_text
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.study.composer import Composer
from titanlab.sweep.sweep_folder import SweepFolder

NAME = "run"
# They say where a run is, and not what it computes.
_PLACES = ("runs", "sweep", "name")
_ABSENT = "-"


def composable(config: Mapping[str, Any]) -> str:
    """The text of a YAML that composes to a run's recipe: a list of schemas, and all values.

    Raises:
        ConfigError: an option is not installed here, or a value breaks a rule.
    """
    recipe = to_mapping(from_mapping(config))
    defaults: list[Any] = ["recipe_schema"]
    for group, kinds in discover().items():
        value = recipe.get(group)
        if isinstance(value, dict):
            kind = None if None in kinds else value.get("kind")
            defaults.append({group: kinds[kind].schema_name})
    values = {key: value for key, value in recipe.items() if key != "runs"}
    text = config_text({"defaults": [*defaults, "_self_"], "runs": "runs", **literal(values)})
    return f"# The resolved recipe of a run; `titanlab repro` wrote it.\n{text}"


def composed_now(run: RunFolder, env: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The recipe that a run's sweep, or its command line, composes to now; or None, and why there is none."""
    sweep = SweepFolder(run.path.parent)
    overrides = sweep.manifest().get("overrides")
    point = next((row.get("point") for row in sweep.points() if row.get("run") == run.path.name), None)
    try:
        if isinstance(overrides, list) and isinstance(point, dict):
            recipe = _of_point([text for text in overrides if isinstance(text, str) and "=" in text], point)
        else:
            arguments, problem = _overrides(env)
            if problem:
                return None, problem
            composed = Loader(read_flags(arguments), arguments).recipe()
            if composed is None:
                return None, "its command describes several runs"
            recipe = composed
        cluster = run.section("cluster")
        accelerator, device = str(cluster.get("accelerator") or "cpu"), str(cluster.get("device") or "cpu")
        return to_mapping(resolve(recipe, world=None, accelerator=accelerator, device=device)), ""
    except ConfigError as error:
        return None, f"what made it composes to no recipe any more ({error})"


def _of_point(shared: Sequence[str], point: Mapping[str, Any]) -> Recipe:
    loader = Loader(read_flags(shared), shared)
    # It reads the options that all points share, which decides how a point's values are set.
    loader.base()
    return Composer(loader, [point]).recipe(point)


def _overrides(env: Mapping[str, Any]) -> tuple[list[str], str]:
    """The overrides of a command line, or why they are not known."""
    command = env.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else []
    if "train" not in words or "--from" in words:
        return [], "its command line is not recorded in a form that can be composed again"
    arguments = words[words.index("train") + 1 :]
    overrides = [word for word in arguments if "=" in word and not word.startswith("-")]
    if len(overrides) < len(arguments):
        return [], f"its command line has flags: {' '.join(word for word in arguments if word not in overrides)}"
    if any("[hidden]" in word for word in overrides):
        return [], "its command line had a secret, which was not recorded"
    return overrides, ""


def config_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value then, value now, of everything that differs but the place of the run."""
    old, new = _flat(then), _flat(now)
    return [
        (key, old.get(key, _ABSENT), new.get(key, _ABSENT))
        for key in {**old, **new}
        if key.partition(".")[0] not in _PLACES and old.get(key) != new.get(key)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner:
            flat |= _flat(inner, f"{name}.")
        else:
            flat[name] = "null" if inner is None else str(inner)
    return flat


def write_config(folder: Path, text: str) -> None:
    """Write the composable config into a restored folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.yaml").write_text(text, encoding="utf-8")
