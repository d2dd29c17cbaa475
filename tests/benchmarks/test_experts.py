"""The benchmark of models with experts compares what it says: the same sizes, a bare loop without titanlab, fair ratios."""

from __future__ import annotations

import ast
import json

import pytest

from tests.benchmarks.scripts import BENCHMARKS, script

experts = script("experts")


def test_the_bare_loop_is_plain_pytorch():
    tree = ast.parse((BENCHMARKS / "bare_expert_loop.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert {name.partition(".")[0] for name in imported} == {"__future__", "argparse", "json", "time", "torch"}


def test_ratios_are_of_speeds_and_the_order_is_swapped(capsys):
    order = []

    def timing(name, step):
        order.append(name)
        return experts.Timing(step, 2 * step)

    found = experts.alternate(3, lambda: timing("a", 0.5), lambda: timing("b", 0.4), ("a", "b"))
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found["clock_ratio"] == pytest.approx(0.8)
    assert found["processor_ratio"] == pytest.approx(0.8)
    assert found["a_clock_ms"] == pytest.approx(500)
    assert found["b_processor_ms"] == pytest.approx(800)


def test_the_kept_figures_hold_the_bars():
    kept = json.loads((BENCHMARKS / "results" / "experts.json").read_text())
    assert {*experts.BARS} <= kept.keys()
    for name, bar in experts.BARS.items():
        assert kept[name]["bar"] == bar
        assert kept[name]["processor_ratio"] >= bar
    assert kept["date"]
    assert "CPU cores" in kept["machine"]


@pytest.mark.full
def test_both_loops_have_the_same_model():
    from tests.model.published import load
    from titanlab.techniques.model.llama_schema import Qwen3Moe

    sizes = experts.SIZES
    ours = Qwen3Moe(**{**vars(load("qwen3_moe_debug")), **sizes})
    flags = {"vocab" if name == "vocab_size" else name.replace("_", "-"): value for name, value in sizes.items()}
    command = [experts.sys.executable, str(BENCHMARKS / "bare_expert_loop.py"), "--steps", "1", "--batch", "1"]
    done = experts._run([*command, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))])
    assert json.loads(done)["parameters"] == ours.account().parameter_count
