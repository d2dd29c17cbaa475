"""Imports that the garbage collector leaves alone."""

import gc
import subprocess
import sys

import pytest

from titanlab.system import kept_imports


@pytest.fixture
def collector():
    """Leaves the collector as it was."""
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_in_the_block_and_what_was_made_there_is_kept(collector, enabled):
    (gc.enable if enabled else gc.disable)()
    kept = gc.get_freeze_count()
    with kept_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(10_000)]
    assert gc.isenabled() is enabled
    assert gc.get_freeze_count() >= kept + len(made)


def test_an_import_that_fails_leaves_the_collector_on(collector):
    gc.enable()
    with pytest.raises(ImportError), kept_imports():
        raise ImportError("a planted fault")
    assert gc.isenabled()


# What is registered first runs last.
AT_EXIT = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 0))
from titanlab.system.imports import kept_imports
with kept_imports():
    sys.modules[sys.argv[1]] = sys
"""


@pytest.mark.parametrize(("module", "stays"), [("triton", "False"), ("another", "True")])
def test_triton_s_objects_are_collected_at_the_exit(module, stays):
    """nanobind, which newer Tritons are built with, prints pages about objects that are left."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT, module], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == stays
