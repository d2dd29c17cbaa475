"""Classifies exceptions by the names of their types and the text of their messages, so that torch is not imported.

The texts are those of torch 2.11 to 2.13, NCCL, gloo, CUDA and the libraries that read data.
"""

from __future__ import annotations

import errno
import re
import resource
from types import TracebackType

from titanlab.errors import ConfigError, TitanlabError
from titanlab.system.files import disk_fault

_OOM = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|std::bad_alloc"
    r"|Memory allocation still failed|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation"
    r"|unable to allocate .* for an array",
    re.IGNORECASE,
)
# The loader's message when the address space is used up. With another cause, that cause follows these words.
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
# A peer has gone: another rank has the cause.
_PEER_GONE = re.compile(
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
# Types that bad content raises; other types point to a mistake in titanlab's code.
_CONTENT_ERRORS = (OSError, ValueError, EOFError)
_DATA_MODULE = "titanlab.data"


def kind_name(error: BaseException) -> str:
    """The kind of outcome (a value of `OutcomeKind`) for an exception."""
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


def is_secondary(error: BaseException) -> bool:
    """Whether the exception is a secondary failure: another rank has the cause."""
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "SignalException":
        return True
    if isinstance(error, TitanlabError) or kind_name(error) == "data":
        return False
    # A collective times out because another rank does not take part.
    return isinstance(error, ConnectionError) or bool(_PEER_GONE.search(str(error)) or _HANG.search(str(error)))


def _is_oom(error: BaseException, message: str) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if isinstance(error, ImportError) and _NO_ADDRESS_SPACE.search(message):
        return True
    return (isinstance(error, (RuntimeError, OSError)) and bool(_OOM.search(message))) or _lacks_thread_memory(message)


def says_oom(text: str) -> bool:
    """Whether the end of a process's log says that memory ran out."""
    return bool(_OOM.search(text) or _NO_ADDRESS_SPACE.search(text)) or _lacks_thread_memory(text)


def _lacks_thread_memory(message: str) -> bool:
    """Whether a thread could not start because its stack did not fit into the limit of address space (RLIMIT_AS).

    Without such a limit the cause is a limit on the number of processes, which is not a lack of memory.
    """
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return limited and bool(_THREAD_NOT_STARTED.search(message))


def _is_data(error: BaseException) -> bool:
    if any(_package(base) in _DATA_PACKAGES or base.__name__ == "DataError" for base in type(error).__mro__):
        return True
    return isinstance(error, _CONTENT_ERRORS) and _in_data_module(error.__traceback__)


def _package(error_type: type) -> str:
    return error_type.__module__.partition(".")[0]


def _in_data_module(trace: TracebackType | None) -> bool:
    """Whether the innermost titanlab frame of the traceback is in `titanlab.data`."""
    innermost = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == "titanlab":
            innermost = module
        trace = trace.tb_next
    return innermost == _DATA_MODULE or innermost.startswith(_DATA_MODULE + ".")
