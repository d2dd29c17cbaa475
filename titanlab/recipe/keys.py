"""The keys that a recipe can have and their types, and functions that read YAMLs and overrides by these types.

If a key has the type text, its value is the text as typed; only `null` is null. YAML would read `5e2` as 500.0,
`12:00:00` as 43200, `off` as false and `017` as 15; Hydra reads `5e2` as 500.0 and `1_000` as 1000. `load` keeps such
texts in files, and `as_typed` keeps them on the command line.

A list of options of one group, `tracker=[wandb,tensorboard]`, becomes one option that combines them, with each option
under its own key: `tracker/wandb+tensorboard`. Hydra itself would merge the options of a list into one config.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TextIO

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

from titanlab.errors import ConfigError
from titanlab.options import PLUS, Option, combining_groups, discover
from titanlab.recipe import torchtitan
from titanlab.recipe.recipe import Recipe, literal


@dataclass(kw_only=True)
class SweepSpace:
    """The settings `hydra.sweeper` of a sweep, its space of recipes; `titanlab.sweep.space` parses and checks them.

    Attributes:
        space: a mapping with one of `product`, `zip`, `list` and `stack`; null: only what the command line sweeps.
        where: conditions that a point must meet, such as `parallelism.tensor <= 8`; null: none.
        repeats: runs of every point, numbered by the recipe's `repeat`.
        control: values of a recipe that runs at the beginning, between the repeats and at the end; `{}`: only what all
            points share. null: none.
    """

    space: Any = None
    where: Any = None
    repeats: Any = 1
    control: Any = None


_SPACE = tuple(f"hydra.sweeper.{field.name}" for field in dataclasses.fields(SweepSpace))
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a recipe.

    Attributes:
        name: name with the group, such as `optimizer.schedule.floor`.
        declared: type of the key's field.
        default: default as text for an override; None if the schema has no default.
        option: the option whose schema has the key; None for the recipe's own fields.
    """

    name: str
    declared: Any
    default: str | None
    option: Option | None

    @property
    def accepted_values(self) -> str:
        return _words(self.declared)


def known_keys() -> list[Key]:
    """The recipe's own keys, then the keys of all options; a name occurs once for each option that has such a key."""
    keys = list(_keys(Recipe, "", None))
    for group, kinds in discover().items():
        for option in kinds.values():
            keys += _keys(option.schema, f"{group}.", option)
    return keys


def _in_combination(name: str) -> tuple[str, str, str] | None:
    """The three parts of a combination's key `tracker.wandb.mode`: group, option, key; None: `name` is no such key."""
    group, _, rest = name.partition(".")
    kind, _, inner = rest.partition(".")
    is_part = inner and group in combining_groups() and kind in discover().get(group, {})
    return (group, kind, inner) if is_part else None


def find_key(name: str, schema: type | None = None, *, kind: str | None = None) -> Key | None:
    """The key with this name; with `kind`, of an option of this kind. A key of `schema` is preferred. None: no key."""
    if kind is None and (part := _in_combination(name)) is not None:
        group, kind, inner = part
        name = f"{group}.{inner}"
    keys = [key for key in known_keys() if key.name == name]
    if kind is not None:
        keys = [key for key in keys if key.option is not None and key.option.kind == kind]
    of_schema = [key for key in keys if key.option is not None and key.option.schema is schema]
    return next(iter(of_schema or keys), None)


def advice(name: str) -> str:
    if theirs := torchtitan.current_name(name):
        if theirs in torchtitan.KEYS:
            return f"torchtitan's {name} is {torchtitan.KEYS[theirs].ours} here"
        return f"torchtitan's {name} has no counterpart: {torchtitan.reason_without(theirs)}"
    keys = known_keys()
    if (part := _in_combination(name)) is not None:
        group, kind, inner = part
        own = [key.name.partition(".")[2] for key in keys if key.option is not None and key.option.kind == kind]
        near = difflib.get_close_matches(inner, own, n=1)
        return f"did you mean {group}.{kind}.{near[0]}?" if near else f"keys of {group}.{kind}: {', '.join(own)}"
    for key in keys:
        if key.name == name and key.option is not None and key.option.kind is not None:
            return f"it belongs to another {key.option.group}: try {key.option.group}={key.option.kind}"
    group, _, end = name.rpartition(".")
    if any(key.name == group and typing.get_origin(key.declared) is dict for key in keys):
        return f"new keys of {group} are added with a plus: +{name}=…"
    # `group=kind` sets a kind, so no `group.kind` is suggested.
    names = [name for name in dict.fromkeys(key.name for key in keys) if not name.endswith(".kind")]
    siblings = [known.rpartition(".")[2] for known in names if group and known.rpartition(".")[0] == group]
    near = [known for known in names if known.endswith(f".{name}")]  # Users may remember only the end of a key.
    if len(near) > 1:
        return f"did you mean {' or '.join(sorted(near))}?"
    # Keys of the same group all begin with its name: leave them out here, and compare their ends below.
    others = [known for known in names if not siblings or not f"{known}.".startswith(f"{group}.")]
    near += difflib.get_close_matches(name, others, n=1, cutoff=0.85)
    near += [f"{group}.{sibling}" for sibling in difflib.get_close_matches(end, siblings, n=1)]
    if not near and not siblings:
        near = [known for known in difflib.get_close_matches(name, names, n=1) if not name.startswith(f"{known}.")]
    if near:
        return f"did you mean {near[0]}?"
    return f"keys of {group}: {', '.join(siblings)}" if siblings else "see `titanlab train --cfg job` for all keys"


