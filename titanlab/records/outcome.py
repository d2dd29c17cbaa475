"""How runs end: the kinds of outcome, the content of result.json, and the rules that find the outcome.

Every run gets an outcome: `from_exception` and `classify` find the kind from an exception, `from_exit` from the exit
code of a process that wrote no result, and `first_cause` selects the rank whose failure made the others fail.
Exceptions are recognised by the names of their types and the text of their messages, so that torch is not imported. The
texts are those of torch 2.11 to 2.13, NCCL, gloo, CUDA and the libraries that read data.
"""

from __future__ import annotations

import enum
import errno
import re
import resource
import signal
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from titanlab.errors import ConfigError, TitanlabError
from titanlab.system import disk_fault

_CAUSE_LIMIT = 500
_TRACEBACK_LIMIT = 20_000


class OutcomeKind(enum.StrEnum):
    """How a run ended."""

    exit_code: int  # of the rank's process: it identifies the kind even if the process wrote no result
    meaning: str  # one sentence for people
    may_continue: bool  # whether the same recipe can succeed if it resumes from the last checkpoint
    automatic: bool  # whether a scheduler should resume the run without asking: the run did not cause its end

    # The parameters have defaults, because type checkers treat `OutcomeKind(word)` as a call of this method.
    def __new__(cls, word: str, exit_code: int = 1, meaning: str = "", follows: str = "") -> OutcomeKind:
        kind = str.__new__(cls, word)
        kind._value_, kind.exit_code, kind.meaning = word, exit_code, meaning
        kind.may_continue, kind.automatic = follows != "", follows == "automatic"
        return kind

    # The exit codes respect common conventions: 2 is bad usage everywhere, 65 and 75 mean bad data and "try again" in
    # sysexits.h, `timeout` and the shell use 124 to 127, and 128+N means signal N.
    DONE = "done", 0, "all steps are done"
    OOM = "oom", 70, "memory ran out, on the device or on the host"
    HANG = "hang", 71, "a step or a collective did not finish in time", "asked"
    NAN = "nan", 72, "the loss or the gradient is not a finite number"
    CRASH = "crash", 1, "an error that no other outcome describes; the traceback shows it", "asked"
    PREEMPTED = "preempted", 75, "told to stop, by the scheduler or by SIGTERM", "automatic"
    WALLTIME = "walltime", 76, "the time that it was given is over", "automatic"
    NODE_FAIL = "node_fail", 73, "a machine or a device failed", "automatic"
    CANCELLED = "cancelled", 130, "a person or a parent process stopped it", "asked"
    INFEASIBLE = "infeasible", 2, "the recipe breaks a rule; nothing was trained"
    DATA = "data", 65, "the corpus, its tokenizer or its source could not be read", "asked"


_BY_EXIT_CODE = {kind.exit_code: kind for kind in OutcomeKind}


