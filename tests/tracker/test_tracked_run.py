"""What a tracker is told of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from titanlab.errors import ConfigError
from titanlab.techniques.tracker.contract import TrackedRun, open_tracker

RUN = TrackedRun(
    id="ab",
    name="one",
    sweep="s",
    folder=Path("runs/one"),
    config={"layout": "of the recipe", "model": {"dim": 4}, "seed": 0},
    layout={"shard": 2, "tensor": 1},
)


def test_a_live_run_s_record_is_of_its_attempt():
    assert RUN.record == Path("runs/one/attempts/1/tracker.json")
    assert replace(RUN, attempt=12, record_file="x.json").record == Path("runs/one/attempts/12/x.json")
    # Of all attempts.
    assert replace(RUN, attempt=12, is_live=False).record == Path("runs/one/tracker.json")


def test_axes_are_there_for_filters_and_for_panels():
    flat = RUN.flat_config()
    assert (flat["layout.shard"], flat["layout.tensor"]) == (2, 1)
    assert flat["layout"] == {"shard": 2, "tensor": 1}
    assert (flat["model"], flat["attempt"]) == ({"dim": 4}, 1)


def test_the_layout_s_label_is_in_both_forms():
    flat = replace(RUN, facts={"layout.label": "fsdp 2", "device": "cpu"}).flat_config()
    assert (flat["layout.label"], flat["layout"]["label"], flat["device"]) == ("fsdp 2", "fsdp 2", "cpu")


def test_a_description_is_not_changed_by_its_flat_form():
    RUN.flat_config()["model"] = 1
    RUN.flat_config()["layout"]["shard"] = 7
    assert RUN.layout == {"shard": 2, "tensor": 1}
    assert RUN.config["model"] == {"dim": 4}


def test_a_tracker_is_started_with_the_run():
    calls = []
    tracker = SimpleNamespace(start=lambda run, *, warn: calls.append((run, warn)))
    config = SimpleNamespace(check_installed=lambda: calls.append("checked"), implementation=lambda: tracker)
    assert open_tracker(config, RUN, warn=print) is tracker
    assert calls == ["checked", (RUN, print)]


def test_a_tracker_that_is_not_installed_is_not_imported():
    def check():
        raise ConfigError("tracker", "x", "is not installed", "pip install x")

    with pytest.raises(ConfigError):
        open_tracker(SimpleNamespace(check_installed=check), RUN, warn=print)
