"""Discovery of options: every schema that titanlab or an installed package offers.

A technique is a code file, a torch-free schema file beside it and a YAML:

    titanlab/precision/bf16.py            what it does
    titanlab/precision/bf16_schema.py     @option("precision", "bf16") class Bf16: kind: str = "bf16"
    conf/precision/bf16.yaml              defaults: [bf16_schema, _self_]

A group of presets has one schema and no kinds: `@option("parallelism")` in
`titanlab/parallelism/schema.py`. Other packages join by entry points: group `titanlab.options`
names their schema modules, group `titanlab.conf` a package that holds their YAML folders.
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
from typing import Any, TypeVar

from titanlab.errors import ConfigError
from titanlab.ranges import ranged

T = TypeVar("T", bound=type)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One schema of one group; `kind` is None where the group has a single schema."""

    group: str
    kind: str | None
    schema: type

    @property
    def schema_name(self) -> str:
        """The name by which a YAML's defaults list refers to the schema."""
        return f"{self.kind}_schema" if self.kind else "schema"


def option(group: str, kind: str | None = None) -> Callable[[T], T]:
    """Mark a dataclass as the schema of a config group, or of one kind in it; its numbers get ranges (`ranged`)."""

    def mark(schema: T) -> T:
        if kind is not None:
            fields = {f.name: f.default for f in dataclasses.fields(schema)}
            if fields.get("kind") != kind:
                raise TypeError(f"{schema.__qualname__}: needs the field `kind: str = {kind!r}`")
        schema.__titanlab_option__ = Option(group=group, kind=kind, schema=schema)  # type: ignore[attr-defined]
        return ranged(f"{group}.")(schema)

    return mark


def discover() -> dict[str, dict[str | None, Option]]:
    """All options by group and kind. Imports schema modules only, none of which imports torch."""
    found: dict[str, dict[str | None, Option]] = {}
    for module in _schema_modules():
        for value in vars(module).values():
            marked = getattr(value, "__titanlab_option__", None)
            # A schema that another module imported, or inherited from, is not its own.
            if not isinstance(marked, Option) or value.__module__ != module.__name__ or marked.schema is not value:
                continue
            kinds = found.setdefault(marked.group, {})
            if marked.kind in kinds:
                others = kinds[marked.kind].schema.__module__
                rule = f"is offered twice: by {others} and by {module.__name__}"
                raise ConfigError(marked.group, marked.kind, rule, "uninstall one of the two packages")
            kinds[marked.kind] = marked
    return found


def schema_of(group: str, kind: str | None) -> type:
    """The dataclass of a group's kind.

    Raises:
        ConfigError: no installed package offers it.
    """
    kinds = discover().get(group, {})
    if kind not in kinds:
        known = ", ".join(sorted(str(k) for k in kinds)) or "none"
        raise ConfigError(f"{group}.kind", kind, "no installed package offers this option", f"known: {known}")
    return kinds[kind].schema


def implementation(config: Any) -> ModuleType:
    """The module that does what `config` describes: `bf16_schema` → `bf16`. May import torch."""
    return importlib.import_module(type(config).__module__.removesuffix("_schema"))


def account_of(config: Any) -> ModuleType:
    """The torch-free module that declares facts about `config`: `llama_schema` → `llama_account`."""
    return importlib.import_module(type(config).__module__.removesuffix("_schema") + "_account")


def conf_packages() -> list[str]:
    """Packages of others whose folders hold YAMLs of config groups."""
    return [entry.value for entry in importlib.metadata.entry_points(group="titanlab.conf")]


@functools.cache
def _schema_modules() -> tuple[ModuleType, ...]:
    return (*map(importlib.import_module, _own_schema_modules()), *_others_schema_modules())


def _own_schema_modules() -> Iterator[str]:
    package = importlib.import_module("titanlab")
    for info in pkgutil.iter_modules(package.__path__, "titanlab."):
        if info.ispkg:
            folder = importlib.import_module(info.name)
            inner = [i.name for i in pkgutil.iter_modules(folder.__path__, info.name + ".")]
        else:
            inner = [info.name]
        yield from (name for name in inner if name.rpartition(".")[2].endswith("schema"))


def _others_schema_modules() -> Iterator[ModuleType]:
    for entry in importlib.metadata.entry_points(group="titanlab.options"):
        try:
            yield importlib.import_module(entry.value)
        # Whatever it is, it is not ours, and a person is told where it comes from.
        except Exception as error:
            package = entry.dist.name if entry.dist is not None else "a package"
            rule = f"cannot be imported ({type(error).__name__}: {error})"
            raise ConfigError("titanlab.options", entry.value, rule, f"mend or uninstall {package}") from error
