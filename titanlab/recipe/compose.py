"""Composes recipes from overrides with Hydra's public API, without Hydra's jobs, folders and logs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra import initialize, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

import titanlab
from titanlab.errors import ConfigError
from titanlab.options import PLUS, combination, conf_packages, contract_of, discover
from titanlab.recipe import hydra_internal, strangers
from titanlab.recipe.flags import Flags
from titanlab.recipe.hydra_errors import composition_errors
from titanlab.recipe.keys import SweepSpace, as_typed, choice_of, unknown_key, with_combination
from titanlab.recipe.recipe import Recipe, schema_node

# A value that needs no quotes: Hydra's grammar accepts only ASCII letters without quotes.
_PLAIN = re.compile(r"[A-Za-z_][\w./-]*", re.ASCII)
_CONSTANTS = ("true", "false", "null", "nan", "inf")


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A config that Hydra has composed.

    Attributes:
        config: the recipe's config.
        whole: the recipe's config and Hydra's own config, under `hydra`.
        choices: group → name of the chosen option.
        asks_hydra: whether a value contains `${hydra:…}`.
    """

    config: DictConfig
    whole: DictConfig
    choices: Mapping[str, Any]
    asks_hydra: bool


class Loader:
    """Composes recipes with the flags of one command line, and the overrides that all points of its sweep share.

    Methods raise Hydra's errors as ConfigErrors.
    """

    def __init__(self, flags: Flags, overrides: Sequence[str]) -> None:
        register()
        self.config_name = flags.values["--config-name"] or "config"
        self.overrides = tuple(overrides)
        # Overrides that choose the options of groups which neither the other overrides nor the points choose.
        self.defaults: tuple[str, ...] = ()
        self._flags = flags
        self._hydra = _hydra_loader(flags)
        self._known_choices: Mapping[str, Any] = {}
        self._shared: Composed | None = None
        self._groups: dict[str, bool] = {}
        self._fills_own_group = functools.cache(self._has_own_keys_only)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        with composition_errors(overrides, self._flags.values):
            return OverridesParser.create(config_loader=self._hydra).parse_overrides(list(map(as_typed, overrides)))

    def recipe(self) -> Recipe | None:
        """The recipe that the overrides describe; None: the overrides or a config file ask for several recipes."""
        composed = self.compose(())
        if composed.whole.hydra.mode == RunMode.MULTIRUN:
            return None
        with composition_errors(self.overrides, self._flags.values), self.answers_hydra(composed):
            return to_recipe(composed.config, composed.choices, self.config_name)

    def text(self, kind: str, *, package: str | None, resolve: bool) -> str | None:
        """The composed config as YAML, as Hydra's `--cfg` prints it; None: the config has no such package.

        Args:
            kind: `job`, `hydra` or `all`.
        """
        composed = self.compose(())
        config = composed.config if kind == "job" else composed.whole
        if kind == "hydra":
            config = OmegaConf.create({"hydra": config.hydra})
            with read_write(config.hydra), open_dict(config.hydra):
                del config.hydra["help"], config.hydra["hydra_help"]
        with composition_errors(self.overrides, self._flags.values), self.answers_hydra(composed):
            if package in (None, "_global_"):
                return OmegaConf.to_yaml(config, resolve=resolve)
            node = OmegaConf.select(config, str(package))
            if not OmegaConf.is_config(node):
                return None if node is None else f"{node}\n"
            return f"# @package {package}\n{OmegaConf.to_yaml(node, resolve=resolve)}"

    @contextlib.contextmanager
    def answers_hydra(self, composed: Composed) -> Iterator[None]:
        """Make `${hydra:…}` refer to this composition within the block."""
        if not composed.asks_hydra:
            yield
            return
        with read_write(composed.whole.hydra.runtime), open_dict(composed.whole.hydra.runtime):
            composed.whole.hydra.runtime.output_dir = os.path.abspath(composed.whole.hydra.run.dir)
        global_config = HydraConfig.instance()
        before = global_config.cfg
        global_config.set_config(composed.whole)
        try:
            yield
        finally:
            global_config.cfg = before

    def base(self) -> DictConfig:
        """The config that all points of a sweep share; its part `hydra` describes the sweep.

        Overrides of single values are left out, because their keys may exist only in a swept option. If all overrides
        have been composed before, all keys exist, and that composition is used.
        """
        composed = self._shared
        if composed is None:
            pairs = zip(self.overrides, self.parse(self.overrides), strict=True)
            composed = self._compose(
                [
                    text
                    for text, parsed in pairs
                    if parsed.is_hydra_override() or parsed.package is not None or self.is_group(parsed.key_or_group)
                ]
            )
        self._known_choices = composed.choices
        return composed.whole

    def chosen(self, points: Iterable[Mapping[str, Any]]) -> set[str]:
        """The groups whose option an override, a point or a file other than titanlab's config.yaml chooses."""
        choices = list(map(self.choices_of, points))
        found = {group for each in choices for group, _ in each}
        # Some options of a point, such as a recipe, choose options of further groups.
        for wide in {tuple(choice for choice in each if not self.is_own(*choice)) for each in choices}:
            overrides = [*self.overrides, *self.overrides_of(dict(wide))]
            # Ignore errors here: the composition of the points reports them.
            with contextlib.suppress(ConfigError), composition_errors(overrides, self._flags.values):
                texts = [as_typed(with_combination(text)) for text in overrides]
                listed = self._hydra.compute_defaults_list(self.config_name, texts, run_mode=RunMode.RUN)
                own = self._flags.values["--config-path"] is None
                usual = {str(each.config_path).partition("/")[0] for each in listed.defaults if each.parent == "config"}
                found |= {*listed.overrides.override_choices, *(discover().keys() - (usual if own else set()))}
        return found

    def compose(self, overrides: Sequence[str]) -> Composed:
        """Compose the shared overrides, followed by `overrides`; the result without `overrides` is kept and reused."""
        if overrides:
            return self._compose([*self.defaults, *self.overrides, *overrides])
        if self._shared is None:
            self._shared = self._compose([*self.defaults, *self.overrides])
        return self._shared

    def _compose(self, overrides: Sequence[str]) -> Composed:
        with composition_errors(overrides, self._flags.values):
            texts = [as_typed(with_combination(override)) for override in overrides]
            whole = self._hydra.load_configuration(self.config_name, texts, run_mode=RunMode.RUN)

            def used() -> list[str]:
                listed = self._hydra.compute_defaults_list(self.config_name, texts, run_mode=RunMode.RUN)
                return [str(default.config_path) for default in listed.defaults]

            hydra_internal.check_hidden(whole.hydra.runtime.config_sources, used)
        choices = {str(group): option for group, option in whole.hydra.runtime.choices.items()}
        config = whole.copy()
        with read_write(config), open_dict(config):
            del config["hydra"]
        asks_hydra = "${hydra:" in str(OmegaConf.to_container(config, resolve=False))
        return Composed(config=config, whole=whole, choices=choices, asks_hydra=asks_hydra)

    def is_group(self, key: str) -> bool:
        if key not in self._groups:
            is_group = "." not in key and any(source.is_group(key) for source in self._hydra.get_sources())
            self._groups[key] = is_group or "@" in key or "/" in key
        return self._groups[key]

    def options(self, group: str) -> list[str]:
        return list(self._hydra.get_group_options(group))

    def choices_of(self, point: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        """The groups of which a point chooses an option, each with the option's name."""
        return tuple((key, choice_of(key, value)) for key, value in point.items() if self.is_group(key))

    def values_of(self, point: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [(key, value) for key, value in point.items() if not self.is_group(key)]

    def overrides_of(self, point: Mapping[str, Any]) -> list[str]:
        # To choose an option of a group that is in no defaults list, such as `recipe`, Hydra needs `+`.
        added = [self.is_group(key) and key not in self._known_choices for key in point]
        return ["+" * adds + override_text(*pair) for adds, pair in zip(added, point.items(), strict=True)]

    def is_own(self, group: str, option: str) -> bool:
        """Whether an option sets only keys of its own group."""
        return "/" not in group and "@" not in group and self._fills_own_group(f"{group}/{option}")

    def _has_own_keys_only(self, path: str) -> bool:
        group = path.partition("/")[0]
        source = next((source for source in self._hydra.get_sources() if source.is_config(path)), None)
        if source is None:
            return False
        result = source.load_config(path)
        if result.header.get("package") not in (None, group, "_group_"):
            return False
        content: Any = OmegaConf.to_container(result.config, resolve=False)
        for entry in content.get("defaults") or [] if isinstance(content, dict) else []:
            if not isinstance(entry, str) or "@" in entry:
                return False
            if entry == "_self_":
                continue
            inner = entry.lstrip("/") if entry.startswith("/") else f"{group}/{entry}"
            if "${" in inner or not inner.startswith(f"{group}/") or not self._fills_own_group(inner):
                return False
        return True


def _hydra_loader(flags: Flags) -> ConfigLoader:
    folder = flags.values["--config-path"] or str(conf_folder())
    added = flags.values["--config-dir"]
    if added is not None and not Path(added).is_dir():
        raise ConfigError(
            "--config-dir", added, "is not a folder", "give a folder that has model, data and other groups of options"
        )
    is_address = "://" in folder
    start: Any = initialize if is_address else initialize_config_dir
    place = folder if is_address else str(Path(folder).absolute())
    GlobalHydra.instance().clear()
    PackagesOnSearchPath.folder = added
    try:
        with start(place, job_name="titanlab", **hydra_internal.VERSION_BASE):
            return GlobalHydra.instance().config_loader()
    finally:
        PackagesOnSearchPath.folder = None


def override_text(key: str, value: Any) -> str:
    """`key=value` in Hydra's grammar of overrides."""

    def text(value: Any) -> str:
        if value is None:
            return "null"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int | float):
            return str(value)
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{text(key)}:{text(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return "[" + ",".join(map(text, value)) + "]"
        if _PLAIN.fullmatch(str(value)) and str(value).lower() not in _CONSTANTS:
            return str(value)
        return str(QuotedString(text=str(value), quote=Quote.single).with_quotes())

    return f"{key}={text(value)}"


def register() -> None:
    """Register schemas and other packages' folders with Hydra, and prevent that Hydra runs code that a YAML names."""
    hydra_internal.replace_sources()
    strangers.replace_resolvers()
    store = ConfigStore.instance()
    if store.get_type("recipe_schema.yaml") is not ObjectType.CONFIG:
        store.store(name="recipe_schema", node=schema_node(Recipe))
        store.store(group="hydra/sweeper", name="space", node=SweepSpace)
    Plugins.instance().register(PackagesOnSearchPath)


def conf_folder() -> Path:
    """The folder of the config groups: beside the package in a clone, inside the package in an installed wheel."""
    package = Path(titanlab.__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def to_recipe(config: DictConfig, choices: Mapping[str, Any], name: str | None) -> Recipe:
    """The recipe of a composed config, as dataclasses: no later code uses a DictConfig.

    Args:
        choices: the composed option of each group.
        name: name of the composed config, for errors.

    Raises:
        ConfigError: a value breaks its schema's rule, an added key belongs to no schema, or a group has no schema.
    """
    if OmegaConf.get_type(config) is not Recipe:
        raise ConfigError("--config-name", name, "composes no recipe", "begin its defaults with recipe_schema")
    groups = discover()
    for group in groups:
        if group in config and not OmegaConf.is_missing(config, group):
            _check_schema(OmegaConf.get_type(config, group), group, choices.get(group))
    _check_keys(config, "")
    recipe: Recipe = OmegaConf.to_object(config)  # type: ignore[assignment]
    for group in groups:
        _check_kind(getattr(recipe, group, None), group)
    return recipe


def to_group(node: DictConfig, group: str) -> Any:
    """Convert the node of one group to the dataclass of its schema, with the errors of `to_recipe`."""
    _check_schema(OmegaConf.get_type(node), group, None)
    _check_keys(node, f"{group}.")
    config = OmegaConf.to_object(node)
    _check_kind(config, group)
    return config


def _check_schema(schema: type | None, group: str, choice: str | None) -> None:
    """Check that a group's value has a schema of this group, with all methods that the group's contract asks for."""
    kinds, kind = discover()[group], getattr(schema, "kind", None)
    # A schema may combine several options.
    known = combination(group, kind) if isinstance(kind, str) and PLUS in kind else kinds.get(kind)
    if known is None or known.schema is not schema:
        names = " or ".join(f"[{option.schema_name}, _self_]" for option in kinds.values())
        cure = f"begin its YAML with defaults: {names}"
        raise ConfigError(group, choice, "has no schema of this group", cure)
    contract, bases = contract_of(group), () if schema is None else schema.__mro__
    if None not in kinds and contract not in [base.__module__ for base in bases]:
        # The config comes from a package that was made for another version of titanlab.
        rule = f"has a config ({schema.__module__}) that inherits from no class of {contract}"
        raise ConfigError(group, choice, rule, "use a version of its package for this titanlab; docs/extending.md")
    if lacking := sorted(getattr(schema, "__abstractmethods__", ())):
        rule = f"has a config ({schema.__module__}) without {' and '.join(lacking)}, which {contract} asks for"
        raise ConfigError(group, choice, rule, "define what it lacks; docs/extending.md")


def _check_kind(config: Any, group: str) -> None:
    """Check that a group's `kind` is that of its schema: the key `kind` only informs readers, and selects nothing."""
    expected = getattr(type(config), "kind", None)
    if expected is not None and PLUS in expected:
        for field in dataclasses.fields(config)[1:]:
            part = getattr(config, field.name)
            _check_schema(type(part), group, field.name)
            _check_kind(part, group)
    kind = getattr(config, "kind", expected)
    if kind != expected:
        rule = f"must name the schema of the group, which is {expected}"
        raise ConfigError(f"{group}.kind", kind, rule, f"leave it out, and choose with {group}=…")


def _check_keys(node: DictConfig, prefix: str) -> None:
    """Check that every key belongs to a schema, because `+key=value` can add keys that nothing reads."""
    fields = {field.name for field in dataclasses.fields(OmegaConf.get_type(node))}  # type: ignore[arg-type]
    for name in map(str, node):
        if name not in fields:
            raise unknown_key(prefix + name, node[name])
        schema = None if OmegaConf.is_missing(node, name) else OmegaConf.get_type(node, name)
        if dataclasses.is_dataclass(schema):
            _check_keys(node[name], f"{prefix}{name}.")


class PackagesOnSearchPath(SearchPathPlugin):
    """Adds the folders with which other packages extend titanlab's groups, and the folder of `--config-dir`."""

    # The folder of `--config-dir`. A class attribute, because Hydra makes the plugin itself, without arguments.
    folder: ClassVar[str | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for package in conf_packages():
            search_path.append(provider=package, path=f"pkg://{package}")
        if self.folder is not None:
            search_path.append(provider="command-line", path=f"file://{Path(self.folder).absolute()}")
