"""One attempt at a run, from outside its ranks: checks before it, its outcome, and whether another attempt follows."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from titanlab.checkpoint import (
    DamagedCheckpoint,
    Place,
    StorePath,
    checkpoints_of,
    claim_place,
    fall_back,
    latest,
    put_aside,
    read_contents,
    remove_unfinished,
    step_of,
)
from titanlab.data import keep, source
from titanlab.distributed import (
    NATIVE_SIGN,
    Ranks,
    judged,
    read_stop,
    share_of_cores,
    this_host,
    thread_count,
    thread_variables,
    world_of,
)
from titanlab.errors import ConfigError
from titanlab.launch.contract import launch_of
from titanlab.launch.evidence import may_work
from titanlab.launch.launchers import given_cores
from titanlab.recipe import LaunchSettings, Recipe, adapted, check_all_but_data, resolve, to_mapping
from titanlab.records import (
    RESTART,
    KillEvidence,
    Outcome,
    OutcomeKind,
    RunFolder,
    collect,
    from_exit,
    metrics_of,
    part_of,
    rank_log,
    read_hang,
    says_oom,
    text_at_end,
)
from titanlab.system import StoreFault, disk_fault, tells_of_disk, write_json

# `close_dead` counts an attempt as dead if its last status is older than this. Ranks may outlive a killed launcher a
# little. Processes of another host cannot be seen: there, wait longer than a first step may take.
_HERE_SECONDS = 10.0
_SILENT_SECONDS = 2 * 3600.0
_EARLIER_SECONDS = 60.0
_POLL_SECONDS = 0.2
_RESUMABLE = "; the run can be resumed"


def begin(
    run: RunFolder,
    recipe: Recipe,
    report: Callable[[str], None],
    *,
    ranks: Ranks | None = None,
    checkpoint: Place | None = None,
) -> int:
    """Begin the next attempt at a claimed run. Returns its number.

    Args:
        ranks: rank and world of this process, if other ranks are started elsewhere; None: this process starts all.
        checkpoint: chosen by the user; if it is damaged, no older one is tried. None: the newest.

    Raises:
        ConfigError: the run's checkpoint is missing, damaged, or of another model; or a file that the attempt appends
            to is a link.
    """
    for path in (run.path / "metrics.jsonl", *sorted(run.logs.glob("*.log"))):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            what = "a symbolic link" if path.is_symlink() else "not a regular file"
            raise ConfigError("run", path, f"is {what}, and this attempt would append to it", "remove it")
    if checkpoint is None:
        pass_over_damaged(run, recipe, report)
    launcher = launch_of(recipe).kind if ranks is None else ranks.started_by
    devices = {"accelerator": recipe.cluster.accelerator, "name": recipe.cluster.device, "count": this_host().count}
    environ = {**os.environ, **given_cores(launcher, os.environ)}
    share = share_of_cores(recipe.layout.world if ranks is None else ranks.local_world, environ)
    threads = thread_count({**environ, **thread_variables(environ, share, recipe.launch.threads)})
    provenance = collect(devices=devices, launcher=launcher, threads=threads)
    attempt = run.begin_attempt(to_mapping(recipe), provenance.record, patch=provenance.patch)
    if checkpoint is not None:
        run.note_chosen(attempt, step_of(checkpoint))
    return attempt


def pass_over_damaged(run: RunFolder, recipe: Recipe, report: Callable[[str], None]) -> None:
    """Check a claimed run's newest checkpoint. If it is damaged, rename it and check the one before it, and so on.

    The tensors are not read here: the ranks verify them while they load, and fall back in the same way.

    Raises:
        ConfigError: the only checkpoint that is left is damaged, or one is missing or of another model.
    """
    claim_place(run)
    while True:
        try:
            return check_own_checkpoint(run, recipe, latest(checkpoints_of(run)))
        except DamagedCheckpoint as error:
            report(fall_back(error))


def check_own_checkpoint(run: RunFolder, recipe: Recipe, checkpoint: Place | None) -> None:
    """Check that a run can resume from a checkpoint; or, without a checkpoint, that the run has saved no step yet.

    Raises:
        ConfigError: the checkpoint is missing, damaged, or of another model or run.
    """
    if checkpoint is None:
        saved = run.saved_step()
        if not saved and run.section("checkpoint").get("load_from") is None:
            # Each of these rows has the step from which an attempt resumed: the run had saved that step. A run that
            # started from another run's checkpoint is excluded: it has such a row before it has saved anything.
            saved = max((row["step"] for row in run.metrics("attempt")), default=0)
        if saved:
            place = checkpoints_of(run)
            name = place if isinstance(place, StorePath) else f"{place.name}/"
            rule = f"had saved step {saved}, and {name} has no checkpoint any more"
            cure = f"bring that folder back; or remove {run.path}, and train anew from step 1"
            raise ConfigError("run", run.path, rule, cure)
        return
    contents = read_contents(checkpoint, "run")
    contents.check_model(recipe.model.account().parameters)
    contents.check_whole()
    identity, other = run.identity(), contents.saved.recipe
    if identity is not None and other not in (None, identity.sha256):
        raise contents.unusable(f"is of another run, whose identity begins with {str(other)[:8]}")


def go_back(run: RunFolder, recipe: Recipe, checkpoint: Place, report: Callable[[str], None]) -> list[Place]:
    """Make a checkpoint of a claimed run its newest one: rename all later checkpoints. Returns them for `put_back`.

    Raises:
        ConfigError: the run cannot resume from that checkpoint; nothing was changed.
    """
    claim_place(run)
    check_own_checkpoint(run, recipe, checkpoint)
    renamed = put_aside(checkpoints_of(run), after=step_of(checkpoint))
    for path in renamed:
        report(f"goes on from step {step_of(checkpoint)}: {path.stem}, which is later, is put aside as {path.name}")
    return renamed


def missed_checkpoint(run: RunFolder) -> str | None:
    """A line for the user if a checkpoint that the run had saved is missing; None if none is missing."""
    newest, saved = latest(checkpoints_of(run)), run.saved_step()
    if newest is None or step_of(newest) >= saved:
        return None
    rule = f"the checkpoint of step {saved}, which was saved later, is not among its checkpoints"
    return f"goes on from step {step_of(newest)}: {rule}"


def close_dead(run: RunFolder) -> None:
    """Write the result of an attempt that `titanlab train` began, if it has no result and no living process.

    Raises:
        ConfigError: another process has claimed the run, or a file is damaged.
        OSError: the result cannot be written.
    """
    status = run.known_status()
    # Skip the attempts of a job: the job's launcher knows more about their end.
    if status is None or run.job() is not None or not run.newest_attempt() or run.result() is not None:
        return
    if not may_work(status, silent_seconds=_SILENT_SECONDS, here_seconds=_HERE_SECONDS):
        with run.claim():
            _close(run)


def close_earlier(run: RunFolder) -> None:
    """Wait until the ranks of a claimed run's earlier attempt have ended, and make sure that the attempt has a result.

    If the launcher of that attempt was killed, its ranks may still save.

    Raises:
        ConfigError: the ranks do not end.
    """
    end = time.monotonic() + _EARLIER_SECONDS
    while (status := run.known_status()) is not None and may_work(status, silent_seconds=0.0):
        if time.monotonic() > end:
            rule = f"its launcher is gone, and process {status.pid} still works on it"
            raise ConfigError("run", run.path, rule, f"wait for it, or kill it: kill -9 {status.pid}")
        time.sleep(_POLL_SECONDS)
    _close(run)


def _close(run: RunFolder) -> None:
    attempt = run.newest_attempt()
    if not attempt or run.result() is not None:
        return
    if (recorded := run.result(attempt)) is not None:
        # The attempt's result was written, but the run's was not, such as on a full disk.
        run.write_result(recorded)
        return
    if run.failures(attempt):
        conclude(run, attempt, {})
        return
    kind = OutcomeKind.CRASH
    cause = "its processes left no result: they were killed, their host ended, or the disk was full"
    if (reason := read_stop(run.attempt_folder(attempt))) is not None:
        kind, cause = reason.kind, f"{reason.cause.removesuffix(_RESUMABLE)}; it ended before it had saved"
    run.write_result(with_progress(run, Outcome(kind=kind, attempt=attempt, cause=f"{cause}{_RESUMABLE}")))


def keep_tokenizer(run: RunFolder, recipe: Recipe) -> None:
    """Copy the tokenizer into the run's folder, so that the run's checkpoints are usable when it is moved."""
    tokenizer = source.tokenizer(recipe.data)
    if tokenizer is None:
        return
    run.tokenizer.mkdir(exist_ok=True)
    keep(tokenizer.file, run.tokenizer)


def conclude(run: RunFolder, attempt: int, exits: Mapping[int, int], *, memory: KillEvidence | None = None) -> Outcome:
    """Record and return the outcome of an attempt whose ranks ended without recording one."""
    notes = {note.rank or 0: note for note in run.failures(attempt)}
    for rank, code in exits.items():
        if rank not in notes:
            notes[rank] = note_of_exit(run, attempt, rank, code, memory)
    records, _ = read_hang(run, attempt)
    outcome = judged(list(notes.values()), world_of(run, attempt), records) if notes else from_exit(0, attempt=attempt)
    outcome = with_progress(run, outcome)
    try:
        run.write_result(outcome)
    except OSError as error:
        if disk_fault(error) is None:
            raise
        # All ranks have ended: nothing writes to unfinished checkpoints any more, and their space is needed.
        remove_unfinished(run.checkpoints)
        run.write_result(outcome)
    return outcome


def note_of_exit(run: RunFolder, attempt: int, rank: int, code: int, memory: KillEvidence | None) -> Outcome:
    """The outcome of a rank that left an exit code but no record; the log of this attempt may add the cause."""
    outcome, path = from_exit(code, rank=rank, attempt=attempt, memory=memory), rank_log(run, rank)
    begin = 0
    with contextlib.suppress(ConfigError):
        begin = part_of(run, rank, path, attempt).start
    output = text_at_end(path, begin=begin)
    if NATIVE_SIGN in output and code == 1:
        cause = "a step did not end in time, in native code that lets no other thread run; its log has the stacks"
        stacks = output[output.rindex(NATIVE_SIGN) :]
        exit_code = OutcomeKind.HANG.exit_code
        return replace(outcome, kind=OutcomeKind.HANG, cause=cause, traceback=stacks, exit_code=exit_code)
    # A killed process cannot log a reason: do not take the end of its log for the reason.
    if outcome.kind is not OutcomeKind.CRASH or code in (0, -signal.SIGKILL):
        return outcome
    lines = [line.strip() for line in output.splitlines()]
    # C++ prints the text of an uncaught exception after `what():`.
    words = [line.removeprefix("what():").strip() for line in lines if line.startswith("what():")]
    if code == -signal.SIGABRT and words:
        outcome = replace(outcome, cause=f"{words[-1][:300]} (SIGABRT)")
    elif (line := next(filter(says_oom, reversed(lines)), None)) is not None:
        outcome = replace(outcome, kind=OutcomeKind.OOM, cause=f"{line[:300]} ({outcome.cause})")
    return replace(outcome, traceback="\n".join(output.rstrip().splitlines()[-40:]) or None)


def with_progress(run: RunFolder, outcome: Outcome) -> Outcome:
    """The outcome, with the last step of its attempt that any record shows.

    Attempt 0 means that the outcome belongs to no attempt: then the steps and metrics of the last attempt are kept.
    """
    # Read several records: the status may be a second old, and not every step has a row of metrics.
    status, earlier = run.known_status(), None if outcome.attempt else run.result()
    status = status if status is not None and outcome.attempt in (0, status.attempt) else None
    rows = [row for row in run.metrics("train") if row["attempt"] == outcome.attempt]
    first_steps = [row["step"] for row in run.metrics("attempt") if row["attempt"] == outcome.attempt]
    saved = None
    # The store may be down, which may be why the run has ended. Other records have the step too.
    with contextlib.suppress(StoreFault):
        saved = latest(checkpoints_of(run))
    known = [each.step for each in (outcome, status, earlier) if each is not None]
    known += [step_of(saved)] if saved is not None else []
    known += [*first_steps, *(row["step"] for row in rows)]
    last = metrics_of(rows[-1]) if rows else earlier.metrics if earlier else {}
    steps = status.steps if status else earlier.steps if earlier else None
    return replace(outcome, step=max(known), steps=steps, metrics=outcome.metrics or last)


# Outcomes whose cause may be one bad process or machine: another attempt may succeed.
RESTARTED = (OutcomeKind.CRASH, OutcomeKind.HANG, OutcomeKind.OOM, OutcomeKind.NODE_FAIL)
# After this many restarts in a row without progress, the ranks do not start again: the cause is in the run itself.
MOST_IN_VAIN = 2


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The next attempt, for which the ranks start again in place, from the newest checkpoint.

    Attributes:
        recipe: resolved and checked; its layout may be smaller.
        number: counts the restarts since this start of the run, from 1.
        after: the number of the attempt that has ended.
        cause: why that attempt has ended.
        why: one line: how the last attempt ended, and what happens now.
        left_out: the rank of the last attempt that is left out because it has failed twice; None: no rank is.
        lost: why ranks are left out as lost, in one clause; empty: no rank is lost.
    """

    recipe: Recipe
    number: int
    after: int
    why: str
    cause: str | None
    left_out: int | None = None
    lost: str = ""

    def note(self, run: RunFolder, attempt: int) -> None:
        """Record in an attempt's folder that it is a restart, and why."""
        facts = {"schema": 1, "number": self.number, "after_attempt": self.after, "cause": self.cause, "why": self.why}
        facts |= {"left_out": self.left_out, "lost": self.lost or None, "world": self.recipe.layout.world}
        write_json(run.attempt_folder(attempt) / RESTART, facts)


