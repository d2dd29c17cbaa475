"""What tests of precisions share."""

from dataclasses import replace

from tests import tiny
from titanlab.costs import Layout
from titanlab.recipe.recipe_rules import setting


def given(*, device="cpu", layout=None, model=None, **changed):
    """The setting of a tiny recipe, changed."""
    found = setting(tiny.recipe("runs", **(model or {})))
    accelerator = "cpu" if device == "cpu" else "cuda"
    return replace(found, accelerator=accelerator, device=device, layout=Layout(**(layout or {})), **changed)


def model_of(**fields):
    """The account of a tiny recipe's model."""
    return setting(tiny.recipe("runs", **fields)).model
