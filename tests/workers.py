"""Which tests one worker of pytest-xdist runs: all tests of ranks, or the tests of one file."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Fixtures by which a test starts ranks. A test that starts ranks by another fixture fails.
RANK_FIXTURES = {"pool", "curves"}


class RanksTogether(LoadScopeScheduling):
    """Files are the units of work, and all files with tests of ranks are one unit.

    So there is one pool of ranks: it holds gigabytes, and its ranks use every core.
    pytest-xdist's own groups (`--dist loadgroup`) have no effect in pytest 9.2: pytest-xdist 3.8 appends the group to
    `Item._nodeid`, which that pytest no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ranks" if starts_ranks(self.config.rootpath / file) else file


@functools.cache
def starts_ranks(file: Path) -> bool:
    """Whether a function in the file has a parameter that is a fixture of RANK_FIXTURES."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    return any(argument.arg in RANK_FIXTURES for function in functions for argument in function.args.args)


def check(item: pytest.Item) -> None:
    """Fail a test that starts ranks in a file in which the scheduler sees none."""
    fixtures: Any = getattr(item, "fixturenames", ())
    if "pool" in fixtures and not starts_ranks(item.path):
        pytest.fail("this test starts ranks: add its fixture to RANK_FIXTURES in tests/workers.py", pytrace=False)
