"""How runs end: the kinds of outcome, and the schema of result.json.

Every run gets an outcome: `classify` finds the kind from an exception, `from_exit` from the exit code of a process
that wrote no result, and `first_cause` selects the rank whose failure made the others fail.
"""

from __future__ import annotations

import enum
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from titanlab.errors import TitanlabError
from titanlab.records.failure_signs import is_secondary, kind_name
from titanlab.system.files import disk_fault, finite

SCHEMA = 1
# Types of the keys in JSON; a pair with None may be null.
KINDS: Mapping[str, Any] = {
    "kind": str,
    "step": int,
    "steps": (int, None),
    "attempt": int,
    "rank": (int, None),
    "cause": (str, None),
    "traceback": (str, None),
    "exit_code": (int, None),
    "ended": float,
    "metrics": dict,
    "scheduler": (dict, None),
}
_CAUSE_LIMIT = 500
_TRACEBACK_LIMIT = 20_000


class OutcomeKind(enum.StrEnum):
    """How a run ended; each kind has a meaning, an exit code, and a rule for retries."""

    DONE = "done"
    OOM = "oom"
    HANG = "hang"
    NAN = "nan"
    CRASH = "crash"
    PREEMPTED = "preempted"
    WALLTIME = "walltime"
    NODE_FAIL = "node_fail"
    CANCELLED = "cancelled"
    INFEASIBLE = "infeasible"
    DATA = "data"

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return _TRAITS[self].meaning

    @property
    def exit_code(self) -> int:
        """Exit code of the process; it identifies the kind even if the process wrote no result."""
        return _TRAITS[self].exit_code

    @property
    def may_continue(self) -> bool:
        """Whether the same recipe can succeed if it resumes from the last checkpoint."""
        return _TRAITS[self].may_continue

    @property
    def automatic(self) -> bool:
        """Whether a scheduler should resume the run without asking a person: the run did not cause its end."""
        return _TRAITS[self].automatic


@dataclass(frozen=True)
class _Traits:
    exit_code: int
    meaning: str
    may_continue: bool
    automatic: bool = False


# The codes respect common conventions: 2 is bad usage everywhere, 65 and 75 mean bad data and "try again" in
# sysexits.h, `timeout` and the shell use 124 to 127, and 128+N means signal N.
_TRAITS: Mapping[OutcomeKind, _Traits] = {
    OutcomeKind.DONE: _Traits(0, "all steps are done", False),
    OutcomeKind.CRASH: _Traits(1, "an error that no other word fits; the traceback says which", True),
    OutcomeKind.INFEASIBLE: _Traits(2, "the recipe breaks a rule; nothing was trained", False),
    OutcomeKind.DATA: _Traits(65, "the corpus, its tokenizer or its source could not be read", True),
    OutcomeKind.OOM: _Traits(70, "memory ran out, on the device or on the host", False),
    OutcomeKind.HANG: _Traits(71, "a step or a collective did not finish in time", True),
    OutcomeKind.NAN: _Traits(72, "the loss or the gradient is not a finite number", False),
    OutcomeKind.NODE_FAIL: _Traits(73, "a machine or a device failed", True, automatic=True),
    OutcomeKind.PREEMPTED: _Traits(75, "told to stop, by the scheduler or by SIGTERM", True, automatic=True),
    OutcomeKind.WALLTIME: _Traits(76, "the time that it was given is over", True, automatic=True),
    OutcomeKind.CANCELLED: _Traits(130, "a person or a parent process stopped it", True),
}
_BY_EXIT_CODE = {traits.exit_code: kind for kind, traits in _TRAITS.items()}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one attempt at a run; the content of result.json.

    Attributes:
        step: last finished optimizer step.
        steps: planned number of steps; None if unknown.
        attempt: number of the attempt, from 1.
        rank: the rank that failed; None if no rank failed.
        cause: first line of the error; None for a run that is done.
        traceback: of the failing rank.
        exit_code: of the failing process; -N if signal N ended it; None if unknown.
        echo: a secondary failure: another process has the cause (a lost connection, a forwarded signal).
        ended: seconds since the epoch.
        metrics: medians after warm-up, last loss and others, under the names of metrics.jsonl.
        scheduler: the scheduler's record of the job: `job_id`, `state`, `exit_code`; None if there is none.
    """

    kind: OutcomeKind
    step: int = 0
    steps: int | None = None
    attempt: int = 1
    rank: int | None = None
    cause: str | None = None
    traceback: str | None = None
    exit_code: int | None = None
    echo: bool = False
    ended: float = field(default_factory=time.time)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Mapping[str, Any] | None = None

    def to_mapping(self) -> dict[str, Any]:
        """The content of result.json: plain values; numbers that are not finite become null."""
        mapping: dict[str, Any] = finite({"schema": SCHEMA, **asdict(self), "kind": self.kind.value})
        return mapping


def from_mapping(mapping: Mapping[str, Any]) -> Outcome:
    """The outcome in a result.json; unknown keys, which a later version may have added, are ignored.

    Raises:
        TitanlabError: this version does not know the file's schema.
    """
    if mapping.get("schema") != SCHEMA:
        written = mapping.get("schema")
        raise TitanlabError(f"result.json: schema {written} is not {SCHEMA}; use the titanlab that wrote it")
    known = {field.name for field in fields(Outcome)}
    values = {key: value for key, value in mapping.items() if key in known}
    return Outcome(**{**values, "kind": OutcomeKind(values["kind"])})


def classify(error: BaseException) -> OutcomeKind:
    """The kind of outcome for an exception that ended a run, from its type's name and its message."""
    return OutcomeKind(kind_name(error))


