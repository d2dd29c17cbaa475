"""Uploads of wandb's files: why they would fail, and in which order they go up."""

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

from titanlab.errors import TitanlabError
from titanlab.techniques.tracker import wandb as wandb_upload
from titanlab.techniques.tracker.wandb import lack, upload

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
