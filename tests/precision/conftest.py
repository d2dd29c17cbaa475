"""What tests of precisions share."""

from dataclasses import replace

import pytest

from tests import tiny
from tests.precision.curves import Curves
from titanlab.costs import Layout
from titanlab.errors import ConfigError
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


def field_is_refused_and_mended(schema, fields, told, cure):
    """A config with these fields is refused; with the values of the cure, which the line names, it is not."""
    with pytest.raises(ConfigError) as refused:
        schema(**fields)
    assert str(refused.value).startswith(told)
    assert "\n" not in str(refused.value)
    for value in cure.values():
        assert (f"{value:g}" if isinstance(value, float) else str(value)) in refused.value.cure
    schema(**{**fields, **cure})


def setting_is_refused_and_mended(kind, config, where, begins, cure, mended, elsewhere):
    """A config is refused in a setting, and taken with other fields (`mended`; None: not tried) or in another one."""
    with pytest.raises(ConfigError) as refused:
        kind(**config).check(given(**where))
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(begins)
    assert cure in line.rpartition("; ")[2]
    if mended is not None:
        kind(**{**config, **mended}).check(given(**{**where, **elsewhere}))