def from_exception(error: BaseException, *, step: int = 0, rank: int | None = None, attempt: int = 1) -> Outcome:
    """The outcome of a rank that raised."""
    text = _writable("".join(traceback.format_exception(error)))
    return Outcome(
        kind=classify(error),
        step=step,
        rank=rank,
        attempt=attempt,
        cause=disk_fault(error) or first_line(error),
        # A user's mistake is reported in one line; a traceback would not help.
        traceback=None if isinstance(error, TitanlabError) else text[-_TRACEBACK_LIMIT:],
        exit_code=exit_code(error),
        echo=is_secondary(error),
    )


def exit_code(error: BaseException) -> int:
    """The exit code of a process after an exception: always 2 after a user's mistake."""
    if isinstance(error, TitanlabError) and error.exit_code == OutcomeKind.INFEASIBLE.exit_code:
        return error.exit_code
    return classify(error).exit_code


@dataclass(frozen=True)
class KillEvidence:
    """What is known about who has sent SIGKILL.

    Attributes:
        by_kernel: whether it was the kernel, because memory ran out.
        words: an end for "killed by SIGKILL: …".
    """

    by_kernel: bool
    words: str


def from_exit(
    code: int, *, step: int = 0, rank: int | None = None, attempt: int = 1, memory: KillEvidence | None = None
) -> Outcome:
    """The outcome of a process that wrote no result, from its exit code.

    Args:
        code: both 128+N (shells) and -N (Python) mean that signal N ended the process.
        memory: evidence about SIGKILL, see `MemoryKills.evidence`; None: there is none.
    """
    number = -code if code < 0 else code - 128 if 128 < code < 128 + 65 else None
    # Exit code 0 without a result is no success: an out-of-memory handler may end a process with 0.
    kind = _BY_EXIT_CODE.get(code, OutcomeKind.CRASH) if code else OutcomeKind.CRASH
    if number is not None:
        kind, cause, echo = _from_signal(number)
        if number == signal.SIGKILL and memory is not None:
            kind, cause = (OutcomeKind.OOM if memory.by_kernel else kind), f"killed by SIGKILL: {memory.words}"
    elif kind is OutcomeKind.CRASH:
        cause, echo = f"ended with exit code {code} and left no result; its log says more", False
    else:
        cause, echo = f"ended with exit code {code}: {kind.meaning}", False
    return Outcome(
        kind=kind,
        step=step,
        rank=rank,
        attempt=attempt,
        cause=cause,
        exit_code=code if number is None else -number,
        echo=echo,
    )


