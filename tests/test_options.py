"""Discovery: every schema is found by its group and kind, and leads to its code."""

from __future__ import annotations

import dataclasses
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest

from titanlab import options
from titanlab.errors import ConfigError
from titanlab.options import conf_packages, discover, option, schema_of
from titanlab.parallelism import Parallelism
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.precision.cast_schema import Bf16

PRESETS = {"training", "parallelism", "cluster", "compile"}
ALTERNATIVES = set("model precision optimizer data tracker launch schedule ac checkpoint profiler".split())


@pytest.fixture
def installed(monkeypatch):
    """`installed(group, module's name, module)`: what an installed package's entry point names."""
    points: list[EntryPoint] = []

    def install(group: str, name: str, module: ModuleType | None = None) -> None:
        points.append(EntryPoint(name="x", value=name, group=group))
        if module is not None:
            monkeypatch.setitem(sys.modules, name, module)
        forget()

    def forget() -> None:
        options._schema_modules.cache_clear()
        options.conf_packages.cache_clear()

    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [each for each in points if each.group == group]
    )
    yield install
    forget()


def a_module(name: str, group: str, kind: str) -> ModuleType:
    module = ModuleType(name)
    schema = dataclasses.make_dataclass(
        "Made", [("kind", str, dataclasses.field(default=kind))], kw_only=True, frozen=True
    )
    schema.__module__ = name
    module.Made = option(group, kind)(schema)
    return module


def test_every_group_is_there():
    found = discover()
    assert set(found) == PRESETS | ALTERNATIVES
    assert all(set(found[group]) == {None} for group in PRESETS)
    assert all(None not in found[group] for group in ALTERNATIVES)
    assert set(found["data"]) == {"files", "hf", "stdlib", "synthetic", "tokens"}
    assert found["parallelism"][None].schema is Parallelism
    assert (found["model"]["llama"].schema_name, found["training"][None].schema_name) == ("llama_schema", "schema")


def test_every_alternative_has_its_code_and_its_kind():
    for group in ALTERNATIVES:
        for kind, found in discover()[group].items():
            kinds = {field.name: field.default for field in dataclasses.fields(found.schema)}
            assert kinds["kind"] == kind
            # A schedule's config is the implementation: it needs no torch.
            assert callable(found.schema.actions if group == "schedule" else found.schema.implementation)
    assert type(Bf16().implementation()).__module__ == "titanlab.techniques.precision.cast"
    assert schema_of("model", "llama") is Llama


@pytest.mark.parametrize(
    ("group", "kind", "known"), [("model", "gpt", "llama"), ("model", None, "llama"), ("flavour", "x", "none")]
)
def test_an_option_that_nobody_offers(group, kind, known):
    with pytest.raises(ConfigError, match=f"no installed package offers this option; known: {known}"):
        schema_of(group, kind)


def test_an_installed_option_is_found(installed):
    installed("titanlab.options", "others.gpt_schema", a_module("others.gpt_schema", "model", "gpt"))
    installed("titanlab.conf", "others.conf")
    assert schema_of("model", "gpt").__module__ == "others.gpt_schema"
    assert set(discover()["model"]) == {"gpt", "llama", "mixtral", "qwen3", "qwen3_moe"}
    assert conf_packages() == ("others.conf",)


def test_a_schema_that_was_only_imported_counts_once(installed):
    module = ModuleType("others.gpt_schema")
    module.Llama = Llama
    installed("titanlab.options", "others.gpt_schema", module)
    assert set(discover()["model"]) == {"llama", "mixtral", "qwen3", "qwen3_moe"}


def test_two_packages_with_the_same_option(installed):
    installed("titanlab.options", "others.llama_schema", a_module("others.llama_schema", "model", "llama"))
    with pytest.raises(
        ConfigError, match="model=llama: is offered twice: by titanlab.techniques.model.llama_schema and by others"
    ):
        discover()


def test_a_package_that_cannot_be_imported_is_named(installed):
    installed("titanlab.options", "nowhere.gpt_schema")
    with pytest.raises(ConfigError, match=r"titanlab.options=nowhere.gpt_schema: cannot be imported \(ModuleNotFound"):
        discover()


@pytest.mark.parametrize(
    ("kind", "frozen", "said"),
    [
        ("another", True, "needs the field `kind: str = 'mine'`"),
        ("mine", False, r"^Loose: a config is a @dataclass\(frozen=True, kw_only=True\)$"),
    ],
)
def test_a_schema_names_its_kind_and_is_frozen(kind, frozen, said):
    field = ("kind", str, dataclasses.field(default=kind))
    schema = dataclasses.make_dataclass("Loose", [field], kw_only=True, frozen=frozen)
    with pytest.raises(TypeError, match=said):
        option("optimizer", "mine")(schema)
