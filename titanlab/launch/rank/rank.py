"""One rank: it reads the config, sets the environment variables that torch reads at import, then imports torch."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import importlib
import inspect
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

from titanlab.data import cache as data_cache
from titanlab.data import source
from titanlab.distributed import (
    ALONE,
    ATTEMPT,
    LOG,
    PIDS_FILE,
    Ranks,
    StartUp,
    StoppedEarly,
    Watchdog,
    hangs_of_others,
    joined,
    read_stop,
    share_of_cores,
    start_of_worker,
    stop_request,
    stopped_early,
    thread_variables,
)
from titanlab.errors import TitanlabError
from titanlab.launch.rank.fork import end_with_parent, fork_ranks, hear_stop_signals
from titanlab.recipe import Recipe, from_mapping
from titanlab.records import (
    HangRecord,
    Outcome,
    RunFolder,
    exit_code,
    from_exception,
    is_secondary,
    open_run,
    write_hang,
)
from titanlab.system import Console, FolderGone, counted, disk_fault, import_quietly, kept_imports, open_to_write
from titanlab.techniques.compile import cache as compiler_cache

if TYPE_CHECKING:
    from titanlab.train import Observer


def import_trainer() -> None:
    """Import the training loop, and what every recipe needs of torch before its first step."""
    with kept_imports(), _frames_know_their_module():
        importlib.import_module("titanlab.train.train")
        # Optimizers, DDP, FSDP2 and DTensor import this module when they are first used.
        importlib.import_module("torch._dynamo")


def import_techniques(recipe: Recipe) -> None:
    """Import what a recipe's techniques need: before the fork, so that not every rank imports it."""
    # Ignore a failure here: every rank fails in the same way later, and records it.
    with kept_imports(), _frames_know_their_module(), contextlib.suppress(Exception):
        for config in (recipe.model, recipe.precision, recipe.ac, recipe.optimizer):
            config.implementation()
        if recipe.layout.pipeline > 1:
            importlib.import_module("titanlab.parallelism.pipeline")
        if recipe.precision.layer_class:
            # The import of torchao alone takes seconds.
            import_quietly(recipe.precision.layer_class.rpartition(".")[0])


@contextlib.contextmanager
def _frames_know_their_module() -> Iterator[None]:
    """Inside the block, `inspect` finds the module of a frame by the module's name.

    For every operator that torch registers (`torch/library.py`), torch asks `inspect` for the module and source line,
    and `inspect` looks up the real path of each imported module: two fifths of the 43,000 file calls of a rank's
    imports. This can go when torch no longer asks `inspect`.
    """
    searched = inspect.getmodule

    def module_of(object: object, _filename: str | None = None) -> ModuleType | None:  # noqa: A002
        if isinstance(object, FrameType):
            return sys.modules.get(object.f_globals.get("__name__", ""))
        return searched(object, _filename)

    inspect.getmodule = module_of
    try:
        yield
    finally:
        inspect.getmodule = searched


# A stop request before the first step takes effect after this time. If this rank fails itself, its error comes first.
EARLY_SECONDS = 1.0