def first_cause(outcomes: Iterable[Outcome]) -> Outcome:
    """Among the failures of several ranks, the failure that made the others fail.

    A primary failure comes before a secondary one, a failure with a traceback before a bare exit code, then the
    earliest comes first. Among ranks that hang, a rank that did not answer comes first, then the rank that did the
    fewest steps.

    Raises:
        ValueError: there are no failures.
    """
    known = list(outcomes)
    first = min(known, key=lambda end: (end.echo, end.traceback is None, end.ended, end.rank or 0))
    if first.kind is not OutcomeKind.HANG:
        return first
    hung = [end for end in known if end.kind is OutcomeKind.HANG]
    return min(
        hung,
        key=lambda end: (end.echo, not is_silent(end), end.traceback is None, end.step, end.ended, end.rank or 0),
    )


def is_silent(outcome: Outcome) -> bool:
    """Whether another process wrote this outcome, for a rank that did not answer while others hung."""
    has_no_evidence = outcome.traceback is None and outcome.exit_code is None
    return outcome.kind is OutcomeKind.HANG and has_no_evidence and not outcome.echo


def first_line(error: BaseException) -> str:
    """Type and first line of an exception's message, of bounded length; for a user's mistake without the type."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = _writable(lines[0]) if lines else ""
    if not isinstance(error, TitanlabError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _CAUSE_LIMIT else text[: _CAUSE_LIMIT - 3] + "..."


def _writable(text: str) -> str:
    """The text with escapes for what UTF-8 has no bytes for, such as undecodable bytes of a file's name."""
    return text.encode(errors="backslashreplace").decode()


_SIGNALS: Mapping[int, tuple[OutcomeKind, str, bool]] = {
    signal.SIGKILL: (
        OutcomeKind.CRASH,
        "killed by SIGKILL; who sent it is not known: a person, a scheduler, or the kernel for want of memory",
        False,
    ),
    signal.SIGTERM: (OutcomeKind.CANCELLED, "asked to end by SIGTERM", True),
    signal.SIGINT: (OutcomeKind.CANCELLED, "interrupted by SIGINT (Ctrl-C)", True),
    signal.SIGHUP: (OutcomeKind.CANCELLED, "its terminal was closed (SIGHUP)", True),
    signal.SIGUSR1: (OutcomeKind.PREEMPTED, "ended by SIGUSR1, with which schedulers warn", False),
    signal.SIGUSR2: (OutcomeKind.PREEMPTED, "ended by SIGUSR2, with which schedulers warn", False),
    signal.SIGXCPU: (OutcomeKind.WALLTIME, "its limit of CPU time is used up (SIGXCPU)", False),
    signal.SIGABRT: (
        OutcomeKind.CRASH,
        "aborted by SIGABRT: an assertion in native code, or NCCL's watchdog; the rank's log says which",
        False,
    ),
    signal.SIGSEGV: (OutcomeKind.CRASH, "segmentation fault (SIGSEGV) in native code", False),
    signal.SIGBUS: (OutcomeKind.CRASH, "bus error (SIGBUS): /dev/shm is full, or a mapped file became shorter", False),
    signal.SIGILL: (OutcomeKind.CRASH, "illegal instruction (SIGILL): a binary made for another CPU", False),
    signal.SIGFPE: (OutcomeKind.CRASH, "arithmetic fault (SIGFPE) in native code", False),
}


def _from_signal(number: int) -> tuple[OutcomeKind, str, bool]:
    if number in _SIGNALS:
        return _SIGNALS[number]
    names = {int(known): known.name for known in signal.Signals}
    return OutcomeKind.CRASH, f"ended by {names.get(number, f'signal {number}')}", False
