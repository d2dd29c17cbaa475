"""Which family of models reads a config.json, and the architectures that none reads."""

from __future__ import annotations

import pytest

from titanlab.errors import ConfigError
from titanlab.options import Option, discover
from titanlab.techniques.model.llama_schema import Llama, Mixtral, Qwen3, Qwen3Moe
from titanlab.train import hub_folders
from titanlab.train.hub_folders import family_for

SUPPORTED = "LlamaForCausalLM, MixtralForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "schema"),
    [
        ("LlamaForCausalLM", Llama),
        ("MixtralForCausalLM", Mixtral),
        ("Qwen3ForCausalLM", Qwen3),
        ("Qwen3MoeForCausalLM", Qwen3Moe),
    ],
)
def test_an_architecture_has_its_family(architecture, schema):
    # As transformers writes it, and as a person might.
    for given in ([architecture], architecture):
        assert family_for({"architectures": given}) == schema.hugging_face()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["MistralForCausalLM"], "MistralForCausalLM"),
        (["MistralModel"], "MistralModel"),
        ([], "null"),
        (None, "null"),
        ([1], "1"),
        # Whoever reads the first would leave the second out.
        (["LlamaForCausalLM", "B"], "['LlamaForCausalLM', 'B']"),
        # Not hashable.
        ([["LlamaForCausalLM"]], "['LlamaForCausalLM']"),
        ({"LlamaForCausalLM": 1}, "{'LlamaForCausalLM': 1}"),
    ],
)
def test_other_architectures_are_refused(given, shown):
    with pytest.raises(ConfigError) as refused:
        family_for({"architectures": given})
    rule = "is no architecture that is computed here"
    assert str(refused.value) == f"config.json:architectures={shown}: {rule}; supported: {SUPPORTED}"


def test_a_config_without_architectures_is_refused():
    with pytest.raises(ConfigError, match=r"^config\.json:architectures=null: "):
        family_for({})


def test_models_of_other_packages_are_found_and_those_without_a_form_in_transformers_left_out(monkeypatch):
    class Family:
        architectures = ("MineForCausalLM", "MineForever")

    family = Family()
    schemas = {
        "mine": type("Mine", (), {"hugging_face": classmethod(lambda cls: family)}),
        "bare": type("Bare", (), {"hugging_face": classmethod(lambda cls: None)}),
    }
    more = {kind: Option(group="model", kind=kind, schema=schema) for kind, schema in schemas.items()}
    known = discover()
    monkeypatch.setattr(hub_folders, "discover", lambda: {**known, "model": {**known["model"], **more}})
    assert family_for({"architectures": ["MineForever"]}) is family
    with pytest.raises(ConfigError, match="supported: LlamaForCausalLM, MineForCausalLM, MineForever, Mixtral"):
        family_for({"architectures": ["BareForCausalLM"]})
