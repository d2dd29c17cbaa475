"""Outcomes: every kind, how exceptions and exit codes are named, and which rank was the cause."""

import pickle
import signal

import pytest
import torch

from titanlab.errors import ConfigError
from titanlab.records import (
    KillEvidence,
    Outcome,
    OutcomeKind,
    classify,
    first_cause,
    from_exception,
    from_exit,
    outcome,
    read_typed,
    write_typed,
)

KINDS = "done oom hang nan crash preempted walltime node_fail cancelled infeasible data".split()


def test_the_taxonomy_is_whole():
    assert sorted(OutcomeKind) == sorted(KINDS)
    codes = {kind: kind.exit_code for kind in OutcomeKind}
    assert len(set(codes.values())) == len(KINDS)
    assert codes[OutcomeKind.DONE] == 0
    assert codes[OutcomeKind.INFEASIBLE] == ConfigError.exit_code == 2
    # 124 to 127 belong to timeout and the shell.
    assert all(0 <= code < 124 or code == 130 for code in codes.values())
    assert all(kind.meaning for kind in OutcomeKind)


def test_the_exception_is_kept():
    def fail():
        raise RuntimeError("\n\n first line \nsecond line")

    with pytest.raises(RuntimeError) as caught:
        fail()
    found = from_exception(caught.value, step=4, rank=2, attempt=3)
    assert (found.step, found.rank, found.attempt, found.exit_code) == (4, 2, 3, 1)
    assert found.cause == "RuntimeError: first line"
    assert "in fail" in found.traceback
    assert "second line" in found.traceback
    assert len(from_exception(RuntimeError("x" * 10_000)).cause) == 500


def test_a_persons_mistake_is_told_in_one_line_and_exits_with_2():
    error = ConfigError("data.path", "x.txt", "matches nothing", "try *.txt")
    found = from_exception(error)
    assert found.kind is OutcomeKind.DATA
    assert found.cause == "data.path=x.txt: matches nothing; try *.txt"
    assert found.traceback is None
    assert found.exit_code == 2
    assert outcome.exit_code(pickle.loads(pickle.dumps(error))) == 2
    assert outcome.exit_code(from_data(OSError("torn shard"))) == OutcomeKind.DATA.exit_code


def test_a_message_that_utf_8_has_no_bytes_for_is_recorded(tmp_path):
    """Bytes of a file's name that are not text: the failure could not be written, and the cause was lost."""
    with pytest.raises(LookupError) as caught:
        raise LookupError("no file a\udc80b")
    found = from_exception(caught.value)
    assert found.cause == r"LookupError: no file a\udc80b"
    assert found.traceback.endswith("LookupError: no file a\\udc80b\n")
    write_typed(tmp_path / "result.json", found, schema=1)
    assert read_typed(tmp_path / "result.json", Outcome, schema=1) == found


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (0, "crash", "exit code 0"),
        (1, "crash", "exit code 1"),
        (17, "crash", "exit code 17"),
        (-signal.SIGKILL, "crash", "killed by SIGKILL; who sent it is not known"),
        (128 + signal.SIGKILL, "crash", "SIGKILL"),
        (-signal.SIGTERM, "cancelled", "SIGTERM"),
        (130, "cancelled", "Ctrl-C"),
        (-signal.SIGINT, "cancelled", "Ctrl-C"),
        (-signal.SIGUSR2, "preempted", "SIGUSR2"),
        (-signal.SIGXCPU, "walltime", "SIGXCPU"),
        (-signal.SIGSEGV, "crash", "segmentation"),
        (-signal.SIGABRT, "crash", "SIGABRT"),
        (-signal.SIGBUS, "crash", "/dev/shm"),
        (-signal.SIGQUIT, "crash", "SIGQUIT"),
        (-63, "crash", "signal 63"),
    ],
)
def test_a_process_that_left_nothing_is_named_by_its_exit(code, kind, words):
    found = from_exit(code, rank=1)
    assert found.kind == kind
    assert words in found.cause


def test_a_kill_is_want_of_memory_where_something_shows_it():
    memory = KillEvidence(by_kernel=True, words="the kernel has killed a process of this machine for want of memory")
    found = from_exit(-signal.SIGKILL, rank=1, memory=memory)
    assert (found.kind, found.cause, found.exit_code) == (OutcomeKind.OOM, f"killed by SIGKILL: {memory.words}", -9)
    unseen = KillEvidence(by_kernel=False, words="the kernel has killed nothing")
    found = from_exit(-signal.SIGKILL, rank=1, memory=unseen)
    assert (found.kind, found.cause) == (OutcomeKind.CRASH, "killed by SIGKILL: the kernel has killed nothing")
    assert from_exit(137).exit_code == -9
    # A process that left by itself, or of another signal, is not the one that was killed.
    assert from_exit(1, memory=memory).kind is OutcomeKind.CRASH
    assert from_exit(-signal.SIGTERM, memory=memory).kind is OutcomeKind.CANCELLED


def test_every_kinds_own_exit_code_leads_back_to_it():
    for kind in OutcomeKind:
        expected = OutcomeKind.CRASH if kind is OutcomeKind.DONE else kind
        assert from_exit(kind.exit_code).kind is expected


def test_the_first_cause_is_a_failure_of_its_own_then_a_told_one_then_the_earliest():
    lost = from_exception(ConnectionResetError("Connection reset by peer"), rank=0)
    killed = from_exit(-9, rank=2)
    told = from_exception(MemoryError(), rank=3)
    handed_on = from_exit(-15, rank=1)
    assert first_cause([lost, handed_on, killed]) is killed
    assert first_cause([lost, killed, told, handed_on]) is told
    assert first_cause([handed_on, lost]) is lost
    late, early = (Outcome(kind=OutcomeKind.CRASH, rank=rank, ended=ended) for rank, ended in ((0, 2.0), (1, 1.0)))
    assert first_cause([late, early]) is early


def test_of_ranks_that_hang_the_one_that_did_the_fewest_steps_is_the_cause():
    first, behind = (
        Outcome(kind=OutcomeKind.HANG, rank=rank, step=step, ended=ended, traceback="in a collective")
        for rank, step, ended in ((0, 4, 1.0), (1, 3, 2.0))
    )
    assert first_cause([first, behind]) is behind
    silent = Outcome(kind=OutcomeKind.HANG, rank=2, step=5, ended=3.0)
    assert first_cause([first, behind, silent]) is silent


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
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "oom"),
        (ImportError("x.so: failed to map segment from shared object: Operation not permitted"), "crash"),
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
