"""Options, keys, flags and files that pages name exist, and values that they give to keys are of the keys' types."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.docs.pages import PAGES, PROGRAM, ROOT, VERBS, read, spans
from tests.docs.test_commands import help_of
from titanlab.options import discover
from titanlab.recipe import Recipe, conf_folder, known_keys, register, schema_node

GROUPS = {path.name for path in conf_folder().iterdir() if path.is_dir()}
OVERRIDE = re.compile(r"'?[+~]?[a-z][\w.]*=\S.*")
KEY = re.compile(rf"(?:{'|'.join(sorted(GROUPS))}|hydra)(?:\.[a-z_0-9]+)+")
FLAG = re.compile(r"--?[a-z][\w-]*")
FILE = re.compile(r"(?:titanlab|tests|conf|docs|benchmarks|notebooks|launch|sweeps|\.ci)/[\w./*-]+")
# Words on a place that the reader fills.
OPEN = re.compile(r"…|\b[A-Z]{2,}\b|<")
# Names that look like ours and are not, by page; with the reason.
NOT_OURS = {
    ("docs/compile.md", "dynamic=False"): "an argument of torch.compile",
    ("docs/configuration.md", "key=value"): "how an override is written",
    ("docs/configuration.md", "group=option"): "likewise",
    ("docs/configuration.md", "++key=value"): "likewise",
    **{
        ("docs/configuration.md", flag): "a flag of Hydra"
        for flag in ("--version", "--config-path", "--config-name", "--shell-completion", "--experimental-rerun")
    },
    ("docs/data.md", "data=mine"): "an option of another package",
    ("docs/extending.md", "schedule=shallow schedule.depth=4"): "an option of a package that the page builds",
    ("docs/extending.md", "launch=nohup"): "likewise",
    ("docs/models-of-your-own.md", "-e ."): "a flag of pip",
    ("docs/models-of-your-own.md", "ac=first_blocks"): "an option of the package that the page builds",
    ("docs/models-of-your-own.md", "precision=fp64"): "likewise",
    ("docs/sweeps.md", "key=a,b"): "how several values are written",
    ("docs/torch.md", "acc_events=True"): "an argument of torch.profiler",
}


@functools.cache
def keys():
    """All keys by name, each with the schemas that have it."""
    found = {}
    for key in known_keys():
        found.setdefault(key.name, []).append(Recipe if key.option is None else key.option.schema)
    return found


def options(group):
    return {path.stem for path in (conf_folder() / group).glob("*.yaml")}


def wrong_override(text):
    """What is wrong with `key=value`; an empty text where nothing is."""
    key, _, value = text.strip("'").lstrip("+~").partition("=")
    if key in GROUPS:
        missing = [each for each in value.strip('"').split(",") if not OPEN.search(each) and each not in options(key)]
        return f"{key} has no option {missing[0]}" if missing else ""
    if key.startswith("hydra."):
        return ""
    # Where a sentence is about one option, its keys stand without the group.
    names = [name for name in keys() if name == key or ("." not in key and name.endswith(f".{key}"))]
    if not names:
        added = key.rpartition(".")[0] in keys() and text.strip("'").startswith("+")
        return "" if added else "is not a key"
    return "" if OPEN.search(value) else wrong_value(names, text.strip("'"))


def wrong_value(names, override):
    """What is wrong with the value of an override for each of the keys that may be meant."""
    try:
        parsed = OverridesParser.create().parse_override(override)
        values = list(parsed.sweep_iterator()) if parsed.is_sweep_override() else [parsed.value()]
    except HydraException as error:
        return str(error)
    wrong = ""
    for name, schema in [(each, schema) for each in names for schema in keys()[each]]:
        try:
            for value in values:
                OmegaConf.update(schema_node(schema), name.partition(".")[2] or name, value)
        except OmegaConfBaseException as error:
            wrong = str(error).splitlines()[0]
        else:
            return ""
    return wrong


def wrong_name(text):
    """What is wrong with words in code style; an empty text where nothing is, or where they name nothing of ours."""
    words = text.split()
    if all(OVERRIDE.fullmatch(word) for word in words):
        return next(filter(None, map(wrong_override, words)), "")
    if KEY.fullmatch(text):
        return "" if text in keys() or text.startswith("hydra.") else "is not a key"
    if FLAG.fullmatch(words[0]):
        return "" if any(known_flag(words[0], verb) for verb in VERBS.split()) else "is not a flag of any verb"
    if FILE.fullmatch(text) and not OPEN.search(text):
        return "" if list(ROOT.glob(text.rstrip("/"))) else "there is no such file"
    return ""


@functools.cache
def known_flag(flag, verb):
    return re.search(rf"(?<![\w-]){flag}(?![\w-])", help_of(verb)) is not None


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    register()
    named = [(line, text) for line, text in spans(page) if not PROGRAM.match(text) and (page, text) not in NOT_OURS]
    faults = [f"{page}:{line}: {text}: {wrong}" for line, text in named if (wrong := wrong_name(text))]
    assert not faults, "\n".join(faults)


def test_what_is_left_out_is_on_the_pages():
    assert set(NOT_OURS) <= {(page, text) for page in PAGES for _, text in spans(page)}


# Tables


def tables(page):
    """Tables of a page: cells of the first row, then those of the others."""
    found = re.findall(r"^(\|.*)\n\|[-:| ]+\n((?:\|.*\n)+)", read(page), re.MULTILINE)
    return [(cells(header), [cells(row) for row in rows.splitlines()]) for header, rows in found]


def cells(row):
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]


def first_column(page, header):
    """Words in code style in the first columns of the tables that begin so, without group and equals sign."""
    found = [row[0] for head, rows in tables(page) if head[0] == header for row in rows]
    assert found, f"{page} has no table that begins with {header}"
    return {word.rpartition("=")[2] for cell in found for word in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize(
    ("page", "header", "group"),
    [
        ("docs/activation-checkpointing.md", "option", "ac"),
        ("docs/clusters.md", "`cluster`", "cluster"),
        ("docs/compile.md", "preset", "compile"),
        ("docs/models.md", "name", "model"),
        ("docs/optimizers.md", "`optimizer=`", "optimizer"),
        ("docs/schedules.md", "`schedule=`", "schedule"),
        ("docs/sweeps.md", "`+sweeps=`", "sweeps"),
    ],
)
def test_a_table_has_every_option(page, header, group):
    assert first_column(page, header) == options(group)


def test_tables_that_list_more_or_less_have_every_option():
    page = "docs/precision.md"
    assert first_column(page, "option") | first_column(page, "precision") - {"bf16, reduced"} >= options("precision")
    found = first_column("docs/data.md", "`data=`")
    assert found == {each for each in options("data") if not each.startswith("c4_")}
    (listed,) = re.findall(r"Presets: (.*?)\. A degree", read("docs/parallelism.md"), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == options("parallelism")


def test_the_table_of_groups_has_every_group_and_only_options_that_there_are():
    (rows,) = [rows for head, rows in tables("docs/configuration.md") if head[:2] == ["group", "options"]]
    assert {row[0].strip("`") for row in rows} == GROUPS
    for row in rows:
        group = row[0].strip("`")
        named = {each for each in re.findall(r"`([^`]+)`", row[1]) if "…" not in each}
        assert named <= options(group)
        assert "…" in row[1] or named == options(group)


def test_the_tables_of_keys_have_every_key():
    of_cluster, of_local, of_slurm = [
        {word for row in rows for word in re.findall(r"`([a-z_]+)`", row[0])}
        for head, rows in tables("docs/clusters.md")
        if head[0] == "key"
    ]
    schemas = discover()
    assert of_cluster == fields(schemas["cluster"][None].schema)
    assert of_local == fields(schemas["launch"]["local"].schema)
    assert of_slurm == fields(schemas["launch"]["slurm"].schema)
    assert first_column("docs/compile.md", "key") == {
        f"compile.{name}" for name in fields(schemas["compile"][None].schema)
    }


def fields(schema):
    return {field.name for field in dataclasses.fields(schema)} - {"kind"}
