"""All checks of a machine, in the order of the report. They run at the same time, each with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlab.data import cache as data_cache
from titanlab.doctor import limits, software, storage
from titanlab.errors import ConfigError
from titanlab.launch.contract import LaunchConfig
from titanlab.launch.launchers import default_config
from titanlab.options import discover
from titanlab.system.text import FAIL, WARN, Finding, warn
from titanlab.techniques.compile import cache as compile_cache


def checks(runs: Path, launch: LaunchConfig | None) -> list[Check]:
    """The checks.

    Args:
        runs: the folder of runs.
        launch: the launcher that the user has named; None: none, and all are checked with their defaults.
    """
    needs_shared = launch is not None and not launch.runs_here
    torch_seconds = software.FACTS_SECONDS + 2 * software.REDUCE_SECONDS + 10
    return [
        _check("software", "Python", software.check_python),
        _check("software", "code", software.check_code, is_needed=False),
        _check("software", "wandb", software.check_wandb, is_needed=False),
        _check("devices", "torch", _check_torch, seconds=torch_seconds),
        _check("devices", "GPUs", software.check_gpus, seconds=50.0),
        _check("host", "cores", limits.check_cores),
        _check("host", "shared memory", limits.check_shared_memory),
        _check("host", "limits", limits.check_ulimits),
        _check("host", "network", limits.check_network, is_needed=False),
        _check("host", "clock", limits.check_clock, is_needed=False),
        _check("storage", "folder of runs", lambda: storage.check_runs(runs, needs_shared=needs_shared), seconds=60.0),
        _check("storage", "data cache", lambda: storage.check_cache("data cache", data_cache.location())),
        _check("storage", "compile cache", _check_compile_cache),
        *(_check_launcher(str(kind), launch) for kind in discover()["launch"]),
    ]


def _check_launcher(kind: str, launch: LaunchConfig | None) -> Check:
    is_chosen = launch is not None and launch.kind == kind
    try:
        config = launch if launch is not None and is_chosen else default_config(kind)
    except ConfigError as error:
        # Of a launcher of another package, which nobody has chosen.
        problem = [warn("config", str(error), "mend or remove its package")]
        return _check(kind, kind, lambda: problem, is_needed=False)

    def find() -> Iterator[Finding]:
        # Made inside the check: a launcher of another package may raise anything.
        return config.implementation().findings()

    return _check(config.title, config.title, find, seconds=90.0, is_needed=is_chosen)


def _check(
    section: str, name: str, find: Callable[[], Iterable[Finding]], *, seconds: float = 20.0, is_needed: bool = True
) -> Check:
    return Check(section=section, name=name, find=find, seconds=seconds, is_needed=is_needed)


def _check_torch() -> Iterator[Finding]:
    facts, problem = software.torch_facts()
    yield from software.check_torch(facts, problem)
    if facts.get("gloo"):
        yield software.check_all_reduce("gloo", 2)
    if facts.get("nccl") and facts.get("devices"):
        yield software.check_all_reduce("nccl", len(facts["devices"]))


def _check_compile_cache() -> Iterator[Finding]:
    return storage.check_cache("compile cache", compile_cache.own_folder(), is_executed=True)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A function that finds something out, and how long it may take.

    Attributes:
        section: the part of the report.
        name: for the case that it does not answer.
        find: returns findings, or raises any error.
        seconds: its limit. A function that hangs, say in a file system that does not answer, is left alone.
        is_needed: whether training does not work without an answer.
    """

    section: str
    name: str
    find: Callable[[], Iterable[Finding]]
    seconds: float = 20.0
    is_needed: bool = True


def run_checks(checks: Sequence[Check]) -> Iterator[tuple[Check, list[Finding]]]:
    """Run all checks at the same time; give the findings of each in the order of the checks.

    No check takes longer than its limit, and no error of a check is raised.
    """
    started = [_RunningCheck(check) for check in checks]
    for running in started:
        yield running.check, running.findings()


class _RunningCheck:
    """A check in a thread of its own, which does not keep the process alive."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self._found: list[Finding] | None = None
        self._end = time.monotonic() + check.seconds
        self._thread = threading.Thread(target=self._run, name=f"check {check.name}", daemon=True)
        self._thread.start()

    def findings(self) -> list[Finding]:
        self._thread.join(max(0.0, self._end - time.monotonic()))
        if self._found is not None:
            return self._found
        text = f"gave no answer within {self.check.seconds:g} s"
        return [self._unknown(text, "it hangs: look for a network, a disk or a driver that does not answer")]

    def _run(self) -> None:
        try:
            self._found = list(self.check.find())
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._found = [self._unknown(f"could not be checked ({text})", "")]

    def _unknown(self, text: str, hint: str) -> Finding:
        state = FAIL if self.check.is_needed else WARN
        return Finding(name=self.check.name, state=state, text=text, hint=hint)