def main(
    arguments: Sequence[str] | None = None, *, observe: Callable[[Recipe, RunFolder, Ranks], Observer] | None = None
) -> int:
    """Train the run in a folder as the rank that the environment names. Returns the process's exit code."""
    folder, *rest = sys.argv[1:] if arguments is None else arguments
    start_up = start_of_worker()
    shared: Recipe | None = None
    if PIDS_FILE in os.environ:
        # `fork_ranks` returns only in the ranks that it forks.
        run = open_run(Path(folder))
        shared = fork_ranks(run.logs, lambda: _import_before_fork(run, start_up))
    end_with_parent()
    _write_to_own_log()
    ranks = joined(os.environ) or ALONE
    run = open_run(Path(folder))
    attempt = _begun_attempt()
    config_line = sys.stdin.readline() if rest == ["-"] else None
    # From here on, a stop request ends this rank: soon if no step is done yet, otherwise at the end of a step.
    watchdog: Watchdog | None = None
    with contextlib.ExitStack() as stack:
        # Only rank 0 writes to the terminal.
        console = stack.enter_context(Console(quiet=ranks.rank > 0))
        if ranks.rank == 0:
            start_up.show_by(console.phase)
        start_up.begin("recipe", "reading the recipe")
        stop = stack.enter_context(stop_request(lambda: read_stop(run.attempt_folder(attempt)) if attempt else None))
        hear_stop_signals()
        try:
            stack.enter_context(stop.at_once(active=True, patience_seconds=EARLY_SECONDS))
            recipe = shared or _read_recipe(run, attempt, config_line)
            if ranks.rank == 0:
                # The same launcher may have made an earlier attempt: count this start from the end of that attempt.
                with contextlib.suppress(TitanlabError):
                    earlier = run.result(attempt - 1) if attempt is not None and attempt > 1 else None
                    if earlier is not None and earlier.ended:
                        start_up.begin_after(earlier.ended)
            watchdog = _watchdog(recipe, run, ranks, attempt)
            stack.callback(watchdog.close)
            _set_environment(recipe, ranks, console)
            publish_compiled = _compile_in_own_folder(run, attempt, stack)
            if recipe.cluster.accelerator == "cpu":
                _keep_freed_memory()
            # Fast if the host's cache has the data. Several ranks of a host may call it at the same time.
            source.prepare(recipe.data, report=lambda line: None)
            # Imported here: torch reads the variables that were set above when it is imported.
            start_up.begin("imports", "importing torch")
            import_trainer()
            from titanlab.train.train import train

            outcome = train(
                recipe,
                run,
                ranks,
                stop=stop,
                watchdog=watchdog,
                attempt=attempt,
                observer=None if observe is None else observe(recipe, run, ranks),
                start_up=start_up,
            )
            # Every rank has done the last step, so no rank compiles any more.
            if ranks.local_rank == 0:
                publish_compiled()
        except BaseException as error:
            # After a stop request another rank may end first: the lost connection to it is then no failure.
            is_early = isinstance(error, StoppedEarly) or (stop.ends_at_once and stop.signal and is_secondary(error))
            # A stop request that arrives now must not raise.
            stop.ends_at_once = False
            if not is_early:
                return _failed(error, run, ranks, attempt, watchdog)
            when = str(error) if isinstance(error, StoppedEarly) else ""
            early = stopped_early(stop, rank=ranks.rank, attempt=attempt or run.newest_attempt(), when=when)
            with contextlib.suppress(OSError):
                run.write_failure(early)
            return early.kind.exit_code
    return int(outcome.kind.exit_code)


def _read_recipe(run: RunFolder, attempt: int | None, config_line: str | None = None) -> Recipe:
    config = run.config(attempt or max(run.attempts())) if config_line is None else json.loads(config_line)
    # `from_mapping` imports the schemas of all options.
    with kept_imports():
        return from_mapping(config)


def _import_before_fork(run: RunFolder, start_up: StartUp) -> Recipe | None:
    """Import what all ranks of this host need, before they are forked. Returns the recipe if it can be read.

    An accelerator must not be initialised before a fork, and a library may initialise it when it is imported. So with
    an accelerator, each rank imports torch itself.
    """
    recipe = None
    # If this fails, it fails again in every rank, which records the failure. The console's thread ends before the fork.
    with Console() as console, contextlib.suppress(Exception):
        start_up.begin("recipe")
        console.phase("importing torch")
        recipe = _read_recipe(run, _begun_attempt())
        if recipe.cluster.accelerator == "cpu":
            _set_environment(recipe, joined(os.environ) or ALONE, console)
            start_up.begin("imports")
            import_trainer()
            import_techniques(recipe)
    return recipe


def _begun_attempt() -> int | None:
    """The attempt that the launcher has begun; None under torchrun, where a rank may start before the attempt."""
    attempt = os.environ.get(ATTEMPT)
    return None if attempt is None else int(attempt)


def _watchdog(recipe: Recipe, run: RunFolder, ranks: Ranks, attempt: int | None) -> Watchdog:
    begin = time.time()

    def note(outcome: Outcome, record: HangRecord | None) -> None:
        number = attempt or run.newest_attempt() or 1
        # Write the record of the hang first: a reader that sees the failure then finds the record too.
        if record is not None:
            with contextlib.suppress(OSError):
                write_hang(run, number, record)
        run.write_failure(replace(outcome, attempt=number))

    return Watchdog(
        step_seconds=recipe.training.step_timeout_seconds,
        first_seconds=recipe.training.first_step_timeout_seconds,
        note=note,
        rank=ranks.rank,
        world=ranks.world,
        is_asked=lambda: ranks.world > 1 and bool(hangs_of_others(run, ranks.rank, since=begin)),
        idle_waits=recipe.cluster.accelerator == "cpu",
    )


