"""Discovers options: the configs that titanlab and installed packages offer.

A technique is a torch-free config, an implementation that the config names, and a YAML:

    titanlab/precision/fp16_schema.py     @option("precision", "fp16") class Fp16: kind: str = "fp16"
    titanlab/precision/fp16.py            what `Fp16.implementation` imports
    conf/precision/fp16.yaml              defaults: [fp16_schema, _self_]

A group of presets has one config and no kinds: `@option("parallelism")` in `titanlab/parallelism/schema.py`.
titanlab's own configs are in modules whose names end in `schema`. Other packages declare their modules with entry
points of the group `titanlab.options`, and the package with their YAMLs with an entry point of `titanlab.conf`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from titanlab.errors import ConfigError
from titanlab.ranges import ranged

T = TypeVar("T", bound=type)


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
    """Mark a dataclass as the schema of a config group, or of one kind in it; its numbers are checked (`ranged`)."""

    def mark(schema: T) -> T:
        if kind is not None:
            defaults = {field.name: field.default for field in dataclasses.fields(schema)}
            if defaults.get("kind") != kind:
                raise TypeError(f"{schema.__qualname__}: needs the field `kind: str = {kind!r}`")
        schema.__titanlab_option__ = Option(group=group, kind=kind, schema=schema)  # type: ignore[attr-defined]
        return ranged(f"{group}.")(schema)

    return mark


def discover() -> dict[str, dict[str | None, Option]]:
    """All options by group and kind; it imports only schema modules, which do not import torch."""
    groups: dict[str, dict[str | None, Option]] = {}
    for module in _schema_modules():
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
        ConfigError: no installed package offers it.
    """
    kinds = discover().get(group, {})
    if kind not in kinds:
        known = ", ".join(sorted(map(str, kinds))) or "none"
        raise ConfigError(f"{group}.kind", kind, "no installed package offers this option", f"known: {known}")
    return kinds[kind].schema


def conf_packages() -> list[str]:
    """Installed packages whose folders have YAMLs of config groups."""
    return [entry.value for entry in importlib.metadata.entry_points(group="titanlab.conf")]


@functools.cache
def _schema_modules() -> tuple[ModuleType, ...]:
    return (*map(importlib.import_module, _own_schema_modules()), *_others_schema_modules())


def _own_schema_modules() -> Iterator[str]:
    package = importlib.import_module("titanlab")
    for info in pkgutil.iter_modules(package.__path__, "titanlab."):
        if info.ispkg:
            folder = importlib.import_module(info.name)
            modules = [module.name for module in pkgutil.iter_modules(folder.__path__, info.name + ".")]
        else:
            modules = [info.name]
        yield from (name for name in modules if name.rpartition(".")[2].endswith("schema"))


def _others_schema_modules() -> Iterator[ModuleType]:
    for entry in importlib.metadata.entry_points(group="titanlab.options"):
        try:
            yield importlib.import_module(entry.value)
        # Importing another package may raise anything; the message names the package.
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else "a package"
            rule = f"cannot be imported ({type(error).__name__}: {error})"
            raise ConfigError("titanlab.options", entry.value, rule, f"mend or uninstall {package}") from error
