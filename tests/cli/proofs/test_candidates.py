"""Recipes to be proved: by name, by overrides, or of a sweep's folder; and the texts of proofs."""

import io
import sys
from types import SimpleNamespace

import pytest

from tests import tiny
from tests.sweep.made import Made
from titanlab.cli.proofs import ProofCandidates, choose, heading, is_name, one_recipe, table
from titanlab.errors import ConfigError
from titanlab.prove import Candidate, ProofRow


@pytest.mark.parametrize("text", ["quickstart", "a/b", "a.b", "..", "", " quickstart "])
def test_a_word_is_a_name_and_an_override_or_a_flag_is_none(text):
    assert is_name(text)
    for other in ("seed=1", "+recipe=x", "-m", "--only", "~training.steps", "a b", "="):
        assert not is_name(other)


@pytest.mark.parametrize(
    ("word", "runs", "broken"),
    [
        ("", ["fsdp-1", "fsdp_tp-2", "tp-3"], ["tp=3", "cp=3"]),
        ("fsdp", ["fsdp-1", "fsdp_tp-2"], []),
        ("tp", ["fsdp_tp-2", "tp-3"], ["tp=3"]),
        ("cp", [], ["cp=3"]),
    ],
)
def test_runs_with_a_word_in_their_names_are_kept(tmp_path, word, runs, broken):
    recipe = tiny.recipe(tmp_path)
    candidates = [Candidate(run=name, recipe=recipe) for name in ("fsdp-1", "fsdp_tp-2", "tp-3")]
    found = ProofCandidates(title="mine", candidates=candidates, broken=[("tp=3", "no"), ("cp=3", "no")])
    found.only(word)
    assert [candidate.run for candidate in found.candidates] == runs
    assert [name for name, _ in found.broken] == broken


def test_a_sweep_that_was_submitted_is_taken_from_its_folder(tmp_path):
    made = Made(tmp_path / "runs", "mine")
    first, damaged = made.run("fsdp", shard=2), made.run("tp", tensor=2)
    made.drop("rule", "does not divide", parallelism="tp3", seed=1)
    made.drop("where", "world <= 4", parallelism="fsdp8")
    made.drop("duplicate", "is there twice", seed=0)
    config = (damaged.path / "config.yaml").read_text()
    (damaged.path / "config.yaml").write_text(config.replace("seed: 0", "seed: x"))
    found = choose(["mine"], str(tmp_path / "runs"))
    assert [candidate.run for candidate in found.candidates] == [first.path.name]
    assert found.candidates[0].recipe.layout.shard == 2
    assert (found.title, found.folder) == (f"mine ({made.folder.path})", made.folder.path)
    (run, rule), other = found.broken
    assert run == damaged.path.name
    assert rule.startswith("seed=x: ")
    assert other == ("parallelism=tp3, seed=1", "does not divide")
    assert found.left_out == [("parallelism=fsdp8", "world <= 4"), ("seed=0", "is there twice")]


def test_an_expression_is_one_recipe(tmp_path):
    words = f"model=debug data=synthetic runs={tmp_path} optimizer.schedule.warmup_steps=0"
    found = one_recipe(f"{words} 'name=a-b'")
    assert (found.run, found.recipe.name) == (f"{words} name=a-b", "a-b")
    with pytest.raises(ConfigError, match="describes 2 recipes, and two are compared"):
        one_recipe(f"-m {words} seed=1,2")


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
