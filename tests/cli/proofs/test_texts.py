"""The table of proofs, and what stands above it."""

import io
import sys
from types import SimpleNamespace

from tests import tiny
from titanlab.cli.proofs import ProofCandidates, heading, table
from titanlab.prove import ProofRow

PASSED = ProofRow(
    run="fsdp-1", layout="dp_s2", precision="fp32", passed=True, loss=1.25e-7, grad_norm=0.0,
    gradient=(1e-6, "layers.0.wq"), parameter=(2e-6, "norm"), tolerance={"loss": 1e-5, "norm": 1e-3, "gradient": 1e-5},
)  # fmt: skip
FAILED = ProofRow(run="tp-1", layout="tp2", precision="bf16", passed=False, reason="no")


def test_a_row_for_each_proof_without_names_of_tensors_on_a_narrow_terminal(monkeypatch):
    whole = [
        "      run     layout  precision     loss  grad norm  gradient             parameter     tolerance",
        "PASS  fsdp-1  dp_s2   fp32       1.2e-07    0.0e+00  1.0e-06 layers.0.wq  2.0e-06 norm  1e-05/1e-03",
        "FAIL  tp-1    tp2     bf16",
    ]
    assert table([PASSED, FAILED]) == whole
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    for columns, is_shown in (("80", False), ("200", True)):
        monkeypatch.setenv("COLUMNS", columns)
        assert (table([PASSED, FAILED]) == whole) is is_shown


def test_sizes_notes_and_points_that_are_left_out_are_told_once(tmp_path):
    first = SimpleNamespace(run="a", layout="dp_s2", recipe=tiny.recipe(tmp_path), notes=["no fp8"], missing=())
    second = SimpleNamespace(**{**vars(first), "run": "b", "notes": ["no fp8", "no compiler"], "missing": ["tensor"]})
    left_out = [("a", "world <= 4"), ("b", "seed > 3"), ("c", "it is there twice"), ("d", "seed > 3")]
    chosen = ProofCandidates(title="mine", candidates=[], left_out=left_out)
    assert heading(chosen, ", each proved", [first, second], 1).splitlines() == [
        "mine: 0 recipes, each proved",
        "reduced to 2 layers of 64, 4 heads and 2 key/value heads, vocabulary 256, 12 sequences of 32 tokens, 1 step",
        "on this CPU: no fp8",
        "on this CPU: no compiler",
        "b: tensor did not fit into dp_s2; another layout has what is missing",
        "4 points left out by the sweep: world <= 4, and 2 more reasons",
    ]
    assert heading(ProofCandidates(title="mine", candidates=[]), "", [], 1) == "mine: 0 recipes"
