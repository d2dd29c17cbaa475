"""Measures one row: starts its process, reads what that leaves, and keeps what went wrong as data."""

from __future__ import annotations

import json
import re
import statistics
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_session import children
from gpu_session.children import ROOT, Ended, SessionError
from gpu_session.prediction import Facts, composed, flops_per_token, peak_of, predicted
from gpu_session.rows import PACKAGES, Row, rows
from gpu_session.sizes import Sizes
from gpu_session.watch import Watch
from titanlab.costs import meter
from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind, RunFolder, list_runs

# How a row has ended: CUT by the end of its call; ABSENT if the machine lacks what it needs.
MEASURED, FAILED, LATE, ABSENT, CUT = "measured", "failed", "late", "absent", "cut"
# These take the place of no row that was measured.
WITHOUT_FIGURES = (ABSENT, CUT)
_GIB = 2**30
# Seconds in which a machine imports torch, also from a slow disk.
_IMPORT = 120
# The project's settings ask for the release of pytest that it is developed with; a machine may have another.
_PYTEST_INI = """[pytest]
markers =
    full: slow
    matrix: of a product
    on_page: writes a page
    gpu: needs a GPU
    browser: needs a browser
    slurm: needs Slurm
xfail_strict = true
"""


def measured(row: Row, sizes: Sizes, facts: Facts, *, limit: float, folder: Path) -> dict[str, Any]:
    """The record of one row, whatever happens.

    Args:
        limit: seconds after which it is ended.
        folder: empty, and removed afterwards.
    """
    record: dict[str, Any] = {"row": row.name, "kind": row.kind, "keys": list(row.keys), "what": row.what}
    if row.uses:
        record["packages"] = {name: facts.packages.get(name) for name in row.uses}
    started = time.monotonic()
    reason = row.lacking(facts)
    if reason is not None:
        return {**record, "status": ABSENT, "reason": reason}
    try:
        if row.keys:
            record["predicted"] = predicted(composed(row.keys, facts))
        with Watch(facts.uuid) as watch:
            begin = time.time()
            outcome = _KINDS[row.kind](row, sizes, facts, limit, folder)
            # Of a run, while its measured steps lasted.
            watched = watch.between(*outcome.get("figures", {}).get("window", (begin, time.time())))
        record.update(outcome)
        # The products watch each figure themselves.
        record["watched"] = {} if row.kind == "products" else watched
    except ConfigError as error:
        record.update(status=FAILED, reason=f"refused before its start: {error}")
    except Exception as error:
        # One row that cannot be read must not cost the others.
        record.update(status=FAILED, reason=f"{type(error).__name__}: {error}")
    record["wall_seconds"] = round(time.monotonic() - started, 1)
    return record


def _run(row: Row, sizes: Sizes, facts: Facts, limit: float, folder: Path) -> dict[str, Any]:
    """`titanlab train` with the keys of the row."""
    del sizes
    ended, run = _trained(row, limit, folder)
    recipe = composed(row.keys, facts)
    steps = _steps(run)
    return _ended(ended, run, _speed(steps, flops_per_token(recipe), peak_of(recipe, facts)), limit)


def _trained(row: Row, limit: float, folder: Path) -> tuple[Ended, RunFolder | None]:
    command = children.python("-m", "titanlab", "train", *row.keys, "name=row", f"runs={_quoted(folder / 'runs')}")
    ended = children.run(command, folder=folder, limit=limit)
    runs = list(list_runs(folder / "runs"))
    return ended, runs[0] if runs else None