def unknown_key(key: str, value: object) -> ConfigError:
    if key in _SPACE:
        return ConfigError(key, value, "is a key of a sweep's file", f"add hydra/sweeper=space to have {key}")
    if key.startswith("hydra.launcher."):
        cure = "the group launch has these settings: launch=slurm launch.minutes=… (docs/clusters.md)"
        return ConfigError(key, value, "is not a key here: titanlab uses no launcher of Hydra", cure)
    if key.partition(".")[0].partition("/")[0] == "hydra":
        return ConfigError(key, value, "is not a key of Hydra", "see `titanlab train --cfg hydra`")
    if (part := _in_combination(key)) is not None and find_key(key) is not None:
        group, kind, inner = part
        rule = f"is a key only if {group} is a list of options that contains {kind}"
        return ConfigError(key, value, rule, f"with {group}={kind} alone, write {group}.{inner}={value}")
    return ConfigError(key, value, "is not a key of this recipe", advice(key))


def _keys(schema: type, prefix: str, option: Option | None) -> Iterator[Key]:
    declared = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        name, inner, default = prefix + field.name, declared[field.name], field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        text = None
        if default is None or isinstance(default, bool):
            text = "null" if default is None else str(default).lower()
        elif isinstance(default, tuple):
            text = f"[{','.join(map(str, default))}]"
        # Suggest neither an empty text nor `???` (OmegaConf's sign for a missing value).
        elif isinstance(default, int | float | str) and default not in ("", "???"):
            text = str(default)
        yield Key(name=name, declared=inner, default=text, option=option)
        # Dataclasses in the recipe itself (no option) are groups; `known_keys` adds the keys of their options.
        if isinstance(inner, type) and dataclasses.is_dataclass(inner) and option is not None:
            yield from _keys(inner, f"{name}.", option)


def _words(declared: Any) -> str:
    parts = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _words(part) for part in parts)
    if typing.get_origin(declared) is tuple:
        return {int: "a list of whole numbers", float: "a list of numbers"}.get(parts[0], "a list of texts")
    if dataclasses.is_dataclass(declared):
        return "keys of its own"
    return _WORDS.get(declared, "a value of the key's type")


def choice_of(group: str, value: Any) -> str:
    """The name of an option, or of the combination of a list of options."""
    if group in combining_groups() and isinstance(value, list) and value:
        return PLUS.join(map(str, value))
    return str(value)


def with_combination(text: str) -> str:
    """The override, with a list of a group's options replaced by the name of their combination."""
    key, _, value = text.partition("=")
    group = key.lstrip("+")
    if not value.startswith("[") or group not in combining_groups():
        return text
    (override,) = OverridesParser.create().parse_overrides([text])
    options = override.value()
    if not isinstance(options, list) or not options or not all(isinstance(option, str) for option in options):
        known = ", ".join(sorted(str(kind) for kind in discover()[group]))
        raise ConfigError(group, value, "is not a list of options", f"known: {known}; for none: {group}=jsonl")
    return f"{key}={PLUS.join(options)}"


_SWEEPER = "hydra.sweeper"
_TEXT = "tag:yaml.org,2002:str"
# Numbers that YAML 1.1 reads in base 8 or 60. They stay text, which OmegaConf turns into numbers in base 10.
_OTHER_BASE = re.compile(r"[-+]?(0_*[0-7][0-7_]*|[0-9][0-9_.]*:[0-9_.:]+)")
_READ = tuple(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool"))


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads YAML as OmegaConf does: `1e-3` is a number, a date is text, and a repeated key is an error."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 (PyYAML's)
        names = [key.value for key, _ in node.value if key.tag == _TEXT]
        for twice in (name for place, name in enumerate(names) if name in names[:place]):
            problem = f"found duplicate key {twice}"
            raise yaml.constructor.ConstructorError("while constructing a mapping", node.start_mark, problem)
        return super().construct_mapping(node, deep=deep)


_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))


def load(source: str | TextIO, name: str) -> Any:
    """The values in a YAML for the key `name` (empty: for a whole recipe). Raises yaml.YAMLError if it is not YAML."""
    if name == _NOTES and isinstance(source, str) and source != "null" and not _QUOTED.fullmatch(source):
        return source
    loader = _Loader(source)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        for node, key in _scalars(root, name):
            if node.tag in _READ and (_OTHER_BASE.fullmatch(node.value) or is_text(key, node.value)):
                node.tag = _TEXT
        return loader.construct_document(root)
    finally:
        loader.dispose()


