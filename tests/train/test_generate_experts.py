"""Text of a model with experts: its routers choose with the biases of the checkpoint, as in training and evaluation."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests import tiny
from tests.train.test_balance import MODEL, recipe
from titanlab.checkpoint import latest
from titanlab.cli import main
from titanlab.costs import meter
from titanlab.data import source
from titanlab.distributed import ALONE, open_world
from titanlab.train import generate as sampling
from titanlab.train.weights import open_folder

STEPS, SEQUENCES, RATE = 4, 8, 0.05
WITH_BIASES = replace(MODEL, bias_rate=RATE)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose biases are as large as differences of probabilities: 0.2 after four steps."""
    folder = tmp_path_factory.mktemp("experts")
    saves = {"steps": STEPS, "every": STEPS, "validate_every": STEPS, "validation_sequences": SEQUENCES}
    made = recipe(folder, model=WITH_BIASES, lr=1e-2, **saves)
    run = tiny.begin(made)
    tiny.as_rank(made, run)
    return made, run


@torch.no_grad()
def held_out_loss(made, model):
    rows = source.open_validation(made.data, seq_len=32, sequences=SEQUENCES, rank=0, ranks=1)
    tokens, labels = (torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True))
    return float(F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()))


def loss_of(made, folder):
    """The held-out loss of the weights in a folder, or of a run's checkpoint."""
    with open_world(ALONE, accelerator="cpu", seed=0, deterministic=False):
        if folder.name.startswith("step-"):
            return held_out_loss(made, sampling._load(made, folder, CPU))
        weights = open_folder(folder, "run")
        return held_out_loss(made, sampling._filled(weights, 32, torch.float32, CPU))


def test_it_chooses_as_evaluation_does(trained):
    made, run = trained
    (row,) = run.metrics("validation")
    assert loss_of(made, latest(run.checkpoints)) == pytest.approx(row[meter.VALIDATION_LOSS], rel=1e-6)


def test_an_export_for_titanlab_keeps_the_biases_and_one_for_others_says_that_they_are_left_out(
    trained, tmp_path, capsys
):
    made, run = trained
    found = loss_of(made, latest(run.checkpoints))
    saved = json.loads((latest(run.checkpoints) / "position.json").read_text())["routing"]
    assert main(["export", str(run.path), "--into", str(tmp_path / "ours"), "--format", "titanlab"]) == 0
    assert "left out" not in capsys.readouterr().out
    assert loss_of(made, tmp_path / "ours") == pytest.approx(found, rel=1e-6)
    assert json.loads((tmp_path / "ours" / "weights.json").read_text())["biases"] == saved
    assert main(["export", str(tmp_path / "ours"), "--into", str(tmp_path / "hf")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: the biases of 2"))
    widest = max(max(block) - min(block) for block in saved.values())
    assert f"differ by less than {widest:.2g} " in line
    # Other experts are chosen there.
    assert abs(loss_of(made, tmp_path / "hf") / found - 1) > 1e-5
    dcp = ["export", str(run.path), "--into", str(tmp_path / "dcp"), "--format", "dcp", "--names", "torchtitan"]
    assert main(dcp) == 0
    assert line.partition(";")[0] in capsys.readouterr().out


def test_a_run_that_begins_with_the_weights_has_their_biases(trained, tmp_path):
    """And none if it balances in another way."""
    _, run = trained
    assert main(["export", str(run.path), "--into", str(tmp_path / "ours"), "--format", "titanlab"]) == 0
    for start in (run.path, tmp_path / "ours"):
        again = recipe(tmp_path, model=WITH_BIASES, init_from=str(start), steps=2, lr=1e-30, every=1)
        second = tiny.begin(again)
        tiny.as_rank(again, second)
        routing = json.loads((second.checkpoints / "step-00000001" / "position.json").read_text())["routing"]
        # One step has moved them by the rate.
        before = json.loads((latest(run.checkpoints) / "position.json").read_text())["routing"]
        moved = [abs(a - b) for name in before for a, b in zip(before[name], routing[name], strict=True)]
        assert all(change == pytest.approx(RATE, abs=1e-6) or change == 0 for change in moved)
    other = recipe(tmp_path, init_from=str(run.path), steps=2, model=replace(MODEL, balance="none"), every=2)
    third = tiny.begin(other)
    tiny.as_rank(other, third)
    assert "routing" not in json.loads((latest(third.checkpoints) / "position.json").read_text())