def _quoted(path: Path) -> str:
    """A path as Hydra takes it, whatever its folders are called."""
    text = str(path)
    # A backslash is one unless quotes or the end follow.
    text = re.sub(r"(\\*)(\'|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)
    return f"'{text}'"


def _steps(run: RunFolder | None) -> list[Mapping[str, Any]]:
    """The rows of metrics of a run's steps; a row a step."""
    return [] if run is None else list(run.metrics("train"))


def _speed(steps: Sequence[Mapping[str, Any]], flops: float, peak: float | None) -> dict[str, Any]:
    """Figures of the steps after warm-up, whole or cut off; empty: there are none."""
    counted = [each for each in steps if not each[meter.WARMING_UP]]
    if not counted:
        return {}
    seconds = [each[meter.STEP_SECONDS] for each in counted]
    speed = statistics.median(each[meter.TOKENS_PER_SECOND] for each in counted)
    last = counted[-1]
    figures = {
        "steps": len(counted),
        "window": (counted[0]["time"] - counted[0][meter.STEP_SECONDS], last["time"]),
        "tokens_per_second": speed,
        "tflops": speed * flops / 1e12,
        "mfu_percent": 100 * speed * flops / peak if peak else last[meter.MFU],
        "step_seconds": statistics.median(seconds),
        "step_seconds_all": seconds,
        "first_step_seconds": steps[0][meter.STEP_SECONDS],
        "first_loss": steps[0][meter.LOSS],
        "loss": last[meter.LOSS],
    }
    for name, key in (
        ("allocated_bytes", meter.MEMORY_ACTIVE),
        ("reserved_bytes", meter.MEMORY_RESERVED),
        ("resident_bytes", "memory/max_resident(GiB)"),
    ):
        if key in last:
            figures[name] = round(last[key] * _GIB)
    return figures


def _ended(ended: Ended, run: RunFolder | None, figures: dict[str, Any], limit: float) -> dict[str, Any]:
    """How a process has ended, with what it has measured by then."""
    outcome: dict[str, Any] = {"figures": figures, "status": MEASURED}
    result = None if run is None else run.result()
    if ended.code is None:
        outcome.update(status=LATE, reason=f"ended after its {limit:.0f} s")
    elif result is not None and result.kind is not OutcomeKind.DONE:
        outcome.update(status=FAILED, reason=f"{result.kind}: {result.cause}", traceback=result.traceback)
    elif ended.code != 0:
        outcome.update(status=FAILED, reason=ended.last_line)
    elif not figures:
        outcome.update(status=FAILED, reason=f"nothing was measured: {ended.last_line}")
    if outcome["status"] != MEASURED:
        outcome["log"] = ended.text[-4000:]
    return outcome


def _saves(row: Row, sizes: Sizes, facts: Facts, limit: float, folder: Path) -> dict[str, Any]:
    """A run with saves at an interval: seconds of clock that each interval takes longer than its steps."""
    ended, run = _trained(row, limit, folder)
    recipe = composed(row.keys, facts)
    steps = _steps(run)
    figures = _speed(steps, flops_per_token(recipe), peak_of(recipe, facts))
    if figures:
        figures.update(stalls(steps, sizes.interval, recipe.training.unmeasured_steps))
        saved = [path for path in folder.rglob("checkpoints/step-*/*") if path.is_file()]
        folders = {path.parent for path in saved}
        figures["checkpoint_bytes"] = sum(path.stat().st_size for path in saved) // max(1, len(folders))
        figures["checkpoints"] = len(folders)
    return _ended(ended, run, figures, limit)


def stalls(steps: Sequence[Mapping[str, Any]], interval: int, warm_up: int) -> dict[str, Any]:
    """The time that a save costs: of each interval after one, by the clock, less as many steps as before the first.

    Times are those of the rows: before a save the totals of all steps are read, so that the row of its step is written
    before the save begins.
    """
    at = {each["step"]: each["time"] for each in steps}
    quiet = [each[meter.STEP_SECONDS] for each in steps if warm_up < each["step"] <= interval]
    last = max(at)
    if not quiet or last <= interval:
        return {}
    usual, extra = statistics.median(quiet), []
    for begin in range(interval, last, interval):
        end = min(begin + interval, last)
        extra.append(at[end] - at[begin] - (end - begin) * usual)
    return {"quiet_step_seconds": usual, "extra_seconds": extra}


def _held(row: Row, sizes: Sizes, facts: Facts, limit: float, folder: Path) -> dict[str, Any]:
    """A recipe without the trainer (held.py)."""
    del sizes
    given = {"facts": asdict(facts), "keys": row.keys, "kernels": row.piece == "kernels"}
    ended, figures = _child("gpu_session.held", given, limit, folder)
    return _ended(ended, None, figures, limit)


def _products(row: Row, sizes: Sizes, facts: Facts, limit: float, folder: Path) -> dict[str, Any]:
    """The products of all recipes of the session (rates.py)."""
    del row
    possible = {each.name: each for each in rows(sizes) if each.kind == "run" and each.lacking(facts) is None}
    kernels = ["auto"] if facts.device == "cpu" else ["auto", "flash", "cudnn", "efficient"]
    kernels += [kernel for kernel in PACKAGES if f"ladder/{kernel}" in possible]
    given = {
        "facts": asdict(facts),
        "recipes": [list(each.keys) for each in possible.values()],
        "kernels": kernels,
        "seconds": sizes.seconds,
        "sustained": sizes.sustained,
        "copied": sizes.copied,
    }
    ended, figures = _child("gpu_session.rates", given, limit, folder)
    outcome = _ended(ended, None, figures, limit)
    failed = len(figures.get("failed", {}))
    if failed and outcome["status"] == MEASURED:
        count = failed + sum(len(figures[group]) for group in ("rates", "attention", "memory"))
        outcome.update(status=FAILED, reason=f"{failed} of {count} figures failed")
    return outcome


def _child(module: str, given: Mapping[str, Any], limit: float, folder: Path) -> tuple[Ended, dict[str, Any]]:
    """Run a module of the session; what it has written by its end."""
    (folder / "given.json").write_text(json.dumps(given))
    out = folder / "out.json"
    ended = children.run(
        children.python("-m", module, str(folder / "given.json"), str(out)), folder=folder, limit=limit
    )
    try:
        figures: dict[str, Any] = json.loads(out.read_text())
    except (OSError, ValueError):
        figures = {}
    return ended, figures


def _tests(row: Row, sizes: Sizes, facts: Facts, limit: float, folder: Path) -> dict[str, Any]:
    """pytest, whatever release of it the machine has."""
    del row, facts
    settings, report = folder / "pytest.ini", folder / "report.xml"
    settings.write_text(_PYTEST_INI)
    flags = [
        "-c",
        str(settings),
        "--rootdir",
        str(ROOT),
        "--confcutdir",
        str(ROOT),
        "--import-mode=importlib",
        f"--junitxml={report}",
    ]
    flags += ["-p", "no:cacheprovider", "-q", "-rf", str(ROOT / sizes.tests)]
    ended = children.run(children.python("-m", "pytest", *flags), folder=folder, limit=limit)
    figures = _tested(report)
    outcome = _ended(ended, None, figures, limit)
    if figures and figures["failed"]:
        # Not the last line: which tests, and why.
        outcome.update(status=FAILED, reason=f"{len(figures['failed'])} of {figures['tests']} tests failed")
    return outcome


def _tested(report: Path) -> dict[str, Any]:
    """The outcome of tests, from pytest's report."""
    if not report.exists():
        return {}
    cases = list(ET.parse(report).getroot().iter("testcase"))
    if not cases:
        return {}
    failed = {}
    for case in cases:
        for fault in (*case.iter("failure"), *case.iter("error")):
            failed[f"{case.get('classname')}::{case.get('name')}"] = str(fault.get("message"))[:500]
    skipped = sum(1 for case in cases if case.find("skipped") is not None)
    seconds = sum(float(case.get("time") or 0) for case in cases)
    return {
        "tests": len(cases),
        "passed": len(cases) - len(failed) - skipped,
        "skipped": skipped,
        "failed": failed,
        "seconds": seconds,
    }


_KINDS = {"run": _run, "saves": _saves, "held": _held, "products": _products, "tests": _tests}


def facts_of_this_machine() -> Facts:
    """Ask a process that imports torch.

    Raises:
        SessionError: it cannot.
    """
    with children.folder_of_its_own() as folder:
        ended = children.run(children.python("-m", "gpu_session.facts"), folder=folder, limit=_IMPORT)
    if ended.code is None:
        raise SessionError(f"torch does not start within {_IMPORT} s")
    try:
        facts = json.loads(ended.last_line) if ended.code == 0 else None
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise SessionError(f"torch does not start: {ended.last_line}")
    if facts.get("capability"):
        facts["capability"] = tuple(facts["capability"])
    return Facts(**facts)