class Restarts:
    """Decides, after each attempt of one start of a run, whether the ranks start again (docs/elastic.md has the rules).

    The ranks restart at most `launch.restarts` times, and not if the next attempt would only end in the same way. With
    `launch.min_world`, a rank that fails twice in a row is left out, and ranks that are lost with their node are left
    out at once.

    Args:
        fixed: ranks that cannot be left out.
    """

    def __init__(self, run: RunFolder, launch: LaunchSettings, *, fixed: Collection[int] = ()) -> None:
        self._run, self._fixed = run, tuple(fixed)
        self._most, self._min_world = launch.restarts, launch.min_world
        self._count = self._in_vain = self._in_a_row = 0
        self._best = (run.saved_step(), 0)
        self._failed: int | None = None
        # The first attempt does not count as in vain, even if it gained nothing.
        self._is_first = True

    def after(
        self, outcome: Outcome, recipe: Recipe, *, lost: str = "", usable: int | None = None
    ) -> tuple[Restart | None, str]:
        """The restart after an attempt that has ended; or None, with the reason if the user should know it.

        Args:
            lost: which ranks are lost and why, in one clause; empty: no rank is lost.
            usable: number of processes that are left, including those that the attempt did not use; None: the processes
                of the attempt.
        """
        if not self._most or outcome.kind not in RESTARTED or tells_of_disk(outcome.cause):
            return None, ""
        if outcome.exit_code == OutcomeKind.INFEASIBLE.exit_code:
            return None, ""
        # Progress is a new checkpoint, or a step that no earlier attempt had reached.
        saved, step = self._run.saved_step(), outcome.step
        gained = self._is_first or saved > self._best[0] or step > self._best[1]
        self._best, self._is_first = (max(saved, self._best[0]), max(step, self._best[1])), False
        self._in_vain = 0 if gained else self._in_vain + 1
        self._in_a_row = self._in_a_row + 1 if outcome.rank is not None and outcome.rank == self._failed else 1
        self._failed = outcome.rank
        if self._count >= self._most:
            return None, f"not restarted: launch.restarts={self._most} are used up"
        allowed = 1 if outcome.kind is OutcomeKind.OOM else MOST_IN_VAIN
        if self._in_vain >= allowed:
            times = "1 restart has" if allowed == 1 else f"{allowed} restarts in a row have"
            return None, f"not restarted: {times} reached no further step and saved no checkpoint"
        self._count += 1
        world, least = recipe.layout.world, self._min_world
        usable = world if usable is None else usable
        why = self._line(outcome)
        too_few = f"no smaller layout of at least launch.min_world={least} processes fits"
        # If ranks are left out: the recipe of the next attempt. It stays the same if other processes take their places.
        smaller: Recipe | None = None
        left_out = None
        if lost:
            smaller = recipe if usable >= world else reduced(recipe, usable, least)
            if smaller is None:
                return None, f"not restarted: {lost}, and {too_few}"
            others = f"other processes of the job take their places in {recipe.layout.label}"
            why += f"; {lost}, and left out: {others if smaller is recipe else change(recipe, smaller)}"
        elif least is not None and self._in_a_row >= 2:
            why += f"; rank {self._failed} has failed twice"
            if self._failed in self._fixed:
                why += ", and is the one that cannot be left out"
            elif usable > world:
                smaller = recipe
                why += " and is left out: another process of the job takes its place"
            elif (smaller := reduced(recipe, usable - 1, least)) is not None:
                why += f" and is left out: {change(recipe, smaller)}"
            else:
                why += f", and {too_few}"
            left_out = self._failed if smaller is not None else None
        if smaller is not None:
            self._failed, self._in_a_row = None, 0
        restart = Restart(
            recipe=smaller or recipe,
            number=self._count,
            after=outcome.attempt,
            why=why,
            cause=outcome.cause,
            left_out=left_out,
            lost=lost,
        )
        return restart, ""

    def _line(self, outcome: Outcome) -> str:
        checkpoint = latest(checkpoints_of(self._run))
        place = "the beginning" if checkpoint is None else f"step {step_of(checkpoint)}"
        rank = "" if outcome.rank is None else f", rank {outcome.rank}"
        return (
            f"attempt {outcome.attempt} ended as {outcome.kind.value} after step {outcome.step}{rank}"
            f" ({outcome.cause or outcome.kind.meaning}); restart {self._count} of {self._most} from {place}"
        )


