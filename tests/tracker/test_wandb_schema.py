"""Config of tracker=wandb: which values wandb takes, whether it is installed, and what a rebuild changes."""

from __future__ import annotations

import importlib.util

import pytest

from titanlab.errors import ConfigError
from titanlab.techniques.tracker.trackers_schema import Wandb


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"mode": "on"}, "tracker.mode"),
        ({"project": "a/b"}, "tracker.project"),
        ({"project": ""}, "tracker.project"),
        ({"entity": "x" * 129}, "tracker.entity"),
        ({"group": "a#b"}, "tracker.group"),
        ({"tags": ["ok", ""]}, "tracker.tags"),
        ({"tags": ["x" * 65]}, "tracker.tags"),
        ({"finish_seconds": -1.0}, "tracker.finish_seconds"),
        ({"queue_rows": 0}, "tracker.queue_rows"),
    ],
)
def test_wrong_values_are_refused(values, key):
    with pytest.raises(ConfigError, match=f"^{key}="):
        Wandb(**values)


@pytest.mark.parametrize("letter", "/\\#?%:")
def test_a_name_becomes_a_part_of_an_address(letter):
    for name in ("project", "entity", "group"):
        with pytest.raises(ConfigError, match=f"^tracker.{name}=.*must be 1 to 128 characters without"):
            Wandb(**{name: f"a{letter}b"})


def test_values_at_the_ends_of_their_ranges_are_taken():
    longest = "x" * 128
    config = Wandb(project=longest, entity="é 1", group=longest, tags=["y", "z" * 64], finish_seconds=0, queue_rows=1)
    assert (config.group, config.finish_seconds, config.queue_rows) == (longest, 0, 1)


@pytest.mark.parametrize("mode", ["auto", "online", "offline", "off"])
def test_every_mode_that_writes_needs_the_package(monkeypatch, mode):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if mode == "off":
        Wandb(mode=mode).check_installed()
        return
    with pytest.raises(ConfigError, match="^tracker=wandb: the package is not installed; pip install wandb"):
        Wandb(mode=mode).check_installed()


def test_a_rebuild_writes_offline_and_loses_no_row():
    config = Wandb(mode="online", project="mine", tags=["a"], finish_seconds=1, queue_rows=10)
    rebuilt = config.for_rebuild(1_000_000)
    assert (rebuilt.mode, rebuilt.project, rebuilt.tags) == ("offline", "mine", ("a",))
    # All rows and the summary wait at once, and there is time for some thousand rows a second.
    assert rebuilt.queue_rows > 1_000_000
    assert rebuilt.finish_seconds > 1_000_000 / 5_000
    assert config.for_rebuild(1).finish_seconds > 60
    assert (config.mode, config.queue_rows) == ("online", 10)
