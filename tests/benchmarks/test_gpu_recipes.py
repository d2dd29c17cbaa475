"""The study on one GPU, where there is none: its sums, its limits of time, and the few packages that it needs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import PackageNotFoundError, distribution, requires

import pytest

from tests.benchmarks.scripts import BENCHMARKS, script

SCRIPT = BENCHMARKS / "gpu_recipes.py"
NEEDED = ("torch", "torchao", "hydra-core", "omegaconf")


@pytest.fixture(scope="module")
def study():
    return script("gpu_recipes")


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def with_requirements(names):
    """Distributions and all that they require without extras."""
    found, open_ = set(), list(names)
    while open_:
        name = canonical(open_.pop())
        if name not in found:
            found.add(name)
            try:
                lines = requires(name) or []
            except PackageNotFoundError:
                # For another platform.
                continue
            open_ += [re.match(r"[\w.-]+", each)[0] for each in lines if "extra ==" not in each]
    return found


@pytest.fixture
def bare(tmp_path):
    """The interpreter of an environment that has the needed packages and no other."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for name in with_requirements(NEEDED):
        try:
            files = distribution(name).files
        except PackageNotFoundError:
            # For another platform.
            continue
        for top in {each.parts[0] for each in files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
    return tmp_path / "env" / "bin" / "python"


@pytest.mark.full
def test_it_runs_with_four_packages(bare, tmp_path):
    out = tmp_path / "result.json"
    given = "--device cpu --tiny --variants eager,compiled,float8_tensorwise --key compile.backend=aot_eager"
    command = [str(bare), str(SCRIPT), *given.split(), "--minutes", "5", "--out", str(out)]
    absent = "import importlib.util as u; print([n for n in ('numpy', 'rich', 'wandb', 'datasets') if u.find_spec(n)])"
    assert subprocess.run([bare, "-c", absent], capture_output=True, text=True, check=True).stdout == "[]\n"
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert (result["device"], result["layers"], result["seq_len"]) == ("cpu", 2, 64)
    assert not [row["stopped"] for row in result["variants"].values() if "stopped" in row], result
    assert result["ratios"].keys() == result["variants"].keys() == {"eager", "compiled", "float8_tensorwise"}
    assert result["ratios"]["compiled"] == 1.0
    losses = [row["loss"] for row in result["variants"].values()]
    # The same batch and the same start, ten bits of precision: after some steps they are close, and lower than ln(2048).
    assert max(losses) - min(losses) < 0.05
    assert max(losses) < 7.6
    # Nothing is left behind.
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "env"}


def test_a_variant_is_ended_when_its_time_is_over(study):
    args = Namespace(device="cpu", tiny=True, seq=64, sequences=2, steps=2, key=[])
    found = study.measure(args, "eager", 2, limit=0.1)
    assert found["stopped"].startswith("time")
    assert study.line("eager", found).endswith("s were over")


def test_what_fits(study):
    gib = 2**30
    assert study.layers_that_fit([40 * gib, 45 * gib], 140 * gib) == 1 + int((0.92 * 140 - 40) / 5)
    assert study.layers_that_fit([40 * gib, 41 * gib], 140 * gib) == 32
    assert study.layers_that_fit([70 * gib, 90 * gib], 78 * gib) == 1
    # The second did not fit.
    assert study.layers_that_fit([70 * gib], 78 * gib) == 1


def test_sums(study):
    args = Namespace(sequences=4, seq=8192)
    facts = {"event": "facts", "device": "d", "memory_bytes": 1, "flops_per_token": 10**9, "peak_flops": 989e12}
    steps = [{"event": "step", "seconds": s, "loss": 5.0, "peak_bytes": 2**30} for s in (60.0, 1.0, 0.5, 0.5, 4.0)]
    found = study.summary([facts, *steps], args)
    assert (found["steps"], found["step_seconds"], found["first_step_seconds"]) == (3, 0.5, 60.0)
    assert found["tokens_per_second"] == 65536
    assert found["mfu_percent"] == pytest.approx(100 * 65536e9 / 989e12)
    # Cut off in its first step: there is nothing to take a median of.
    assert "tokens_per_second" not in study.summary([facts, *steps[:1]], args)
    rows = {"compiled": found, "eager": {"tokens_per_second": 32768}, "float8_rowwise": {"stopped": "time"}}
    assert study.ratios(rows) == {"compiled": 1.0, "eager": 0.5}
    assert study.ratios({"eager": {"tokens_per_second": 1.0}}) == {}


def test_recipes_are_those_of_the_study(study):
    from titanlab.cli.compose import compose
    from titanlab.recipe.recipe import resolve
    from titanlab.recipe.recipe_rules import check

    args = Namespace(device="cuda", tiny=False, seq=8192, sequences=4, key=[])
    for variant in study.VARIANTS:
        (recipe,) = compose(study.recipe_keys(args, variant, 12))
        recipe = resolve(recipe, world=None, accelerator="cuda", device="NVIDIA H200")
        if variant == "eager":
            check(recipe)
        assert (recipe.model.dim, recipe.model.layers, recipe.model.vocab_size) == (4096, 12, 128256)
        assert (recipe.microbatch, recipe.microbatches, recipe.training.seq_len) == (1, 4, 8192)
        assert recipe.compile.blocks == recipe.compile.loss == (variant != "eager")
