"""Fields of the training loop: which numbers there may be."""

from __future__ import annotations

import pytest

from titanlab.errors import ConfigError
from titanlab.recipe import Training

FIELDS = [
    ({"steps": 0}, "training.steps=0: must be at least 1; try 1000"),
    ({"seq_len": 0}, "training.seq_len=0: must be at least 1; try 512"),
    ({"global_batch": -8}, "training.global_batch=-8: must be at least 1; try 8"),
    ({"validation_sequences": 0}, "training.validation_sequences=0: must be at least 1; try 32"),
    ({"log_every": 0}, "training.log_every=0: must be at least 1; try 10"),
    ({"gc_every": 0}, "training.gc_every=0: must be at least 1; try 100"),
    ({"on_nan": "ignore"}, "training.on_nan=ignore: is none of stop, skip, rollback; try stop"),
    ({"validate_every": -1}, "training.validate_every=-1: must not be negative; try 0"),
    ({"unmeasured_steps": -1}, "training.unmeasured_steps=-1: must not be negative"),
    ({"nan_limit": -1}, "training.nan_limit=-1: must not be negative"),
    ({"check_every": -1}, "training.check_every=-1: must not be negative"),
    ({"compare_ranks_every": -1}, "training.compare_ranks_every=-1: must not be negative"),
    ({"step_timeout_seconds": -0.5}, "training.step_timeout_seconds=-0.5: must not be negative; try 600, 0 for no"),
    (
        {"first_step_timeout_seconds": 0.0},
        "training.first_step_timeout_seconds=0.0: must be positive; try 600, or null",
    ),
    ({"microbatch": 0}, "training.microbatch=0: must be at least 1; try 1, or null for all"),
    ({"loss_chunk": -2}, "training.loss_chunk=-2: is a number of tokens; try 1024, 0 for whole logits, or -1"),
    ({"max_grad_norm": 0.0}, "training.max_grad_norm=0.0: must be positive; try 1.0, or null"),
]


@pytest.mark.parametrize(("fields", "line"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_that_breaks_a_rule(fields, line):
    with pytest.raises(ConfigError) as refused:
        Training(**fields)
    assert str(refused.value).startswith(line)


def test_zero_means_never_or_no_limit():
    never = {"validate_every": 0, "check_every": 0, "compare_ranks_every": 0, "step_timeout_seconds": 0.0}
    training = Training(**never, unmeasured_steps=0, nan_limit=0)
    assert {name: getattr(training, name) for name in never} == never


def test_the_smallest_numbers_are_taken():
    smallest = dict.fromkeys(("steps", "seq_len", "global_batch", "microbatch", "log_every", "gc_every"), 1)
    training = Training(**smallest, validation_sequences=1, max_grad_norm=1e-9, first_step_timeout_seconds=1e-9)
    assert {name: getattr(training, name) for name in smallest} == smallest


def test_null_leaves_a_limit_out():
    nulls = dict.fromkeys(("microbatch", "max_grad_norm", "step_timeout_seconds", "first_step_timeout_seconds"))
    training = Training(**nulls)
    assert {name: getattr(training, name) for name in nulls} == nulls


def test_null_as_a_chunk_is_0_so_that_both_have_one_name():
    assert Training(loss_chunk=None).loss_chunk == Training(loss_chunk=0).loss_chunk == 0
