"""Discovers options: the configs that titanlab and installed packages offer.

A technique is a torch-free config, an implementation that the config names, and a YAML:

    titanlab/techniques/precision/cast_schema.py     @option("precision", "fp16") class Fp16: kind: str = "fp16"
    titanlab/techniques/precision/cast.py            what `Fp16.implementation` imports
    conf/precision/fp16.yaml              defaults: [fp16_schema, _self_]

A group of presets has one config and no kinds: `@option("parallelism")` in `titanlab/parallelism/schema.py`.
titanlab's own configs are in modules whose names end in `schema`. Other packages declare their modules with entry
points of the group `titanlab.options`, and the package that has their YAMLs with one of the group `titanlab.conf`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import keyword
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from titanlab.errors import ConfigError
from titanlab.ranges import ranged

T = TypeVar("T", bound=type)
# Metadata of config fields. If a field has none of these, the planner's estimate takes the field into account.
# NOT_PRICED: nobody has measured how the field changes the time of a step, and the planner says so. With a tuple
# of values instead of True, this holds only if the field has one of these values.
NOT_PRICED = {"not_priced": True}
# OUTSIDE_STEP: the field, or its whole group, does not change a step in which nothing is validated, saved or profiled.
OUTSIDE_STEP = {"in_step": False}
# Joins the names of options to the name of their combination, `wandb+tensorboard`.
PLUS = "+"
# OmegaConf's sign for a missing value, written here because importing OmegaConf takes time.
_MISSING = "???"


@dataclass(frozen=True, kw_only=True)
class Option:
    """One schema of one group; `kind` is None if the group has a single schema."""

    group: str
    kind: str | None
    schema: type

    @property
    def schema_name(self) -> str:
        """The name by which a YAML's defaults list refers to the schema."""
        return f"{self.kind}_schema" if self.kind else "schema"


def option(group: str, kind: str | None = None) -> Callable[[T], T]:
    """Mark a frozen dataclass as the schema of a config group, or of one kind in it; `ranged` checks its numbers."""

    def mark(schema: T) -> T:
        if not (dataclasses.is_dataclass(schema) and schema.__dataclass_params__.frozen):  # type: ignore[attr-defined]
            raise TypeError(f"{schema.__qualname__}: a config is a @dataclass(frozen=True, kw_only=True)")
        if kind is not None:
            defaults = {field.name: field.default for field in dataclasses.fields(schema)}
            if defaults.get("kind") != kind:
                raise TypeError(f"{schema.__qualname__}: needs the field `kind: str = {kind!r}`")
        schema.__titanlab_option__ = Option(group=group, kind=kind, schema=schema)  # type: ignore[attr-defined]
        return ranged(f"{group}.")(schema)

    return mark


def combines(group: str) -> Callable[[T], T]:
    """Mark a class as the base of a group's combinations: several options of this group can be chosen at once."""

    def mark(base: T) -> T:
        base.__titanlab_combines__ = group  # type: ignore[attr-defined]
        return base

    return mark


def combining_groups() -> frozenset[str]:
    return frozenset(_combining_bases())


@functools.cache
def combination(group: str, name: str) -> Option | None:
    """The dataclass of several options, with `kind` and a field for each option; None: `name` is no combination.

    Raises:
        ConfigError: an option is named twice, or its name is not a word.
    """
    base = _combining_bases().get(group)
    parts = name.split(PLUS)
    if base is None or len(parts) < 2:
        return None
    shown = f"[{','.join(parts)}]"
    for part in parts:
        if parts.count(part) > 1:
            raise ConfigError(group, shown, f"names {part} twice", "name each option once")
        if not part.isidentifier() or keyword.iskeyword(part) or part == "kind":
            raise ConfigError(
                group, shown, f"{part!r} is not a word", "rename that option's file: letters, digits and _"
            )
    fields: list[Any] = [("kind", str, dataclasses.field(default=name)), *((part, Any, _MISSING) for part in parts)]
    schema = dataclasses.make_dataclass(
        base.__name__, fields, bases=(base,), kw_only=True, frozen=True, namespace={"__module__": base.__module__}
    )
    return Option(group=group, kind=name, schema=schema)


def discover() -> dict[str, dict[str | None, Option]]:
    """All options by group and kind. Only schema modules are imported, and these do not import torch."""
    return _options_of(_schema_modules())


@functools.cache
def _options_of(modules: tuple[ModuleType, ...]) -> dict[str, dict[str | None, Option]]:
    groups: dict[str, dict[str | None, Option]] = {}
    for module in modules:
        for value in vars(module).values():
            marked = getattr(value, "__titanlab_option__", None)
            # Skip schemas that the module imported, and undecorated subclasses, which inherit the mark.
            if not isinstance(marked, Option) or value.__module__ != module.__name__ or marked.schema is not value:
                continue
            kinds = groups.setdefault(marked.group, {})
            if marked.kind in kinds:
                other = kinds[marked.kind].schema.__module__
                rule = f"is offered twice: by {other} and by {module.__name__}"
                raise ConfigError(marked.group, marked.kind, rule, "uninstall one of the two packages")
            kinds[marked.kind] = marked
    return groups


def schema_of(group: str, kind: str | None) -> type:
    """The dataclass of a group's kind.

    Raises:
        ConfigError: no installed package offers this kind.
    """
    kinds = discover().get(group, {})
    several = combination(group, kind) if kind is not None and kind not in kinds else None
    if several is not None:
        return several.schema
    if kind not in kinds:
        known = ", ".join(sorted(map(str, kinds))) or "none"
        raise ConfigError(f"{group}.kind", kind, "no installed package offers this option", f"known: {known}")
    return kinds[kind].schema


def contract_of(group: str) -> str:
    """The name of the module that defines the base classes of a group's configs."""
    is_technique = (Path(__file__).parent / "techniques" / group).is_dir()
    return f"titanlab.{'techniques.' if is_technique else ''}{group}.contract"


@functools.cache
def conf_packages() -> tuple[str, ...]:
    """Names of installed packages that contain YAMLs of config groups."""
    return tuple(entry.value for entry in importlib.metadata.entry_points(group="titanlab.conf"))


@functools.cache
def _schema_modules() -> tuple[ModuleType, ...]:
    # Search by path: importing the parent packages would also import their contents, such as figures.
    folders = [(path, "titanlab.") for path in importlib.import_module("titanlab").__path__]
    names = []
    for path, prefix in folders:
        for info in pkgutil.iter_modules([path], prefix):
            if info.ispkg:
                folders.append((f"{path}/{info.name.removeprefix(prefix)}", f"{info.name}."))
            elif info.name.endswith("schema"):
                names.append(info.name)
    modules = list(map(importlib.import_module, dict.fromkeys(names)))
    for entry in importlib.metadata.entry_points(group="titanlab.options"):
        try:
            modules.append(importlib.import_module(entry.value))
        # Importing another package may raise anything; the message names the package.
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else "a package"
            rule = f"cannot be imported ({type(error).__name__}: {error})"
            raise ConfigError("titanlab.options", entry.value, rule, f"mend or uninstall {package}") from error
    return tuple(modules)


@functools.cache
def _combining_bases() -> dict[str, type]:
    marked = [value for module in _schema_modules() for value in vars(module).values() if isinstance(value, type)]
    bases = [value for value in marked if "__titanlab_combines__" in vars(value)]
    return {base.__titanlab_combines__: base for base in bases}  # type: ignore[attr-defined]
