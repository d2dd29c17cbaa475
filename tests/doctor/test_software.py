"""Python, packages against those that were tested, the code's commit, and trackers."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from titanlab.doctor import software
from titanlab.system import FAIL


def test_packages_that_differ_are_told(monkeypatch):
    tested = software.tested_versions()
    assert tested["torch"].startswith("2.")
    installed = {"torch": "2.10.0+cu128", "numpy": tested["numpy"], "PyYAML": tested["pyyaml"]}
    monkeypatch.setattr(software, "versions", lambda names: {k: v for k, v in installed.items() if k in names})
    found = {each.name: each for each in software.check_python()}
    assert found["packages"].text == f"torch 2.10.0+cu128 (tested: {tested['torch']})"


@pytest.mark.parametrize(
    ("environ", "state", "text"),
    [
        ({"WANDB_API_KEY": "secret"}, "ok", "an API key is there"),
        ({"WANDB_MODE": "offline"}, "ok", "WANDB_MODE=offline: files"),
        ({"WANDB_MODE": "disabled"}, "warn", "WANDB_MODE=disabled"),
        ({"HOME": "/nowhere"}, "ok", "no API key"),
    ],
)
def test_wandb(monkeypatch, environ, state, text):
    (finding,) = software.check_wandb(environ)
    assert finding.state == state
    assert finding.text.startswith(text)
    assert "secret" not in finding.text
    monkeypatch.setattr(software, "versions", lambda names: {})
    (finding,) = software.check_wandb(environ)
    assert (finding.state, finding.text) == ("ok", "is not installed: sweeps keep metrics.jsonl only")


@pytest.mark.parametrize(
    ("state", "level", "text"),
    [
        (None, "ok", "no git repository"),
        (SimpleNamespace(sha="a" * 40, dirty=False, patch_complete=True), "ok", f"commit {'a' * 12}, as committed"),
        (
            SimpleNamespace(sha="a" * 40, dirty=True, patch_complete=True),
            "ok",
            f"commit {'a' * 12}, changed; runs keep",
        ),
        (
            SimpleNamespace(sha="a" * 40, dirty=True, patch_complete=False),
            "warn",
            f"commit {'a' * 12}, changed by more",
        ),
    ],
)
def test_code_that_runs_cannot_keep_is_a_warning(monkeypatch, state, level, text):
    monkeypatch.setattr(software, "git_state", lambda folder: state)
    (found,) = software.check_code()
    assert (found.name, found.state) == ("code", level)
    assert found.text.startswith(text)


def test_an_old_python_and_a_set_that_is_not_known_are_told(monkeypatch):
    monkeypatch.setattr(software.sys, "version_info", (3, 10, 14))
    monkeypatch.setattr(software, "tested_versions", dict)
    found = {each.name: each for each in software.check_python()}
    assert found["Python"].state == FAIL
    assert found["packages"].text == "the set that was tested is not in this installation"
    assert found["titanlab"].text.endswith(str(Path(software.__file__).parents[1]))
