"""What tests of precisions share."""

from dataclasses import replace

import pytest

from tests import tiny
from tests.precision.curves import Curves
from titanlab.costs import Layout
from titanlab.recipe.recipe_rules import setting


@pytest.fixture(scope="session")
def curves(pool, tmp_path_factory):
    """A hundred losses on real text, by precision."""
    return Curves(pool, tmp_path_factory.mktemp("curves"))


def given(*, device="cpu", layout=None, model=None, **changed):
    """The setting of a tiny recipe, changed."""
    found = setting(tiny.recipe("runs", **(model or {})))
    accelerator = "cpu" if device == "cpu" else "cuda"
    return replace(found, accelerator=accelerator, device=device, layout=Layout(**(layout or {})), **changed)


def model_of(**fields):
    """The account of a tiny recipe's model."""
    return setting(tiny.recipe("runs", **fields)).model