@dataclass(frozen=True, kw_only=True)
class StopReason:
    """Why a job must end, or has ended: the kind of its outcome, and one line for the user."""

    kind: OutcomeKind
    cause: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of one attempt at a run; the content of result.json."""

    kind: OutcomeKind
    step: int = 0  # the last finished step
    steps: int | None = None  # number of planned steps; None if unknown
    attempt: int = 1
    rank: int | None = None  # the rank that failed; None if none failed
    cause: str | None = None  # first line of the error; None for a run that is done
    traceback: str | None = None  # traceback or last output of the failing rank
    exit_code: int | None = None  # of the failing process; -N if signal N ended it; None if unknown
    echo: bool = False  # a secondary failure (a lost connection, a forwarded signal): another process has the cause
    ended: float = field(default_factory=time.time)  # seconds since the epoch
    metrics: Mapping[str, Any] = field(default_factory=dict)  # medians, last loss, …, named as in metrics.jsonl
    scheduler: Mapping[str, Any] | None = None  # the scheduler's record of the job: `job_id`, `state`, `exit_code`


_OOM = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|std::bad_alloc"
    r"|Memory allocation still failed|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
    r"|unable to allocate .* for an array",
    re.IGNORECASE,
)
# The dynamic loader's message if the address space is used up. If the cause is another, the loader appends the cause.
_NO_ADDRESS_SPACE = re.compile(r"failed to map segment from shared object(?!: Operation not permitted)")
_THREAD_NOT_STARTED = re.compile(r"can't start new thread|(?:pthread_create|[Tt]hread creation) failed")
_NODE = re.compile(
    r"silent data corruption|uncorrectable (?:ECC|NVLink)|ECC error"
    r"|GPU is lost|fallen off the bus|cudaErrorDevicesUnavailable"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|stale file handle|Input/output error|NVLink error",
    re.IGNORECASE,
)
_HANG = re.compile(
    r"watchdog caught collective operation timeout|collective operation timeout|timed out waiting"
    r"|wait timeout after|Socket Timeout|timed out after \d+|client socket has timed out",
    re.IGNORECASE,
)
# Messages of a rank whose peer has ended: the cause is in another rank.
_PEER_GONE = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|remote process exited|ncclRemoteError"
    r"|connection closed by (?:remote )?peer|failed to recv, got 0 bytes|NCCL communicator was aborted"
    r"|recvValue failed",
    re.IGNORECASE,
)
_NAN = re.compile(r"returned nan values|is not finite|non-?finite|(?:nan|inf) (?:loss|gradient)", re.IGNORECASE)

# Libraries that a rank uses only for data and its tokenizer.
_DATA_PACKAGES = frozenset(
    {"datasets", "huggingface_hub", "pyarrow", "sentencepiece", "tokenizers", "fsspec", "zlib", "lzma"}
    | {"requests", "httpx", "aiohttp"}
)
# Types of exceptions that bad content of a file raises; other types indicate a mistake in titanlab's code.
_CONTENT_ERRORS = (OSError, ValueError, EOFError)
_DATA_MODULE = "titanlab.data"


def classify(error: BaseException) -> OutcomeKind:
    """The kind of outcome for an exception that ended a run, from its type's name and its message."""
    if isinstance(error, ConfigError):
        return OutcomeKind.DATA if error.key.split(".")[0] == "data" else OutcomeKind.INFEASIBLE
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException":
        return OutcomeKind.CANCELLED
    message = str(error)
    if disk_fault(error) is not None:
        return OutcomeKind.CRASH
    if _is_oom(error, message):
        return OutcomeKind.OOM
    if isinstance(error, FloatingPointError) or _NAN.search(message):
        return OutcomeKind.NAN
    if _NODE.search(message) or getattr(error, "errno", None) in (errno.EIO, errno.ESTALE):
        return OutcomeKind.NODE_FAIL
    if _is_data(error):
        return OutcomeKind.DATA
    if isinstance(error, TimeoutError) or _HANG.search(message):
        return OutcomeKind.HANG
    return OutcomeKind.CRASH


def is_secondary(error: BaseException) -> bool:
    """Whether the exception is a secondary failure: another rank has the cause."""
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException":
        return True
    if isinstance(error, TitanlabError) or classify(error) is OutcomeKind.DATA:
        return False
    # A collective times out because another rank does not take part.
    return isinstance(error, ConnectionError) or bool(_PEER_GONE.search(str(error)) or _HANG.search(str(error)))


def says_oom(text: str) -> bool:
    """Whether the message of an error, or the end of a process's log, says that memory ran out."""
    return bool(_OOM.search(text) or _NO_ADDRESS_SPACE.search(text)) or _lacks_thread_memory(text)


def _is_oom(error: BaseException, message: str) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if getattr(error, "errno", None) == errno.ENOMEM or _lacks_thread_memory(message):
        return True
    signs = {ImportError: _NO_ADDRESS_SPACE, RuntimeError: _OOM, OSError: _OOM}
    return any(isinstance(error, kind) and sign.search(message) for kind, sign in signs.items())


def _lacks_thread_memory(message: str) -> bool:
    """Whether a thread could not start because its stack did not fit into the limit of address space (RLIMIT_AS).

    Without such a limit the cause is a limit on the number of processes, which is not a lack of memory.
    """
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return limited and bool(_THREAD_NOT_STARTED.search(message))


def _is_data(error: BaseException) -> bool:
    """Whether a library for data raised the error, or `titanlab.data` could not read the content of a file."""
    for base in type(error).__mro__:
        if base.__module__.partition(".")[0] in _DATA_PACKAGES or base.__name__ == "DataError":
            return True
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = next((name for name in reversed(modules) if name.partition(".")[0] == "titanlab"), "")
    return isinstance(error, _CONTENT_ERRORS) and f"{innermost}.".startswith(f"{_DATA_MODULE}.")


def from_exception(error: BaseException, *, step: int = 0, rank: int | None = None, attempt: int = 1) -> Outcome:
    """The outcome of a rank that raised an exception."""
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


