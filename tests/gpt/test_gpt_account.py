"""The account of a model from outside is held to its module by the library's own checks, and these find faults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from tiny_gpt import gpt
from tiny_gpt.gpt_schema import Gpt

from titanlab.data import Synthetic
from titanlab.errors import ConfigError
from titanlab.train.conformance import faults

SIZES = {"width": 24, "depth": 3, "heads": 4, "places": 20, "vocab_size": 50}


@pytest.mark.parametrize("tied", [False, True])
def test_the_gpt_is_what_its_account_says(tied):
    assert faults(Gpt(**SIZES, tied_head=tied)) == []


def test_the_yaml_makes_one():
    values = yaml.safe_load((Path(gpt.__file__).parent / "conf/model/gpt_tiny.yaml").read_text())
    assert values.pop("defaults") == ["gpt_schema", "_self_"]
    assert Gpt(**values).account().parameter_count == 141_184


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"lookups": ()}, "FLOPs: the sizes in the account make"),
        ({"tensor_plan": {"norm": "norm"}}, "tensor_plan: nothing is said about head.bias"),
    ],
)
def test_what_is_wrong_in_an_account_is_found(given, fault):
    with patch.object(Gpt, "account", lambda config, right=Gpt.account: replace(right(config), **given)):
        assert any(each.startswith(fault) for each in faults(Gpt(**SIZES)))


def test_a_model_that_says_it_masks_documents_is_asked_to(monkeypatch):
    monkeypatch.setattr(Gpt, "masks_documents", True)

    def forward(model, tokens, positions=None, starts=None, right=gpt.GptModel.forward):
        return right(model, tokens, positions)

    monkeypatch.setattr(gpt.GptModel, "forward", forward)
    assert faults(Gpt(**SIZES)) == ["documents: with starts, a document's logits are not those of the document alone"]


def test_document_masks_need_a_model_that_has_them(tmp_path):
    from tests import tiny

    data = Synthetic(vocab_size=256, document_mask=True)
    with pytest.raises(
        ConfigError, match=r"^data.document_mask=true: model=.*gpt.* does not mask documents; try false"
    ):
        tiny.recipe(tmp_path, seq_len=16, model=Gpt(**{**SIZES, "vocab_size": 256}), data=data)


def test_the_models_own_rules_are_heard(tmp_path):
    from tests import tiny

    with pytest.raises(
        ConfigError, match=r"training.seq_len=32: is longer than the 20 positions that the model learns; try 20"
    ):
        tiny.recipe(tmp_path, model=Gpt(**{**SIZES, "vocab_size": 256}))
