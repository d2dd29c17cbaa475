"""Plant the faults of `faults.toml`, one at a time, in a copy of the tree, and see which tests notice.

    python -m tests.oracle.plant [--write] [ID or AREA …]

The tests that the faults name run once without a fault, where all must pass; then with each fault, until one fails.
Exit code 1: a fault that was caught escapes, an old text does not stand exactly once, or a test cannot tell. `--write`
keeps what was found as `caught` and `by` in the list.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("faults.toml")
# Beyond it a test says nothing: the machine may be busy.
LIMIT_SECONDS = 600
# What pytest says of the first test that fails: FAILED tests/a.py::test_b[c] - why
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle.plant", description=__doc__.partition("\n")[0])
    parser.add_argument("chosen", nargs="*", metavar="ID or AREA", help="default: all faults")
    parser.add_argument("--write", action="store_true", help="keep what was found in the list")
    arguments = parser.parse_args()
    known = tomllib.loads(LIST.read_text())["fault"]
    unknown = set(arguments.chosen) - {fault[key] for fault in known for key in ("id", "area")}
    if unknown or len({fault["id"] for fault in known}) < len(known):
        parser.error(f"no such fault or area: {', '.join(sorted(unknown))}" if unknown else "two faults have one id")
    faults = [f for f in known if not arguments.chosen or {f["id"], f["area"]} & set(arguments.chosen)]
    with tempfile.TemporaryDirectory(prefix="titanlab-oracle-") as folder:
        copy = Path(folder) / "tree"
        copy_tree(copy)
        sources = {path: path.read_text() for path in sorted((copy / "titanlab").rglob("*.py"))}
        tests = {path: path.read_text() for path in sorted((copy / "tests").rglob("test_*.py"))}
        nodes = {f["id"]: [node_of(name, tests, copy) for name in f["tests"]] for f in faults}
        print(f"{len(faults)} faults; their tests without a fault …", flush=True)
        failed, seconds = run(copy, sorted({node for named in nodes.values() for node in named}), limit=3600)
        if failed:
            print(f"without a fault: {failed}")
            return 1
        print(f"… pass ({seconds:.0f} s)\n", flush=True)
        wrong = 0
        for fault in faults:
            where = [path for path, text in sources.items() for _ in range(text.count(fault["old"]))]
            if len(where) != 1:
                found, seconds = f"NOT PLANTED: the old text stands {len(where)} times", 0.0
                wrong += 1
            else:
                replace(where[0], sources[where[0]].replace(fault["old"], fault["new"]))
                found, seconds = run(copy, nodes[fault["id"]], limit=LIMIT_SECONDS)
                replace(where[0], sources[where[0]])
                wrong += (fault["caught"] and not found) or found.startswith("NO VERDICT")
            line = f"{fault['id']:38} {'caught' if found else 'ESCAPED':8} {seconds:4.0f} s  {found}"
            print(line if found or fault["caught"] else f"{line}(as known)", flush=True)
            if arguments.write and len(where) == 1 and not found.startswith("NO VERDICT"):
                write(fault["id"], found)
    return 1 if wrong else 0


def copy_tree(copy: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore, as they are in the working tree."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")):
        source, target = ROOT / os.fsdecode(name), copy / os.fsdecode(name)
        if source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    imported = "import titanlab; print(titanlab.__file__)"
    shown = subprocess.run([sys.executable, "-c", imported], cwd="/", env=environment(copy), capture_output=True)
    assert shown.stdout.decode().startswith(str(copy.resolve())), f"the copy is not what is imported: {shown}"


def environment(copy: Path) -> dict[str, str]:
    """Of all processes in the copy: theirs is the copy's package, and not the one that is installed."""
    return {**os.environ, "PYTHONPATH": str(copy), "TMPDIR": str(copy.parent)}


def node_of(name: str, tests: dict[Path, str], copy: Path) -> str:
    """The node id of a test: of a bare name, in whichever file it now stands."""
    if name.startswith("tests/"):
        return name
    function = re.compile(rf"^def {re.escape(name.partition('[')[0])}\(", re.MULTILINE)
    files = [path.relative_to(copy) for path, text in tests.items() if function.search(text)]
    if len(files) != 1:
        raise SystemExit(f"{name}: must be a test in one file, and stands in {', '.join(map(str, files)) or 'none'}")
    return f"{files[0]}::{name}"


def replace(path: Path, text: str) -> None:
    path.write_text(text)
    # Python compares seconds and size only: it could take the compiled code of before.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def run(copy: Path, nodes: Sequence[str], *, limit: float) -> tuple[str, float]:
    """The first test that fails, or why none could tell; empty if all pass. And the seconds that it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb=line", "-p", "no:cacheprovider", *nodes]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"NO VERDICT: not within {limit:.0f} s", time.monotonic() - began
    seconds = time.monotonic() - began
    failed = FAILED.search(output)
    if process.returncode == 0:
        return "", seconds
    if process.returncode == 1 and failed:
        return failed[1], seconds
    # Not even the tests could be collected: such a fault is not a silent one.
    return "NO VERDICT: " + " | ".join(output.splitlines()[-5:]), seconds


def write(name: str, found: str) -> None:
    """Keep what was found in the list, and all else in it as it stands."""
    blocks: list[Any] = LIST.read_text().split("[[fault]]\n")
    for index, block in enumerate(blocks):
        if f'id = "{name}"\n' in block:
            block = re.sub(r"^caught = .*$", f"caught = {str(bool(found)).lower()}", block, flags=re.MULTILINE)
            blocks[index] = re.sub(r"^by = .*$", lambda _: f"by = '{found}'", block, flags=re.MULTILINE)
    LIST.write_text("[[fault]]\n".join(blocks))


if __name__ == "__main__":
    sys.exit(main())
