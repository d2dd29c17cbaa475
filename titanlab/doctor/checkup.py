"""All checks of a machine, in the order of the report. They run at the same time, each with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titanlab.data import cache as data_cache
from titanlab.doctor import host, software
from titanlab.errors import ConfigError
from titanlab.launch import LaunchConfig, default_config
from titanlab.options import discover
from titanlab.system import FAIL, WARN, Finding, warn
from titanlab.techniques.compile import cache as compile_cache


@dataclass(frozen=True)
class Check:
    """A probe, and how long it may take.

    Attributes:
        name: shown if the probe does not answer.
        find: returns findings, or raises any error.
        seconds: time limit. A function that hangs, for example in a file system that does not answer, is abandoned.
        is_needed: whether a probe that does not answer is a failure; otherwise it is a warning.
    """

    section: str
    name: str
    find: Callable[[], Iterable[Finding]]
    seconds: float = field(default=20.0, kw_only=True)
    is_needed: bool = field(default=True, kw_only=True)


def checks(runs: Path, launch: LaunchConfig | None) -> list[Check]:
    """The checks of `titanlab doctor`.

    Args:
        launch: the launcher that the user has named; None: check all launchers with their defaults.
    """
    needs_shared = launch is not None and not launch.runs_here
    torch_seconds = software.FACTS_SECONDS + 2 * software.REDUCE_SECONDS + 10
    return [
        Check("software", "Python", software.check_python),
        Check("software", "code", software.check_code, is_needed=False),
        Check("software", "wandb", software.check_wandb, is_needed=False),
        Check("devices", "torch", software.check_torch_here, seconds=torch_seconds),
        Check("devices", "GPUs", software.check_gpus, seconds=50.0),
        Check("host", "cores", host.check_cores),
        Check("host", "shared memory", host.check_shared_memory),
        Check("host", "limits", host.check_ulimits),
        Check("host", "network", host.check_network, is_needed=False),
        Check("storage", "folder of runs", lambda: host.check_runs(runs, needs_shared=needs_shared), seconds=60.0),
        Check("storage", "data cache", lambda: host.check_cache("data cache", data_cache.location())),
        Check(
            "storage",
            "compile cache",
            lambda: host.check_cache("compile cache", compile_cache.own_folder(), is_executed=True),
        ),
        *(_of_launcher(str(kind), launch) for kind in discover()["launch"]),
    ]


def _of_launcher(kind: str, launch: LaunchConfig | None) -> Check:
    is_chosen = launch is not None and launch.kind == kind
    try:
        config = launch if launch is not None and is_chosen else default_config(kind)
    except ConfigError as error:
        # Only a warning: this launcher comes from another package, and the user has not chosen it.
        problem = [warn("config", str(error), "mend or remove its package")]
        return Check(kind, kind, lambda: problem, is_needed=False)
    # Create the launcher inside the check: if it comes from another package, it may raise any error.
    find = lambda: config.implementation().findings()  # noqa: E731
    return Check(config.title, config.title, find, seconds=90.0, is_needed=is_chosen)


def run_checks(checks: Sequence[Check]) -> Iterator[tuple[Check, list[Finding]]]:
    """Run all checks at the same time; yield each check with its findings, in the given order.

    No check takes longer than its limit, and no error of a check is raised.
    """
    found: dict[int, list[Finding]] = {}

    def unknown(check: Check, text: str, hint: str = "") -> list[Finding]:
        return [Finding(name=check.name, state=FAIL if check.is_needed else WARN, text=text, hint=hint)]

    def run(number: int, check: Check) -> None:
        try:
            found[number] = list(check.find())
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            found[number] = unknown(check, f"could not be checked ({text})")

    begin = time.monotonic()
    # A daemon thread that hangs does not keep the process alive.
    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(checks)]
    for thread in threads:
        thread.start()
    for number, (check, thread) in enumerate(zip(checks, threads, strict=True)):
        thread.join(max(0.0, begin + check.seconds - time.monotonic()))
        hint = "it hangs: look for a network, a disk or a driver that does not answer"
        yield check, found.get(number, unknown(check, f"gave no answer within {check.seconds:g} s", hint))