def is_text(name: str, typed: str) -> bool:
    """Whether a value of the key `name` is text. If the key also accepts booleans, `true` and `false` are not text."""
    kinds = types_of(name)
    return str in kinds and not (bool in kinds and typed.lower() in ("true", "false"))


def types_of(name: str) -> frozenset[Any]:
    """The types of the values of a key, or of the values in its lists and mappings."""
    within, _, key = name.rpartition(":")
    if "defaults" in name.split(".") or (within == _SWEEPER and is_group(key)):
        # The value is the name of an option.
        return frozenset([str])
    name = key if within == _SWEEPER else name
    if (part := _in_combination(name)) is not None:
        name = f"{part[0]}.{part[2]}"
    known = _known(tuple(option.schema for kinds in discover().values() for option in kinds.values()))
    return known.get(name) or known.get(name.rpartition(".")[0], frozenset())


def is_group(key: str) -> bool:
    return "/" in key or key in discover() or key in ("recipe", "sweeps")


@functools.lru_cache(maxsize=1)
def _known(schemas: tuple[type, ...]) -> dict[str, frozenset[Any]]:
    """The types of each key of these schemas and of the recipe itself, by name."""
    known: dict[str, frozenset[Any]] = {}
    for key in known_keys():
        known[key.name] = known.get(key.name, frozenset()) | frozenset(_leaves(key.declared))
    return known


def _leaves(declared: Any) -> Iterator[Any]:
    parts = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        for part in parts:
            yield from _leaves(part)
    elif typing.get_origin(declared) in (tuple, dict):
        yield from _leaves(parts[-1] if typing.get_origin(declared) is dict else parts[0])
    else:
        yield declared


def _scalars(node: Any, name: str) -> Iterator[tuple[yaml.ScalarNode, str]]:
    """The scalars of a YAML that are values, or keys of a mapping of texts; each with the recipe's key that it sets."""
    if isinstance(node, yaml.ScalarNode):
        yield node, name
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _scalars(value, name)
    else:
        # In the space of a sweep, keys have their full names.
        within = f"{_SWEEPER}:" if name.startswith(_SWEEPER) else f"{name}." if name else ""
        for key, value in node.value:
            if str in types_of(name):
                yield from _scalars(key, name)
            # `<<: *other` inserts the keys of another mapping.
            yield from _scalars(value, name if key.value == "<<" else f"{within}{key.value}")


# The tokens of Hydra's grammar of overrides: quoted texts, references, brackets and separators, and other text, in
# which a backslash escapes a separator.
_PIECES = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|[][(){},:]|(?:\\[][(){},:]|[^][(){},:'"$])+|.""", re.DOTALL
)
# Functions of Hydra that return their arguments as they are; other functions compute with numbers.
_FUNCTIONS = ("choice", "shuffle", "tag")
# The key whose value is a sentence: commas, colons, brackets and `${` in it must have no meaning for Hydra or YAML.
_NOTES = "notes"
# A value that is in quotes as a whole, by Hydra's grammar.
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def as_typed(override: str) -> str:
    """The override with quotes added: around texts that look like a number or a boolean, and around notes."""
    before, equals, value = override.partition("=")
    key = before.lstrip("+").partition("@")[0]
    if key == _NOTES and value != "null" and not _QUOTED.fullmatch(value):
        return f"{before}{equals}{QuotedString(text=literal(value), quote=Quote.single).with_quotes()}"
    is_choice = is_group(key)
    if not (is_choice or str in types_of(key) or value.startswith("{")):
        return override
    pieces = ["", *_PIECES.findall(value), ""]
    # The open brackets, each with the key of the values in it; None: a function computes with these values.
    names: list[tuple[str, str | None]] = [("", key)]
    after_key = True
    for place, piece in enumerate(pieces):
        bracket, name = names[-1]
        if piece == "(" and pieces[place - 1].strip() not in _FUNCTIONS:
            names.append((piece, None))
        elif piece and piece in "[({":
            names.append((piece, name))
        elif piece and piece in "])}" and len(names) > 1:
            names.pop()
        elif bracket == "{" and pieces[place + 1 : place + 2] == [":"] and pieces[place - 1] in ("{", ","):
            names[-1] = (bracket, f"{names[-2][1]}.{piece.strip()}")
            after_key = True
            continue
        elif name is not None and _is_read(piece) and ((is_choice and name == key) or is_text(name, piece.strip())):
            starts = pieces[place - 1] in ("", "[", "(", ",") or (pieces[place - 1] == ":" and after_key)
            if starts and pieces[place + 1] in ("", "]", "}", ")", ","):
                # Hydra's grammar allows no text after the closing quote, so spaces at the end go.
                pieces[place] = re.sub(r"(\S+)\s*", r"'\1'", piece)
        after_key = after_key and piece == ":"
    return f"{before}{equals}{''.join(pieces)}"


def _is_read(text: str) -> bool:
    with contextlib.suppress(ValueError):
        float(text)
        return True
    return text.strip().lower() in ("true", "false")
