import shlex
from pathlib import Path

from titanlab.checkpoint import StorePath
from titanlab.system import shown_path, sweep_argument


def test_a_path_is_shown_from_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "here" / "runs").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    assert shown_path(tmp_path / "here" / "runs") == "runs"
    assert shown_path(tmp_path / "elsewhere") == str(tmp_path / "elsewhere")
    # The current folder's name is the real one, whatever link led to it.
    assert (tmp_path / "here" / shown_path(tmp_path / "link" / "runs")).resolve() == tmp_path / "here" / "runs"


def test_an_address_of_a_store_is_shown_as_it_is():
    assert shown_path(StorePath("memory://bucket/run")) == "memory://bucket/run"


def test_a_sweep_is_named_so_that_a_command_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sweep_argument(Path("runs/mine")) == sweep_argument(tmp_path / "runs" / "mine") == "mine"
    assert sweep_argument(tmp_path / "other runs" / "mine") == "'other runs/mine'"
    assert sweep_argument(Path("mine")) == "./mine"
    (elsewhere,) = shlex.split(sweep_argument(tmp_path.parent / "mine"))
    assert Path(elsewhere) == tmp_path.parent / "mine"
