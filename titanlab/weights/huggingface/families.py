"""Which of our models read and write which of theirs: a model brings a module `…_hf` beside its schema."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from titanlab.errors import ConfigError
from titanlab.options import discover


def family_of(model: Any) -> ModuleType | None:
    """The module that knows a model of ours as Hugging Face's: `llama_schema` → `llama_hf`; None: there is none."""
    return _beside(type(model))


def family_for(config: Mapping[str, Any]) -> ModuleType:
    """The module that reads the model of a config.json.

    Raises:
        ConfigError: none does.
    """
    given = config.get("architectures") or []
    wanted = given[0] if isinstance(given, list) and len(given) == 1 else given
    known: dict[str, ModuleType] = {}
    for found in discover()["model"].values():
        module = _beside(found.schema)
        if module is not None:
            known.update(dict.fromkeys(module.ARCHITECTURES, module))
    if not isinstance(wanted, str) or wanted not in known:
        rule = "is no architecture that is computed here"
        raise ConfigError("config.json:architectures", wanted or None, rule, f"supported: {', '.join(sorted(known))}")
    return known[wanted]


def _beside(schema: type) -> ModuleType | None:
    name = schema.__module__.removesuffix("_schema") + "_hf"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
