"""What can be got wrong is refused in one line, and what the line offers works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import tiny
from titanlab.costs import Share
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.records import canonical
from titanlab.techniques.ac.recomputation import SelectedOperators
from titanlab.techniques.ac.recomputation_schema import (
    PAPER,
    FullCheckpointing,
    NoCheckpointing,
    SelectiveLayer,
    SelectiveOp,
)

CONF = Path(__file__).parents[2] / "conf" / "ac"
MM = "aten.mm.default"

# A policy and what else is in the recipe; how the line begins and what its cure has; what the cure makes of both.
WRONG = {
    "every=0": (lambda: {"ac": SelectiveLayer(every=0)}, "ac.every=0: must be at least 1", "try 2", lambda: {"ac": SelectiveLayer(every=2)}),
    "every=-1": (lambda: {"ac": SelectiveLayer(every=-1)}, "ac.every=-1: must be at least 1", "ac=none", lambda: {"ac": NoCheckpointing()}),
    "every > layers": (lambda: {"ac": SelectiveLayer(every=3)}, "ac.every=3: is more than the model's 2 blocks", "try 1", lambda: {"ac": SelectiveLayer(every=1)}),
    "every=0, kept": (lambda: {"ac": SelectiveLayer(every=0, keep=True)}, "ac.every=0: must be at least 1", "ac=full", lambda: {"ac": FullCheckpointing()}),
    "every > layers, kept": (lambda: {"ac": SelectiveLayer(every=3, keep=True)}, "ac.every=3: is more than the model's 2 blocks", "ac=full", lambda: {"ac": SelectiveLayer(every=1, keep=True)}),
    "empty list": (lambda: {"ac": SelectiveOp(saved=[])}, "ac.saved=[]: names no operator", "try ac=full", lambda: {"ac": FullCheckpointing()}),
    "no overload": (lambda: {"ac": SelectiveOp(saved=["aten.mm"])}, "ac.saved=[aten.mm]: aten.mm is not how torch prints", "try aten.mm.default", lambda: {"ac": SelectiveOp(saved=[MM])}),
    "another spelling": (lambda: {"ac": SelectiveOp(saved=["aten::silu"])}, "ac.saved=[aten::silu]: aten::silu is not how", "try aten.silu.default", lambda: {"ac": SelectiveOp(saved=["aten.silu.default"])}),
    "a path in torch": (lambda: {"ac": SelectiveOp(saved=["torch.ops.aten.mul.Tensor"])}, "ac.saved=[torch.ops.aten.mul.Tensor]: ", "try aten.mul.Tensor", lambda: {"ac": SelectiveOp(saved=["aten.mul.Tensor"])}),
    "no name at all": (lambda: {"ac": SelectiveOp(saved=["matmul"])}, "ac.saved=[matmul]: matmul is not how torch", "try aten.mm.default", lambda: {"ac": SelectiveOp(saved=[MM])}),
    "twice": (lambda: {"ac": SelectiveOp(saved=[MM, MM])}, "ac.saved=[aten.mm.default,aten.mm.default]: names aten.mm.default twice", "name it once", lambda: {"ac": SelectiveOp(saved=[MM])}),
    "a slip": (lambda: {"ac": SelectiveOp(saved=["aten.mmm.default"])}, "ac.saved=[aten.mmm.default]: torch has no operator aten.mmm.default", "try aten.mm.default", lambda: {"ac": SelectiveOp(saved=[MM])}),
    "a slip off the list": (lambda: {"ac": SelectiveOp(saved=["aten.sillu.default"])}, "ac.saved=[aten.sillu.default]: torch has no operator", "try aten.silu.default", lambda: {"ac": SelectiveOp(saved=["aten.silu.default"])}),
    "a slip of the namespace": (lambda: {"ac": SelectiveOp(saved=["atenn.mm.default"])}, "ac.saved=[atenn.mm.default]: torch has no operator", "try aten.mm.default", lambda: {"ac": SelectiveOp(saved=[MM])}),
    "nothing like it": (lambda: {"ac": SelectiveOp(saved=["aten.qqqqqqqqqq.zzzz"])}, "ac.saved=[aten.qqqqqqqqqq.zzzz]: torch has no operator", "try aten.mm.default", lambda: {"ac": SelectiveOp(saved=[MM])}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_and_its_cure_cures(tmp_path, case):
    wrong, begins, cure, mended = WRONG[case]
    with pytest.raises(ConfigError) as refused:
        tiny.recipe(tmp_path, **wrong())
    line = str(refused.value)
    assert line.startswith(begins)
    assert cure in line
    assert "\n" not in line
    tiny.recipe(tmp_path, **mended())


def test_operators_of_others_are_looked_up_when_they_have_been_imported(tmp_path):
    theirs = SelectiveOp(saved=["their_package.attention.default"])
    tiny.recipe(tmp_path, ac=theirs)
    with pytest.raises(ConfigError, match="torch has no operator their_package.attention.default"):
        theirs.implementation().apply({})


def test_the_default_list_is_known(tmp_path):
    """To torch, once context parallelism has been imported; and a recipe with it needs no torch to be checked."""
    from titanlab.parallelism import context

    assert set(PAPER) <= SelectedOperators.known_operators()
    assert context.attention is not None
    code = (
        "import sys; from types import SimpleNamespace; from titanlab.costs.layout import Layout\n"
        "from titanlab.techniques.ac.recomputation_schema import SelectiveOp\n"
        "SelectiveOp().check(SimpleNamespace(layout=Layout()))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kind", discover()["ac"])
def test_every_option_has_code_an_account_and_a_yaml_that_adds_nothing(kind):
    config = discover()["ac"][kind].schema()
    assert callable(config.implementation().apply)
    assert config.saved_bytes(
        tiny.recipe("runs").model.block_operations(batch=1, seq_len=32), Share(element_bytes=2), number=0
    )
    assert yaml.safe_load((CONF / f"{kind}.yaml").read_text()) == {"defaults": [f"{kind}_schema", "_self_"]}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("every", "chosen"), [(1, {0, 1, 2, 3, 4}), (2, {0, 2, 4}), (3, {0, 3}), (5, {0})])
def test_blocks_go_by_their_number_in_the_whole_model(every, chosen, keep):
    """However they are shared out over stages."""
    import torch

    config = SelectiveLayer(every=every, keep=keep)
    for stages in ([[0, 1, 2, 3, 4]], [[0, 4], [1, 2, 3]], [[0, 1], [2], [3, 4]]):
        found = set()
        for numbers in stages:
            blocks = {number: torch.nn.Linear(2, 2) for number in numbers}
            config.implementation().apply(blocks)
            found |= {number for number, block in blocks.items() if "forward" in vars(block)}
        assert found == ({0, 1, 2, 3, 4} - chosen if keep else chosen)


def test_runs_from_before_blocks_could_be_kept_have_their_names():
    assert canonical(SelectiveLayer(every=2)) == {"kind": "selective_layer", "every": 2}
    assert canonical(SelectiveLayer(every=2, keep=True)) == {"kind": "selective_layer", "every": 2, "keep": True}
