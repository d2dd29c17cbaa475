"""Python, packages against those that titanlab was tested with, git, and trackers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import titanlab
from titanlab.records.git_state import git_state
from titanlab.records.provenance import PACKAGES, versions
from titanlab.terminal.finding import Finding, fail, ok, warn
from titanlab.tracker.wandb_mode import has_key

_LEAST = (3, 11)
_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(.*?)\s*")
_BOUND = re.compile(r"(>=|<)\s*([0-9][0-9.]*)")


def check_python() -> Iterator[Finding]:
    """The interpreter, and the packages that matter."""
    version = platform.python_version()
    if sys.version_info < _LEAST:
        yield fail("Python", version, f"titanlab needs {'.'.join(map(str, _LEAST))} or later")
    else:
        yield ok("Python", f"{version}, {sys.executable}")
    yield ok("titanlab", f"{titanlab.__version__}, {Path(titanlab.__file__).parent}")
    tested, installed = tested_versions(), versions(PACKAGES)
    yield from _check_bounds(installed)
    others = [
        f"{name} {have} (tested: {tested[_plain(name)]})"
        for name, have in installed.items()
        if _plain(name) in tested and _public(have) != _public(tested[_plain(name)])
    ]
    if not tested:
        yield ok("packages", "the set that was tested is not in this installation")
    elif others:
        hint = "most other versions work; for the set that was tested: pip install -c constraints.txt"
        yield warn("packages", "; ".join(others), hint)
    else:
        yield ok("packages", f"{len(installed)} are those that were tested")


def tested_versions() -> dict[str, str]:
    """The versions in constraints.txt, which a clone has beside the package and a wheel inside; empty: neither."""
    package = Path(titanlab.__file__).parent
    for path in (package / "constraints.txt", package.parent / "constraints.txt"):
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            continue
        return {_plain(match[1]): match[2] for match in map(_NAME.match, text.splitlines()) if match}
    return {}


def _check_bounds(installed: Mapping[str, str]) -> Iterator[Finding]:
    """The packages that are missing, or older or newer than titanlab's code needs."""
    try:
        required = importlib.metadata.requires("titanlab") or []
    except importlib.metadata.PackageNotFoundError:
        yield ok("installation", "the code runs from a folder; its requirements are not known")
        return
    known = {_plain(name): version for name, version in installed.items()}
    for text in required:
        match = _REQUIREMENT.fullmatch(text.partition(";")[0])
        bounds = {} if match is None else dict(_BOUND.findall(match[2]))
        if match is None or not bounds or "extra ==" in text:
            continue
        have = known.get(_plain(match[1])) or versions([match[1]]).get(match[1])
        cure = f'pip install "{match[1]}{",".join(map("".join, bounds.items()))}"'
        if have is None:
            yield fail(match[1], "is not installed", cure)
        elif _numbers(have) < _numbers(bounds.get(">=", "")):
            yield fail(match[1], f"{have} is older than {bounds['>=']}", cure)
        elif "<" in bounds and _numbers(have) >= _numbers(bounds["<"]):
            yield fail(match[1], f"{have} is too new: titanlab needs a version below {bounds['<']}", cure)


def check_code() -> Iterator[Finding]:
    """Whether runs can say which code made them."""
    state = git_state(Path(titanlab.__file__).parent)
    if state is None:
        yield ok("code", "no git repository: runs record the version and a fingerprint of the code")
    elif not state.dirty:
        yield ok("code", f"commit {str(state.sha)[:12]}, as committed")
    elif state.patch_complete:
        yield ok("code", f"commit {str(state.sha)[:12]}, changed; runs keep the difference")
    else:
        hint = "commit: of so large a difference runs keep only a part, and titanlab repro cannot restore it"
        yield warn("code", f"commit {str(state.sha)[:12]}, changed by more than runs keep", hint)


def check_wandb(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether tracker=wandb would upload."""
    if not versions(["wandb"]):
        yield ok("wandb", "is not installed; only tracker=wandb needs it")
        return
    mode = environ.get("WANDB_MODE", "")
    if mode in ("offline", "dryrun"):
        yield ok("wandb", f"WANDB_MODE={mode}: files are kept; titanlab sync uploads them")
    elif mode == "disabled":
        yield warn("wandb", "WANDB_MODE=disabled: tracker=wandb records nothing", "unset WANDB_MODE, or offline")
    elif has_key(environ):
        yield ok("wandb", "an API key is there")
    else:
        yield ok("wandb", "no API key: tracker=wandb works offline; later `wandb login`, and titanlab sync")


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _public(version: str) -> str:
    """A version without its local part: 2.13.0+cpu is built from 2.13.0."""
    return version.partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", re.split(r"[a-z+]", version)[0]))
