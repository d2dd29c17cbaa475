"""What the imports of ranks ask the file system."""

import inspect
import pathlib
import sys

from torch._library.utils import get_source

from titanlab.launch.rank.rank import _frames_know_their_module


def test_torch_finds_the_caller_of_an_operator_without_a_look_at_every_module(monkeypatch):
    searched = inspect.getmodule
    looked = []
    monkeypatch.setattr(inspect.os.path, "realpath", lambda path, **_: looked.append(path) or path)
    frame = sys._getframe()
    with _frames_know_their_module():
        assert inspect.getmodule(frame) is sys.modules[__name__]
        # As torch does for each operator that it registers.
        assert get_source(1) == f"{__file__}:{frame.f_lineno}"
        assert looked == []
        assert inspect.getmodule(pathlib.Path) is pathlib
        unnamed = eval("sys._getframe()", {"sys": sys})
        assert inspect.getmodule(unnamed) is None
    assert inspect.getmodule is searched
