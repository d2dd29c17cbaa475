"""Configs of trackers: found, light, and refused with a cure; and what the environment makes of wandb's mode."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.techniques.tracker.trackers_schema import TensorBoard, Wandb
from titanlab.techniques.tracker.wandb import has_key, resolve_mode

CONF = Path(__file__).parents[2] / "conf" / "tracker"


def test_every_kind_is_found_and_has_its_yaml_of_fields_that_are_there():
    kinds = discover()["tracker"]
    assert sorted(map(str, kinds)) == sorted(path.stem for path in CONF.glob("*.yaml"))
    for kind in ("jsonl", "tensorboard", "wandb"):
        values = yaml.safe_load((CONF / f"{kind}.yaml").read_text())
        assert values.pop("defaults") == [f"{kind}_schema", "_self_"]
        assert kinds[kind].schema(**values) == kinds[kind].schema()


def test_no_tracker_imports_what_it_tracks_with():
    modules = "trackers_schema tensorboard wandb contract".split()
    code = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module('titanlab.techniques.tracker.' + name)\n"
        "print([name for name in ('torch', 'wandb', 'tensorboard') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("schema", "values", "line"),
    [
        (TensorBoard, {"flush_seconds": 0}, "tracker.flush_seconds=0"),
        (Wandb, {"mode": "on"}, "tracker.mode"),
        (Wandb, {"project": ""}, "tracker.project"),
        *((Wandb, {"project": f"a{letter}b"}, "tracker.project=.*must be 1 to 128 characters") for letter in "/\\#?%:"),
        (Wandb, {"entity": "x" * 129}, "tracker.entity"),
        (Wandb, {"group": "a#b"}, "tracker.group"),
        (Wandb, {"tags": ["ok", ""]}, "tracker.tags"),
        (Wandb, {"tags": ["x" * 65]}, "tracker.tags"),
        (Wandb, {"finish_seconds": -1.0}, "tracker.finish_seconds"),
        (Wandb, {"queue_rows": 0}, "tracker.queue_rows"),
    ],
)
def test_wrong_values_are_refused(schema, values, line):
    with pytest.raises(ConfigError, match=f"^{line}"):
        schema(**values)


def test_values_at_the_ends_of_their_ranges_are_taken():
    longest = "x" * 128
    names = {"project": longest, "entity": "é 1", "group": longest, "tags": ("y", "z" * 64)}
    made = Wandb(**names, finish_seconds=0, queue_rows=1)
    taken = {name: getattr(made, name) for name in (*names, "finish_seconds", "queue_rows")}
    assert taken == {**names, "finish_seconds": 0, "queue_rows": 1}


def test_a_tracker_that_writes_needs_its_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    Wandb(mode="off").check_installed()
    for config in (TensorBoard(), *(Wandb(mode=mode) for mode in ("auto", "online", "offline"))):
        rule = f"^tracker={config.kind}: the package is not installed; pip install {config.kind}"
        with pytest.raises(ConfigError, match=rule):
            config.check_installed()


def test_a_rebuild_writes_offline_and_loses_no_row():
    rebuilt = Wandb(mode="online", project="mine", tags=["a"], finish_seconds=1, queue_rows=10).for_rebuild(1_000_000)
    assert (rebuilt.mode, rebuilt.project, rebuilt.tags) == ("offline", "mine", ("a",))
    # All rows and the summary wait at once, and there is time for some thousand rows a second.
    assert rebuilt.queue_rows > 1_000_000
    assert rebuilt.finish_seconds > 1_000_000 / 5_000


@pytest.mark.parametrize(
    ("mode", "environ", "wanted"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x"}, "online"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_API_KEY": "x", "WANDB_MODE": "disabled"}, "off"),
        ("auto", {"WANDB_MODE": "online"}, "offline"),
        ("offline", {"WANDB_API_KEY": "x"}, "offline"),
        ("online", {"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "online"),
        ("off", {"WANDB_API_KEY": "x"}, "off"),
    ],
)
def test_which_mode(tmp_path, mode, environ, wanted):
    assert resolve_mode(Wandb(mode=mode), {"HOME": str(tmp_path), **environ}) == wanted


def test_where_a_key_may_be(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert not has_key(home)
    (tmp_path / ".netrc").write_text("machine example.org login user password x\n")
    assert not has_key(home)
    assert has_key({**home, "WANDB_BASE_URL": "https://example.org"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert has_key(home)
    (tmp_path / "other").write_text("broken [")
    assert not has_key({**home, "NETRC": str(tmp_path / "other")})
    assert has_key({**home, "WANDB_IDENTITY_TOKEN_FILE": "x"})
