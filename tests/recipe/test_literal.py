"""Plain values and paths as Hydra and OmegaConf must be given them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from titanlab.recipe import literal, path_override


@pytest.mark.parametrize("value", ["", "a", "${x}", "\\${x}", "\\\\${x}", "${", "a\\b", "$x", 1, None, "${a}${b}"])
def test_a_value_reads_back_unchanged(value):
    given = {"a": value, "b": [value, {"c": value}]}
    assert OmegaConf.to_container(OmegaConf.create(literal(given)), resolve=True) == given


@pytest.mark.parametrize("text", ["weights/small", "/a/@b/+c", "./-x/y", "x/1e3", "a%20b/c"])
def test_a_usual_path_has_no_quotes(text):
    assert path_override("k", Path(text)) == f"k={Path(text)}"


@pytest.mark.parametrize(
    "text",
    [
        # Words that Hydra reads as another value, or as none.
        *("123", "1e3", "1_000", "null", "true", "inf", "/", ".", "w"),
        *("модель/x", "/home/é/w", "a b/c", "a'b", 'a"b', "a\\b", "a\\", 'a\\"b', "a\nb", " a"),
        *("${x}/y", "\\${x}", "a=b", "a,b", "[x]", "{a:b}", "a:b", "~x", "a#b", "x(1)", "$HOME/x", "*/x"),
    ],
)
def test_any_path_survives_hydra_s_grammar(text):
    parsed = OverridesParser.create().parse_override(path_override("k", Path(text)))
    assert not parsed.is_sweep_override()
    assert OmegaConf.create({"k": parsed.value()}).k == str(Path(text))