def change(recipe: Recipe, smaller: Recipe) -> str:
    """One clause for the user: the old and the smaller layout, and the rule by which the smaller one was chosen."""
    return (
        f"{recipe.layout.label} becomes {smaller.layout.label}, the most data-parallel processes that are left and "
        f"divide training.global_batch={recipe.training.global_batch}, in microbatches of {smaller.microbatch}"
    )


def reduced(recipe: Recipe, usable: int, least: int | None) -> Recipe | None:
    """The resolved recipe with the largest data-parallel degree that fits the usable processes; None if none does.

    Pipeline, context and tensor degrees stay. If several layouts have that degree, the largest `shard` is preferred.
    """
    if least is None:
        return None
    layout = recipe.layout
    others = layout.world // layout.data
    pairs = [
        (replicate, shard)
        for replicate in range(1, layout.replicate + 1)
        for shard in range(1, layout.shard + 1)
        if least <= replicate * shard * others <= usable and recipe.training.global_batch % (replicate * shard) == 0
    ]
    for replicate, shard in sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair[1]), reverse=True):
        degrees = {**layout.degrees(), "replicate": replicate, "shard": shard}
        smaller = replace(recipe, world=None, parallelism=recipe.parallelism.with_degrees(degrees))
        try:
            smaller, _ = adapted(smaller, recipe)
            cluster = recipe.cluster
            smaller = resolve(smaller, world=None, accelerator=cluster.accelerator, device=str(cluster.device))
            check_all_but_data(smaller)
        except ConfigError:
            continue
        return smaller
    return None
