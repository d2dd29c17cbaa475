"""Tests of the slower layer that are rows of products: the same proof for another layout, technique or size.

They run with `make test-matrix`, and `.ci/run` runs another eighth of them for each commit. FILES keep rows in
`make test`, and the covering rows of tests/prove run in every `.ci/run`. TESTS are single tests, each with its rows.
PAGES are those of the documentation whose commands take longest: they compile or train most often.
"""

import pytest

FILES = (
    "tests/ac/test_activation_memory.py",
    "tests/ac/test_parity.py",
    "tests/compile/test_blocks.py",
    "tests/costs/test_traffic_account.py",
    "tests/gpt/test_gpt_package.py",
    "tests/gpt/test_gpt_parity.py",
    "tests/optimizer/test_optimizers.py",
    "tests/parallelism/test_pipeline_weights.py",
    "tests/parallelism/test_pipeline.py",
    "tests/prove/test_expert_parallelism.py",
    "tests/prove/test_expert_techniques.py",
    "tests/prove/test_experts.py",
    "tests/plan/test_activations.py",
    "tests/precision/test_float8.py",
    "tests/precision/test_fp16.py",
    "tests/precision/test_layouts.py",
    "tests/recipe/test_recipes.py",
    "tests/training/test_bad_steps.py",
    "tests/training/test_elastic.py",
    "tests/training/test_resume.py",
    "tests/training/faults/test_rank_times.py",
    "tests/training/faults/test_repeated_step.py",
    "tests/weights/huggingface/test_runs.py",
)
TESTS = (
    # Longer trainings in each precision; what a step computes is compared in tests/precision/test_layouts.py and beside it.
    "tests/precision/test_curves.py::test_a_precision_learns_as_fp32_does",
    # The ones with jobs on this host stay: killed submitters, and jobs that run.
    "tests/sweep/test_killed.py::test_slurm_has_every_job_once",
    "tests/sweep/test_killed.py::test_what_is_done_anew_is_put_aside_and_has_a_new_job_or_stays_as_it_is",
    # The quickstart's training stays, and so does a whole session of a GPU in which nothing is run.
    "tests/test_quickstart.py::test_six_layouts_from_one_process_to_eight_train_alike_and_are_compared",
    "tests/benchmarks/test_gpu_session.py::test_a_run_that_fails_or_is_late_keeps_what_it_has_measured",
    "tests/benchmarks/test_gpu_session_rehearsal.py::test_pieces_are_rehearsed_on_a_bare_machine",
    "tests/compile/test_cache.py::test_a_run_that_is_killed_while_it_compiles_does_not_keep_the_next_from_training",
    # The same layouts in fp32 stay.
    "tests/prove/test_expert_bf16.py::test_a_layout_trains_as_one_process",
    "tests/weights/huggingface/test_round_trip.py::test_memory_does_not_grow_with_the_model",
)
PAGES = ("activation-checkpointing", "compile", "data", "elastic", "my-laptop", "precision", "profiling", "tracking")
EXECUTED = "tests/docs/test_executed.py::test_commands_of_a_page_train_at_reduced_size"


def mark(items: list[pytest.Item]) -> None:
    """Mark the slower rows of these files, and these tests, as rows of the matrix."""
    pages = {f"{EXECUTED}[docs/{page}.md]" for page in PAGES}
    for item in items:
        test = item.nodeid.partition("[")[0]
        listed = item.nodeid.partition("::")[0] in FILES or test in TESTS or item.nodeid in pages
        if listed and item.get_closest_marker("full"):
            item.add_marker("matrix")
