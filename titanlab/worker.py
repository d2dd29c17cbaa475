"""What every rank runs: `python -m titanlab.worker FOLDER [-]`.

It reads the frozen config.yaml of the run's latest attempt (with `-`, the same as a line of JSON from its input),
sets the environment that torch reads when it is imported, then imports torch and trains. It knows no Hydra.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from titanlab.compile import cache as compiler_cache
from titanlab.data import cache as data_cache
from titanlab.data import source
from titanlab.distributed.host import cores
from titanlab.distributed.ranks import ALONE, Ranks, joined
from titanlab.distributed.silence import hangs_of_others
from titanlab.distributed.stop import request_from_lines, stop_request
from titanlab.distributed.watchdog import Watchdog
from titanlab.recipe.recipe import Recipe, from_mapping
from titanlab.records.outcome import Outcome, exit_code, from_exception
from titanlab.records.run_folder import RunFolder, open_run
from titanlab.system.disk import disk_fault


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the run in a folder as the rank that the environment names. Returns the process's exit code."""
    folder, *rest = sys.argv[1:] if arguments is None else arguments
    _end_with_parent()
    _write_to_own_log()
    ranks = joined(os.environ) or ALONE
    run = open_run(Path(folder))
    attempt = _given_attempt()
    given = sys.stdin.readline() if rest == ["-"] else None
    # From now on a wish to stop waits: for the first step's end, or for the note of a failure.
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(request_from_lines(sys.stdin) if os.environ.get("TITANLAB_TOLD") else stop_request())
        try:
            recipe = from_mapping(
                json.loads(given) if given is not None else run.config(attempt or max(run.attempts()))
            )
            watchdog = _watchdog(recipe, run, ranks, attempt)
            stack.callback(watchdog.close)
            os.environ.update(environment(recipe, ranks))
            _repair_compiled()
            if recipe.cluster.accelerator == "cpu":
                _keep_freed_memory()
            # At once where this host's cache has the data; several ranks of a host may call it together.
            source.prepare(recipe.data, report=lambda line: None)
            # Not at the top: importing torch reads the variables that were set just now.
            outcome = importlib.import_module("titanlab.training.train").train(
                recipe, run, ranks, stop=stop, watchdog=watchdog, attempt=attempt
            )
        except BaseException as error:
            return _failed(error, run, ranks, attempt)
    return int(outcome.kind.exit_code)


def _given_attempt() -> int | None:
    """The attempt that the launcher has begun; None for a rank of torchrun's, which may start before it begins."""
    given = os.environ.get("TITANLAB_ATTEMPT")
    return None if given is None else int(given)


def _watchdog(recipe: Recipe, run: RunFolder, ranks: Ranks, attempt: int | None) -> Watchdog:
    begin = time.time()

    def note(outcome: Outcome) -> None:
        run.write_failure(replace(outcome, attempt=attempt or max(run.attempts(), default=1)))

    return Watchdog(
        step_seconds=recipe.training.step_timeout_seconds,
        first_seconds=recipe.training.first_step_timeout_seconds,
        note=note,
        rank=ranks.rank,
        is_asked=lambda: ranks.world > 1 and bool(hangs_of_others(run, ranks.rank, since=begin)),
        idle_waits=recipe.cluster.accelerator == "cpu",
    )


def _show_stacks() -> None:
    """Write Python stacks to standard error when native code crashes, and when whoever watches this rank asks."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # No such file, as under a test's capture.
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def _failed(error: BaseException, run: RunFolder, ranks: Ranks, attempt: int | None) -> int:
    """Note the failure: whoever started the ranks tells from the notes whose made the others fail."""
    note = from_exception(error, rank=ranks.rank, attempt=attempt or max(run.attempts(), default=0))
    told = note.echo or disk_fault(error) is not None
    if note.attempt:
        try:
            run.write_failure(note)
        except OSError:
            # Nothing can be written: the log and the exit code are all that is left to say it.
            told = False
    # A mistake, an echo or a full disk is told in one line, by whoever reads the notes.
    if note.traceback and not told:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    return exit_code(error)


def environment(recipe: Recipe, ranks: Ranks) -> dict[str, str]:
    """Variables that must be set before torch is imported; a person's own settings win."""
    threads = recipe.launch.threads or max(1, cores() // ranks.local_world)
    wanted = {
        **ranks.environment(),
        "OMP_NUM_THREADS": str(threads),
        # Fewer fragments at the memory's edge; the name changed in torch 2.10.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # The Flight Recorder keeps the last collectives of every rank.
        "TORCH_FR_BUFFER_SIZE": "2000",
        # Ranks fork data readers; the tokenizers library warns about that unless it is told.
        "TOKENIZERS_PARALLELISM": "false",
    }
    if compiled := compiler_cache.default_folder(data_cache.root):
        wanted[compiler_cache.VARIABLE] = str(compiled)
    if recipe.training.deterministic:
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _repair_compiled() -> None:
    """Remove what a killed run has left in the compiler's cache, before torch reads it."""
    folder = os.environ.get(compiler_cache.VARIABLE)
    if folder is None:
        return
    try:
        removed = compiler_cache.repair(Path(folder))
        line = f"{folder}: removed {len(removed)} damaged files of compilers that were killed" if removed else ""
    except OSError as error:
        line = f"{folder}: cannot look for damaged files ({error.strerror})"
    if line:
        sys.stderr.write(line + "\n")


def _keep_freed_memory() -> None:
    """Let glibc keep the memory that tensors free, for the tensors of the next step.

    By default every large tensor is mapped anew and its pages are zeroed by the kernel at first touch, step
    after step (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD). Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    trim_threshold, mmap_max, never, none = -1, -4, 2**31 - 1, 0
    mallopt(trim_threshold, never)
    mallopt(mmap_max, none)


def _write_to_own_log() -> None:
    """Send what this rank and its libraries print to the file that the launcher names, after what is there."""
    log = os.environ.get("TITANLAB_LOG")
    if log is None:
        return
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


def _end_with_parent() -> None:
    """Ask Linux to end this rank when the launcher that started it dies, so that none is left behind."""
    parent = os.environ.get("TITANLAB_PARENT")
    if parent is None or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(parent):
        # It died before we asked.
        sys.exit(1)


if __name__ == "__main__":
    _show_stacks()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        # A log on a full disk.
        with contextlib.suppress(OSError):
            stream.flush()
    # Everything is on disk. What follows in an ordinary exit is the destruction of torch's own threads, which now
    # and then aborts ("terminate called without an active exception", torch 2.13 on gloo) and would turn a run
    # that is done into a failed process. May go when torch joins its threads.
    os._exit(code)
