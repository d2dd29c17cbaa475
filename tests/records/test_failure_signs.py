"""Exceptions by the names of their types and the text of their messages: of each, the kind of end, and whose fault."""

import pytest
import torch

from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind, classify, from_exception, says_oom


def from_data(error):
    """The exception as code in titanlab.data would raise it."""
    scope = {"__name__": "titanlab.data.text", "error": error}
    exec("def read():\n    raise error", scope)
    try:
        scope["read"]()
    except Exception as raised:
        return raised


def _named(module, name, base=Exception, message=""):
    return type(name, (base,), {"__module__": module})(message)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
        (MemoryError(), "oom"),
        (OSError(12, "Cannot allocate memory"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (_named("torch.distributed", "DistBackendError", RuntimeError, "NCCL error: Cuda failure 'out of memory'"), "oom"),
        (_named("numpy._core._exceptions", "_ArrayMemoryError", MemoryError, "Unable to allocate 9 GiB"), "oom"),
        (FloatingPointError("loss is nan"), "nan"),
        (RuntimeError("Function 'MulBackward0' returned nan values in its 0th output."), "nan"),
        (KeyboardInterrupt(), "cancelled"),
        (_named("torch.distributed.elastic.multiprocessing.api", "SignalException"), "cancelled"),
        (ConfigError("parallelism.tensor", 3, "rule", "cure"), "infeasible"),
        (ConfigError("data.path", "x", "matches nothing", "cure"), "data"),
        (ConfigError("dataset", "x", "rule", "cure"), "infeasible"),
        (TimeoutError("step 5 took longer than 600 s"), "hang"),
        (RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)"), "hang"),
        (RuntimeError("[gloo] Timed out waiting 1800000ms for recv operation to complete"), "hang"),
        (_named("torch.distributed", "DistStoreError", RuntimeError, "wait timeout after 300000ms, keys: /x"), "hang"),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "node_fail"),
        (OSError(116, "Stale file handle"), "node_fail"),
        (_named("datasets.exceptions", "DatasetNotFoundError", FileNotFoundError, "no such dataset"), "data"),
        (_named("pyarrow.lib", "ArrowInvalid", ValueError, "Parquet magic bytes not found"), "data"),
        (from_data(FileNotFoundError(2, "No such file", "shard-3.bin")), "data"),
        (from_data(ConnectionError("Couldn't reach the Hub")), "data"),
        (from_data(ValueError("token 9 is beyond the vocabulary")), "data"),
        # A mistake in our own code is a crash wherever it stands.
        (from_data(AttributeError("no attribute")), "crash"),
        (FileNotFoundError(2, "No such file"), "crash"),
        (ValueError("shapes"), "crash"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "crash"),
        (SystemExit(0), "crash"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)  # fmt: skip
def test_exceptions_are_named(error, kind):
    assert classify(error) == kind


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:30211"), True),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (KeyboardInterrupt(), True),
        (from_data(ConnectionError("Couldn't reach the Hub")), False),
        (ConfigError("a", "connection reset", "b", "c"), False),
        (RuntimeError("mat1 and mat2"), False),
        (MemoryError(), False),
    ],
)
def test_an_echo_of_another_ranks_failure_is_known(error, echo):
    assert from_exception(error).echo is echo


def test_a_thread_that_cannot_start_is_want_of_memory_under_a_limit_of_addresses_only(monkeypatch):
    error = RuntimeError("can't start new thread")
    assert classify(error) is OutcomeKind.CRASH
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**31, 2**31))
    assert classify(error) is OutcomeKind.OOM


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("libtorch_cpu.so: failed to map segment from shared object", "oom"),
        ("x.so: failed to map segment from shared object: Operation not permitted", "crash"),
        ("No module named 'x'", "crash"),
    ],
)
def test_a_library_for_which_there_is_no_room(message, kind):
    assert classify(ImportError(message)) == kind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", False),
        ("all is well", False),
        ("lines before\nRuntimeError: CUDA out of memory. Tried\nlines after", True),
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("x.so: failed to map segment from shared object", True),
        ("x.so: failed to map segment from shared object: Operation not permitted", False),
        ("Unable to allocate 9.0 GiB for an array with shape (3,)", True),
        # Without a limit of addresses, the limit is one of processes.
        ("can't start new thread", False),
    ],
)
def test_a_log_says_that_memory_ran_out(text, expected):
    assert says_oom(text) is expected
