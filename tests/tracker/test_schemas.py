"""Configs of trackers: found, light, and refused with a cure; and what the environment makes of wandb's mode."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from titanlab.errors import ConfigError, TitanlabError
from titanlab.techniques.tracker import wandb as wandb_upload
from titanlab.techniques.tracker.contract import (
    RECORD_FILE,
    Record,
    file_of,
    read_record,
    records_in,
    write_record,
)
from titanlab.techniques.tracker.trackers_schema import TensorBoard, Wandb
from titanlab.techniques.tracker.wandb import has_key, lack, resolve_mode, upload


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
        (Wandb, {"tags": ["ok", ""]}, "tracker.tags"),
        (Wandb, {"tags": ["x" * 65]}, "tracker.tags"),
        (Wandb, {"finish_seconds": -1.0}, "tracker.finish_seconds"),
        (Wandb, {"queue_rows": 0}, "tracker.queue_rows"),
    ],
)
def test_wrong_values_are_refused(schema, values, line):
    with pytest.raises(ConfigError, match=f"^{line}"):
        schema(**values)


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
    for broken in (b"broken [", b"machine caf\xe9 login user password x\n"):
        (tmp_path / "other").write_bytes(broken)
        assert not has_key({**home, "NETRC": str(tmp_path / "other")})
    assert has_key({**home, "WANDB_IDENTITY_TOKEN_FILE": "x"})


# The record of a tracker: a damaged one counts as none


WHOLE = {"schema": 1, "kind": "wandb", "state": "open", "step": 5, "rows": 5, "folder": "wandb/run-1"}


def test_each_tracker_has_its_own(tmp_path):
    for kind in ("wandb", "tensorboard"):
        write_record(tmp_path / file_of(kind), Record(kind=kind))
    (tmp_path / "tracker-broken.json").write_text("{")
    assert sorted(records_in(tmp_path)) == ["tensorboard", "wandb"]
    # On a full or absent disk the record stays as it is, and nothing stops.
    write_record(tmp_path / "none" / RECORD_FILE, Record(kind="wandb"))
    assert records_in(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "change",
    [
        *({"schema": 2}, {"kind": None}, {"step": "5"}, {"step": 5.5}, {"step": True}, {"rows": None}),
        *({"left_out": "many"}, {"attempt": [1]}, {"state": 3}, {"folder": 7}, {"wanted": {}}, {"rebuilt": "no"}),
    ],
)
def test_a_value_of_another_kind_makes_it_none(tmp_path, change):
    """Sums and comparisons of records would end with a traceback."""
    # A field of a later version is left out.
    (tmp_path / RECORD_FILE).write_text(json.dumps({**WHOLE, "color": "red"}))
    assert read_record(tmp_path / RECORD_FILE) is not None
    (tmp_path / RECORD_FILE).write_text(json.dumps({**WHOLE, **change}))
    assert read_record(tmp_path / RECORD_FILE) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\udce9", json.dumps({"schema": 1})])
def test_what_is_no_record_is_none(tmp_path, text):
    (tmp_path / RECORD_FILE).write_text(text, errors="surrogateescape")
    assert read_record(tmp_path / RECORD_FILE) is None


# Uploads of wandb's files: why they would fail, and in which order they go up


KEY = {"WANDB_API_KEY": "k" * 40, "HOME": "/nowhere"}


@pytest.fixture
def connections(monkeypatch):
    """Places that were tried; a connection to a name with `down` fails."""
    tried = []

    def connect(place, timeout):
        tried.append(place)
        if "down" in place[0]:
            raise OSError("no route")
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(socket, "create_connection", connect)
    return tried


def test_without_a_key_nothing_is_tried(connections):
    told = str(lack({"HOME": "/nowhere"}))
    assert told.startswith("WANDB_API_KEY=null: no API key of wandb was found; make one known (`wandb login`")
    assert connections == []


@pytest.mark.parametrize(
    ("base", "place"),
    [
        (None, ("api.wandb.ai", 443)),
        ("", ("api.wandb.ai", 443)),
        ("http://own.example", ("own.example", 80)),
        ("https://own.example:8443/path", ("own.example", 8443)),
    ],
)
def test_the_server_is_tried_at_its_port(connections, base, place):
    assert lack({**KEY, **({} if base is None else {"WANDB_BASE_URL": base})}) is None
    assert connections == [place]


@pytest.mark.parametrize("base", ["https://down.example", "https://own.example:port", "https://own.example:99999"])
def test_a_server_that_cannot_be_reached_is_told(connections, base):
    told = str(lack({**KEY, "WANDB_BASE_URL": base}))
    assert told.startswith(f"WANDB_BASE_URL={base}: cannot be reached (")
    assert "call titanlab sync where there is a network" in told


@pytest.mark.parametrize("proxy", ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_behind_a_proxy_a_direct_connection_says_nothing(connections, proxy):
    assert lack({**KEY, "WANDB_BASE_URL": "https://down.example", proxy: "http://proxy:3128"}) is None
    assert connections == []


@pytest.fixture
def calls(monkeypatch):
    """Files of each command; a file with `bad` in its name is not uploaded."""
    commands = []

    def run(command, *, stdin, check):
        assert command[:6] == [sys.executable, "-P", "-m", "wandb", "sync", "--include-online"]
        assert (stdin, check) == (subprocess.DEVNULL, False)
        commands.append([path.rpartition("/")[2] for path in command[6:]])
        for path in command[6:]:
            if "bad" not in path:
                open(f"{path}.synced", "w").close()

    monkeypatch.setattr(wandb_upload, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
    return commands


def test_each_command_has_one_file_of_each_run(calls, tmp_path):
    upload(
        [[tmp_path / "a1", tmp_path / "a2", tmp_path / "a3"], [tmp_path / "b1"], [], [tmp_path / "c1", tmp_path / "c2"]]
    )
    upload([[], []])
    assert calls == [["a1", "b1", "c1"], ["a2", "c2"], ["a3"]]


def test_what_follows_a_file_that_fails_waits(calls, tmp_path):
    runs = [[tmp_path / "a1", tmp_path / "bad", tmp_path / "a3"], [tmp_path / "b1", tmp_path / "b2", tmp_path / "b3"]]
    with pytest.raises(TitanlabError, match=f"^wandb has not uploaded {tmp_path}/bad and 1 more$"):
        upload(runs)
    assert calls == [["a1", "b1"], ["bad", "b2"], ["b3"]]