def show_stacks() -> None:
    """Write Python stacks to standard error when native code crashes, and when SIGUSR1 asks for them."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr has no file descriptor, as in pytest.
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def _failed(error: BaseException, run: RunFolder, ranks: Ranks, attempt: int | None, watchdog: Watchdog | None) -> int:
    """Record the failure: the launcher finds the cause in the records of all ranks. Returns the exit code."""
    step = 0 if watchdog is None else watchdog.done
    note = from_exception(error, step=step, rank=ranks.rank, attempt=attempt or run.newest_attempt())
    is_impatient = isinstance(error, KeyboardInterrupt)
    if is_impatient:
        lost = run.lost_steps(step)
        cause = f"interrupted again, so it has not saved{lost and f'; {lost}'}"
        # The place of the error does not matter: this rank was stopped, or lost the connection to a stopped rank.
        note = replace(note, cause=cause, traceback=None, echo=False)
    is_reported = note.echo or disk_fault(error) is not None
    if note.attempt:
        if watchdog is not None and ranks.world > 1 and not is_impatient and not isinstance(error, TitanlabError):
            # A collective may have failed because of another rank. Nothing here may hide the error itself.
            with contextlib.suppress(Exception):
                write_hang(run, note.attempt, watchdog.record_of_error(error))
        try:
            run.write_failure(note)
        except OSError:
            # The record cannot be written: only the log and the exit code can report the failure. The launcher itself
            # sees that the run's folder is missing.
            is_reported = isinstance(error, FolderGone)
    # Print no traceback of a user's error, a secondary failure or a full disk: the launcher prints these in one line.
    if note.traceback and not is_reported:
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    return exit_code(error)


def _set_environment(recipe: Recipe, ranks: Ranks, console: Console) -> None:
    variables = environment(recipe, ranks)
    if recipe.launch.threads is None and ranks.rank == 0:
        for name in variables.keys() & os.environ.keys():
            here = counted(ranks.local_world, "process", "processes")
            rule = f"{here} on this host would use more threads than there are cores"
            console.warn(
                f"{name}={os.environ[name]}: {rule}; each uses {variables[name]} (launch.threads overrides it)"
            )
    os.environ.update(variables)


def environment(recipe: Recipe, ranks: Ranks) -> dict[str, str]:
    """Variables to set before torch is imported. Variables of the user stay, except too large numbers of threads."""
    share = share_of_cores(ranks.local_world, os.environ)
    variables = {
        **ranks.environment(),
        # Less fragmentation of GPU memory. torch 2.10 renamed the variable.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # The Flight Recorder keeps the last collectives of every rank.
        "TORCH_FR_BUFFER_SIZE": "2000",
        # Ranks fork data readers; the tokenizers library warns about forks unless this is set.
        "TOKENIZERS_PARALLELISM": "false",
        **compiler_cache.ENVIRONMENT,
    }
    if compiler_cache.VARIABLE not in os.environ:
        variables[compiler_cache.VARIABLE] = str(compiler_cache.default_folder(data_cache.root))
    if recipe.training.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    unset = {name: value for name, value in variables.items() if name not in os.environ}
    return unset | thread_variables(os.environ, share, recipe.launch.threads)


def _compile_in_own_folder(run: RunFolder, attempt: int | None, stack: contextlib.ExitStack) -> Callable[[], None]:
    """Let torch compile in an attempt's folder until the stack closes. Returns a function that adds it to the cache."""
    cache = Path(os.environ[compiler_cache.VARIABLE])
    name = f"{hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()[:16]}-{attempt or 0}"
    try:
        folder = stack.enter_context(compiler_cache.attempt_folder(cache, name))
    except OSError as error:
        sys.stderr.write(f"{cache}: cannot hold a folder for this attempt ({error.strerror}): torch compiles in it\n")
        return lambda: None

    def publish() -> None:
        try:
            compiler_cache.publish(folder)
        except OSError as error:
            sys.stderr.write(f"{cache}: compiled code is not kept for other runs ({error.strerror})\n")

    return publish


def _keep_freed_memory() -> None:
    """Make glibc keep the memory that tensors free, so that the next step reuses it.

    By default glibc maps memory for every large tensor again, and the kernel zeroes its pages at first touch, in every
    step (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD). Other C libraries have no mallopt; then nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4
        mallopt(trim_threshold, 2**31 - 1)
        mallopt(mmap_max, 0)


def _write_to_own_log() -> None:
    """Append the output of this rank and its libraries to the log file that the launcher names."""
    log = os.environ.get(LOG)
    if log is None:
        return
    descriptor = open_to_write(Path(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Python writes files in blocks: a model's output would come late, and would be lost if the rank is killed.
        sys.stdout.reconfigure(line_buffering=True)
