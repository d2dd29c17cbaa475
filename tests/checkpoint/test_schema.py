"""Configs of checkpoints: each names its saver, and what makes no sense is refused."""

from __future__ import annotations

import pytest

from tests import tiny
from titanlab.checkpoint import NoCheckpoints
from titanlab.checkpoint.schema import Async, AsyncPinned, Sync
from titanlab.checkpoint.store import AsyncSaver, NoSaver, SyncSaver
from titanlab.errors import ConfigError
from titanlab.recipe import to_mapping
from titanlab.recipe.next_attempt import overridden
from titanlab.records import canonical


def test_a_config_names_its_saver(target):
    assert isinstance(NoCheckpoints().implementation(target()), NoSaver)
    assert isinstance(Sync().implementation(target()), SyncSaver)
    assert isinstance(Async().implementation(target()), AsyncSaver)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoCheckpoints(every=5), r"checkpoint.every=5: checkpoint=off saves nothing"),
        (lambda: NoCheckpoints(minutes=5), r"checkpoint.minutes=5: checkpoint=off saves nothing"),
        (lambda: Sync(minutes=-1), r"checkpoint.minutes=-1: must not be negative"),
        (lambda: Sync(every=300, keep_every=1000), r"keep_every=1000: no multiple of checkpoint.every=300.*try 900"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_pinned_memory_is_refused_on_cpu():
    class Setting:
        accelerator = "cpu"

    with pytest.raises(ConfigError, match="checkpoint=async_pinned: pinned memory is for GPUs; try checkpoint=async"):
        AsyncPinned().check(Setting())


def test_how_a_run_saves_is_no_part_of_its_identity(tmp_path):
    assert canonical(tiny.recipe(tmp_path, every=3)) == canonical(tiny.recipe(tmp_path, every=3, saves="async"))


def test_how_a_run_saves_may_change_between_its_attempts(tmp_path):
    config = to_mapping(tiny.recipe(tmp_path, every=3))
    made = overridden(config, ["checkpoint.kind=async", "checkpoint.minutes=10"], file=tmp_path / "config.yaml")
    assert made.checkpoint == Async(every=3, minutes=10.0)
