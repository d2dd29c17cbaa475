"""Which tests one worker of pytest-xdist runs: those of one file, or those of many files with tests of ranks."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Fixtures by which a test starts ranks. A test that starts ranks by another fixture fails.
RANK_FIXTURES = {"pool", "curves", "traces"}
RANK_UNITS = 2


class RanksTogether(LoadScopeScheduling):
    """Files are the units of work, and all files with tests of ranks are two units.

    A worker that runs such a unit has a pool of ranks, which takes seconds to start and holds gigabytes: most workers
    should have none. Two pools use the cores better than one, since ranks wait for each other most of the time.
    pytest-xdist's own groups (`--dist loadgroup`) have no effect in pytest 9.2: pytest-xdist 3.8 appends the group to
    `Item._nodeid`, which that pytest no longer reads.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._units: dict[str, str] = {}  # of the files with tests of ranks, in the order in which they were collected

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if not starts_ranks(self.config.rootpath / file):
            return file
        return self._units.setdefault(file, f"ranks {len(self._units) % RANK_UNITS}")


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