def first_line(error: BaseException) -> str:
    """Type and first line of an exception's message, of bounded length; without the type for a user's mistake."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = _writable(lines[0]) if lines else ""
    if not isinstance(error, TitanlabError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _CAUSE_LIMIT else text[: _CAUSE_LIMIT - 3] + "..."


def _writable(text: str) -> str:
    """The text with escapes for characters that UTF-8 cannot encode, such as undecodable bytes of a file's name."""
    return text.encode(errors="backslashreplace").decode()


_SIGNALS: Mapping[int, tuple[OutcomeKind, str]] = {
    signal.SIGKILL: (
        OutcomeKind.CRASH,
        "killed by SIGKILL; who sent it is not known: a person, a scheduler, or the kernel for want of memory",
    ),
    signal.SIGTERM: (OutcomeKind.CANCELLED, "asked to end by SIGTERM"),
    signal.SIGINT: (OutcomeKind.CANCELLED, "interrupted by SIGINT (Ctrl-C)"),
    signal.SIGHUP: (OutcomeKind.CANCELLED, "its terminal was closed (SIGHUP)"),
    signal.SIGUSR1: (OutcomeKind.PREEMPTED, "ended by SIGUSR1, with which schedulers warn"),
    signal.SIGUSR2: (OutcomeKind.PREEMPTED, "ended by SIGUSR2, with which schedulers warn"),
    signal.SIGXCPU: (OutcomeKind.WALLTIME, "its limit of CPU time is used up (SIGXCPU)"),
    signal.SIGABRT: (
        OutcomeKind.CRASH,
        "aborted by SIGABRT: an assertion in native code, or NCCL's watchdog; the rank's log says which",
    ),
    signal.SIGSEGV: (OutcomeKind.CRASH, "segmentation fault (SIGSEGV) in native code"),
    signal.SIGBUS: (OutcomeKind.CRASH, "bus error (SIGBUS): /dev/shm is full, or a mapped file became shorter"),
    signal.SIGILL: (OutcomeKind.CRASH, "illegal instruction (SIGILL): a binary made for another CPU"),
    signal.SIGFPE: (OutcomeKind.CRASH, "arithmetic fault (SIGFPE) in native code"),
}


@dataclass(frozen=True)
class KillEvidence:
    """Whether the kernel has sent SIGKILL because memory ran out, and `words` for the cause "killed by SIGKILL: …"."""

    by_kernel: bool
    words: str


def from_exit(
    code: int, *, step: int = 0, rank: int | None = None, attempt: int = 1, memory: KillEvidence | None = None
) -> Outcome:
    """The outcome of a process that wrote no result, from its exit code.

    Args:
        code: 128+N (from a shell) and -N (from Python) both mean that signal N ended the process.
        memory: evidence about SIGKILL, see `MemoryKills.evidence`; None: no evidence.
    """
    number = -code if code < 0 else code - 128 if 128 < code < 128 + 65 else None
    # Exit code 0 without a result is not a success: an out-of-memory handler may end a process with 0.
    kind = _BY_EXIT_CODE.get(code, OutcomeKind.CRASH) if code else OutcomeKind.CRASH
    cause = f"ended with exit code {code}: {kind.meaning}"
    if number is not None:
        names = {int(known): known.name for known in signal.Signals}
        unknown = (OutcomeKind.CRASH, f"ended by {names.get(number, f'signal {number}')}")
        kind, cause = _SIGNALS.get(number, unknown)
        if number == signal.SIGKILL and memory is not None:
            kind, cause = (OutcomeKind.OOM if memory.by_kernel else kind), f"killed by SIGKILL: {memory.words}"
    elif kind is OutcomeKind.CRASH:
        cause = f"ended with exit code {code} and left no result; its log says more"
    return Outcome(
        kind=kind,
        step=step,
        rank=rank,
        attempt=attempt,
        cause=cause,
        exit_code=code if number is None else -number,
        # A secondary failure: somebody has stopped all processes of the run.
        echo=number is not None and kind is OutcomeKind.CANCELLED,
    )


def first_cause(outcomes: Iterable[Outcome]) -> Outcome:
    """Among the failures of several ranks, the failure that made the others fail.

    A primary failure is chosen before a secondary one, then a failure with a traceback before a bare exit code, then
    the earliest failure. Among ranks that hang, a rank that did not answer is chosen first, then the rank that did the
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
    """Whether another process wrote this outcome for its rank, which did not answer while other ranks hung."""
    has_no_evidence = outcome.traceback is None and outcome.exit_code is None
    return outcome.kind is OutcomeKind.HANG and has_no_evidence and not outcome.echo
