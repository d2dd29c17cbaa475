"""Errors of Hydra, OmegaConf and files as ConfigErrors: key, value, rule and cure in one line."""

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, SearchPathException
from omegaconf import OmegaConf

from tests import tiny
from titanlab.errors import ConfigError
from titanlab.recipe import Loader, composition_errors, read_flags, schema_node


def translated(error, overrides=(), flags=None):
    """The text of what an error while composing becomes."""
    with pytest.raises(ConfigError) as raised, composition_errors(overrides, flags):
        raise error
    assert raised.value.__cause__ is error
    return str(raised.value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("seed", "arguments=seed: is no override; write key=value; see `titanlab train --help`"),
        (
            "a b=1",
            (
                "arguments=a b=1: cannot be read as an override; "
                "write key=value without spaces, the key as words with dots between them"
            ),
        ),
        ("a=[1", "a=[1: cannot be read as an override; quote it: \"a='[1'\""),
        ("a='x", "a='x: cannot be read as an override; quote it: \"a='x'\""),
        ("a=b=c(", "a=b=c(: cannot be read as an override; quote it: \"a='b=c('\""),
    ],
)
def test_an_override_that_cannot_be_read(override, text):
    with pytest.raises(ConfigError) as raised, composition_errors([override]):
        OverridesParser.create().parse_overrides([override])
    assert str(raised.value) == text


def test_without_an_error_nothing_happens():
    with composition_errors(["seed=1"]):
        pass


def test_what_is_none_of_the_composition_passes():
    for error in (KeyError("x"), BrokenPipeError(32, "Broken pipe"), ConfigError("a", 1, "is wrong", "mend it")):
        with pytest.raises(type(error)) as raised, composition_errors([]):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("name", "options", "flags", "text"),
    [
        (None, None, {"--config-path": "/n"},
         "--config-path=/n: is no folder of configs; leave it out, or use --config-dir"),
        ("config", None, {"--config-path": "/n"},
         "--config-path=/n: has no config.yaml; leave it out, or use --config-dir"),
        ("mine", None, {"--config-name": "mine"},
         "--config-name=mine: there is no such config; leave it out, or give --config-dir too"),
        ("model/debg", ["debug", "debug_schema", "llama_2m"], {},
         "model=debg: is no option of this group; try debug; known: debug, llama_2m"),
        ("hydra/output/x", ["default"], {}, "hydra/output=x: is no option of this group; known: default"),
        ("model/x", [], {}, "model=x: is no option of this group; known: none"),
        ("lost", [], {}, "config=lost: is no option of this group; known: none"),
    ],
)  # fmt: skip
def test_a_config_that_is_missing(name, options, flags, text):
    assert translated(MissingConfigException("not found", name, options), (), flags) == text


def test_of_many_options_the_first_are_listed():
    options = [f"m{number:02}" for number in range(25)]
    text = translated(MissingConfigException("not found", "model/x", options))
    assert text.endswith("known: " + ", ".join(options[:20]) + " and 5 more; see `titanlab train --help`")


def test_a_folder_that_is_none():
    text = "--config-dir=/n: is no folder; give a folder of groups"
    assert translated(SearchPathException("x"), (), {"--config-dir": "/n"}) == text


def test_files_that_cannot_be_read_are_named():
    missing = FileNotFoundError(2, "No such file or directory", "x.yaml")
    assert translated(missing) == "file=x.yaml: cannot be used (No such file or directory); name another"
    with pytest.raises(yaml.YAMLError) as raised:
        yaml.safe_load("a: 1\nb: [")
    begin = "file=<unicode string>:2: is no YAML (expected the node content"
    assert translated(raised.value).startswith(begin)


def test_a_text_of_hydras_is_told_with_the_override_that_it_quotes():
    text = "seed=3: whatever about 'seed'; compare with `titanlab train --cfg job`"
    assert translated(HydraException("whatever about 'seed'"), ["model=debug", "seed=3"]) == text
    assert translated(OverflowError("too big"), ["seed=1"]).startswith("arguments=seed=1: too big;")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny.recipe(tmp_path_factory.mktemp("runs"))


def refused(recipe, key, value, overrides=None):
    """What is said of a value that the recipe does not take."""
    node = schema_node(recipe)
    with pytest.raises(ConfigError) as raised, composition_errors(overrides or [f"{key}={value}"]):
        OmegaConf.update(node, key, value, merge=True)
        OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("seed", "x", "seed=x: must be a whole number; try 0"),
        ("training.steps", 2.5, "training.steps=2.5: must be a whole number; try 1000"),
        ("compile.blocks", "maybe", "compile.blocks=maybe: must be true or false; try false"),
        ("optimizer.betas", 3, "optimizer.betas=3: must be a list of numbers; try [0.9,0.95]"),
        ("launch.threads", "x", "launch.threads=x: must be a whole number or null; try null"),
        ("training", 3, "training=3: has keys of its own; give them one by one: training.steps=…"),
        ("optimizer.schedule", 3,
         "optimizer.schedule=3: has keys of its own; give them one by one: optimizer.schedule.warmup_steps=…"),
        ("training.steps.x", 1, "training.steps.x=1: is no key of this recipe; did you mean training.steps?"),
        ("modl.x", 1, "modl.x=1: is no key of this recipe; did you mean model?"),
        ("name", "???", "name=???: has no value; give name=…"),
        ("name", "${nope}",
         "name=${nope}: Interpolation key 'nope' not found; name a key as in ${model.dim}, or a resolver"),
        ("name", "${nope:1}",
         "name=${nope:1}: Unsupported interpolation type nope; name a key as in ${model.dim}, or a resolver"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit(recipe, key, value, text):
    assert refused(recipe, key, value) == text


def test_of_several_values_the_wrong_one_is_shown(recipe):
    assert refused(recipe, "seed", "x", ["seed=1,x,2"]) == "seed=x: must be a whole number; try 0"
    # A list is one value.
    assert refused(recipe, "optimizer.betas", ["x"], ["optimizer.betas=[x,y]"]).startswith("optimizer.betas=[x,y]: ")


def test_the_value_is_shown_as_it_was_typed(recipe):
    assert refused(recipe, "seed", "x", ["++seed='x'"]) == "seed='x': must be a whole number; try 0"


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("training={stepz:1}", "has stepz, which is no key of this recipe; did you mean training.steps?"),
        (
            "optimizer.schedule={nope:1}",
            "has nope, which is no key of this recipe; keys of optimizer.schedule: warmup_steps",
        ),
        ("optimizer.schedule={warmup_steps:2,nope:{a:1}}", "has nope, which is no key of this recipe; "),
    ],
)
def test_an_unknown_key_of_a_mapping_is_shown_as_it_was_given(override, rule):
    flags = read_flags([override])
    with pytest.raises(ConfigError) as raised:
        Loader(flags, flags.overrides).recipe()
    assert str(raised.value).startswith(f"{override}: {rule}")
