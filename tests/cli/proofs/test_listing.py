"""Texts of proofs: the table, the points that are left out, and the reduced sizes."""

import io
import sys
from types import SimpleNamespace

import pytest

from tests import tiny
from titanlab.cli.candidates import ProofCandidates, left_out_lines, sizes_and_notes, table
from titanlab.prove import ProofRow


@pytest.mark.parametrize(
    ("left_out", "lines"),
    [
        ([], []),
        ([("a", "world <= 4")], ["1 point left out by the sweep: world <= 4"]),
        ([("a", "world <= 4"), ("b", "world <= 4")], ["2 points left out by the sweep: world <= 4"]),
        (
            [("a", "world <= 4"), ("b", "seed > 3"), ("c", "it is there twice")],
            ["3 points left out by the sweep: world <= 4, and 2 more reasons"],
        ),
    ],
)
def test_points_that_a_sweep_leaves_out_are_counted(left_out, lines):
    assert left_out_lines(ProofCandidates(title="a", candidates=[], left_out=left_out)) == lines


PASSED = ProofRow(
    run="fsdp-1", layout="dp_s2", precision="fp32", passed=True, loss=1.25e-7, grad_norm=0.0,
    gradient=(1e-6, "layers.0.wq"), parameter=(2e-6, "norm"), tolerance=1e-5,
)  # fmt: skip
FAILED = ProofRow(run="tp-1", layout="tp2", precision="bf16", passed=False, reason="no")


def test_a_row_for_each_proof():
    assert table([PASSED, FAILED]) == [
        "      run     layout  precision     loss  grad norm  gradient             parameter     tolerance",
        "PASS  fsdp-1  dp_s2   fp32       1.2e-07    0.0e+00  1.0e-06 layers.0.wq  2.0e-06 norm  1e-05",
        "FAIL  tp-1    tp2     bf16",
    ]


def test_a_narrow_terminal_gets_no_names_of_tensors(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    assert "layers.0.wq" not in "".join(table([PASSED]))
    monkeypatch.setenv("COLUMNS", "200")
    assert "layers.0.wq" in "".join(table([PASSED]))


def test_a_tolerance_by_number_is_shown_once_for_equal_ones():
    row = ProofRow(
        run="a", layout="x", precision="y", passed=True, tolerance={"loss": 1e-5, "gradient": 1e-3, "norm": 1e-5}
    )
    assert table([row])[1].endswith("1e-05/1e-03")


def proof(recipe, *, notes=(), missing=(), run="a"):
    return SimpleNamespace(run=run, layout="dp_s2", recipe=recipe, notes=notes, missing=missing)


def test_sizes_and_notes_are_told_once(tmp_path):
    recipe = tiny.recipe(tmp_path)
    proofs = [
        proof(recipe, notes=["no fp8"]),
        proof(recipe, notes=["no fp8", "no compiler"], missing=["tensor"], run="b"),
    ]
    assert sizes_and_notes(proofs, 1) == [
        "reduced to 2 layers of 64, 4 heads and 2 key/value heads, vocabulary 256, 12 sequences of 32 tokens, 1 step",
        "on this CPU: no fp8",
        "on this CPU: no compiler",
        "b: tensor did not fit into dp_s2; another layout has what is missing",
    ]
    assert sizes_and_notes([], 1) == []
