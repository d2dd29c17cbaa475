"""Tests of the slower layer that are rows of products: the same proof for another layout, technique or size.

They run with `make test-matrix`, and `.ci/run` runs another eighth of them for each commit. Each file keeps its rows in
`make test`, and the covering rows of tests/parity run in every `.ci/run`.
"""

import pytest

FILES = (
    "tests/ac/test_activation_memory.py",
    "tests/ac/test_parity.py",
    "tests/compile/test_blocks.py",
    "tests/costs/test_traffic_account.py",
    "tests/gpt/test_gpt_package.py",
    "tests/gpt/test_gpt_parity.py",
    "tests/optimizer/test_low_bit.py",
    "tests/optimizer/test_muon.py",
    "tests/parallelism/test_deferred_taps.py",
    "tests/parallelism/test_pipeline.py",
    "tests/precision/test_float8.py",
    "tests/precision/test_float8_layouts.py",
    "tests/precision/test_fp16.py",
    "tests/precision/test_layouts.py",
    "tests/recipe/test_recipes.py",
    "tests/training/test_bad_steps.py",
    "tests/training/test_elastic.py",
    "tests/training/faults/test_rank_times.py",
    "tests/training/faults/test_repeated_step.py",
    "tests/weights/huggingface/test_runs.py",
)


def mark(items: list[pytest.Item]) -> None:
    """Mark the slower rows of these files as rows of the matrix."""
    for item in items:
        if item.nodeid.partition("::")[0] in FILES and item.get_closest_marker("full"):
            item.add_marker("matrix")
