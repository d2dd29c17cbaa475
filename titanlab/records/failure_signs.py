"""By what an exception is known: names of types and phrases of messages, so that torch need not be imported.

The words are those of torch 2.11 to 2.13, NCCL, gloo, CUDA and the libraries that read data.
"""

from __future__ import annotations

import errno
import re
import resource
from types import TracebackType

from titanlab.errors import ConfigError, TitanlabError
from titanlab.system.disk import disk_fault

_OOM = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|std::bad_alloc"
    r"|Memory allocation still failed|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
    r"|unable to allocate .* for an array",
    re.IGNORECASE,
)
# What loading a library says where the address space is used up; elsewhere it names another reason after this.
_NO_ROOM = re.compile(r"failed to map segment from shared object(?!: Operation not permitted)")
_NO_THREAD = re.compile(r"can't start new thread|(?:pthread_create|[Tt]hread creation) failed")
_NODE = re.compile(
    r"uncorrectable (?:ECC|NVLink)|ECC error|GPU is lost|fallen off the bus|cudaErrorDevicesUnavailable"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|stale file handle|Input/output error|NVLink error",
    re.IGNORECASE,
)
_HANG = re.compile(
    r"watchdog caught collective operation timeout|collective operation timeout|timed out waiting"
    r"|wait timeout after|Socket Timeout|timed out after \d+|client socket has timed out",
    re.IGNORECASE,
)
# A peer that is gone: the reason is on another rank.
_ECHO = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|broken pipe|remote process exited|ncclRemoteError"
    r"|connection closed by (?:remote )?peer|failed to recv, got 0 bytes|NCCL communicator was aborted"
    r"|recvValue failed",
    re.IGNORECASE,
)
_NAN = re.compile(r"returned nan values|is not finite|non-?finite|(?:nan|inf) (?:loss|gradient)", re.IGNORECASE)

# Libraries that a rank uses for nothing but data and its tokenizer.
_DATA_PACKAGES = frozenset(
    {"datasets", "huggingface_hub", "pyarrow", "sentencepiece", "tokenizers", "fsspec", "zlib", "lzma"}
    | {"requests", "httpx", "aiohttp"}
)
# What bad content raises, as opposed to what a mistake in our code raises.
_CONTENT_ERRORS = (OSError, ValueError, EOFError)
_DATA_MODULE = "titanlab.data"


def kind_name(error: BaseException) -> str:
    """The outcome's word for an exception."""
    if isinstance(error, ConfigError):
        return "data" if error.key.split(".")[0] == "data" else "infeasible"
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException":
        return "cancelled"
    message = str(error)
    if disk_fault(error) is not None:
        return "crash"
    if _is_oom(error, message):
        return "oom"
    if isinstance(error, FloatingPointError) or _NAN.search(message):
        return "nan"
    if _NODE.search(message) or getattr(error, "errno", None) in (errno.EIO, errno.ESTALE):
        return "node_fail"
    if _is_data(error):
        return "data"
    if isinstance(error, TimeoutError) or _HANG.search(message):
        return "hang"
    return "crash"


def mere_echo(error: BaseException) -> bool:
    """Whether the exception only tells that another rank is gone."""
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException":
        return True
    if isinstance(error, TitanlabError) or kind_name(error) == "data":
        return False
    # A collective that timed out has waited for another rank.
    return isinstance(error, ConnectionError) or bool(_ECHO.search(str(error)) or _HANG.search(str(error)))


def _is_oom(error: BaseException, message: str) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if isinstance(error, ImportError) and _NO_ROOM.search(message):
        return True
    return (isinstance(error, (RuntimeError, OSError)) and bool(_OOM.search(message))) or _is_without_stack(message)


def says_oom(text: str) -> bool:
    """Whether the last words of a process, in its log, say that memory ran out."""
    return bool(_OOM.search(text) or _NO_ROOM.search(text)) or _is_without_stack(text)


def _is_without_stack(message: str) -> bool:
    """Whether a thread could not be started for want of memory: its stack had no place within a limit of addresses.

    Without such a limit it is one of processes that was reached, and no word here fits.
    """
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return limited and bool(_NO_THREAD.search(message))


def _is_data(error: BaseException) -> bool:
    if any(_package(each) in _DATA_PACKAGES or each.__name__ == "DataError" for each in type(error).__mro__):
        return True
    return isinstance(error, _CONTENT_ERRORS) and _in_data_module(error.__traceback__)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _in_data_module(trace: TracebackType | None) -> bool:
    """Whether the innermost code of ours on the stack reads data."""
    innermost = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == "titanlab":
            innermost = module
        trace = trace.tb_next
    return innermost == _DATA_MODULE or innermost.startswith(_DATA_MODULE + ".")
