"""`python -m tests.oracle [--write] [SECTION …]`: exit code 1 if an answer of titanlab differs from the golden files."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.oracle.sections import GOLDEN, SECTIONS, make_work

# Losses may differ in the last bits between kinds of CPU; on one machine they are equal.
_TOLERANCE = 2e-6
_ROUNDED = ("runs", "initial_values")
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle")
    parser.add_argument("--write", action="store_true", help="write the golden files anew")
    parser.add_argument("sections", nargs="*", help=f"of {' '.join(section.__name__ for section in SECTIONS)}")
    given = parser.parse_args()
    differences = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        make_work(work)
        os.environ["TITANLAB_CACHE"] = str(work / "cache")
        for section in SECTIONS:
            name = section.__name__
            if given.sections and name not in given.sections:
                continue
            begun, golden = time.perf_counter(), GOLDEN / f"{name}.txt"
            lines = [line.replace(str(work), "<work>") for line in section(work)]
            if given.write:
                golden.write_text("\n".join(lines) + "\n")
                different = []
            else:
                different = _differences(golden.read_text().splitlines(), lines, rounded=name in _ROUNDED)
            differences += bool(different)
            print(
                f"{name}: {len(lines)} lines, {'differ' if different else 'equal'}, {time.perf_counter() - begun:.0f} s"
            )
            print("".join(f"{line}\n" for line in different), end="", flush=True)
    return 1 if differences else 0


def _differences(golden: list[str], lines: list[str], *, rounded: bool) -> list[str]:
    if rounded and len(golden) == len(lines):
        lines = [old if _close(old, new) else new for old, new in zip(golden, lines, strict=True)]
    return [
        line
        for line in difflib.unified_diff(golden, lines, "golden", "now", lineterm="", n=1)
        if not line.startswith(("---", "+++"))
    ]


def _close(old: str, new: str) -> bool:
    if _NUMBER.sub("#", old) != _NUMBER.sub("#", new):
        return False
    pairs = zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True)
    return all(abs(float(a) - float(b)) <= _TOLERANCE * max(1.0, abs(float(a))) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
