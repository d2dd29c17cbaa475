"""From a composed recipe to a finished run: check everything, then start the ranks.

This module does not import torch: an error in a recipe is reported within a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from titanlab.checkpoint import Place, parent_of, put_back
from titanlab.data import source
from titanlab.distributed import Ranks, check_host, held_signals, stopped_before_start, this_host
from titanlab.errors import ConfigError
from titanlab.launch import processes
from titanlab.launch.attempt import (
    RESTARTED,
    Restart,
    Restarts,
    begin,
    change,
    close_earlier,
    conclude,
    go_back,
    keep_tokenizer,
    missed_checkpoint,
    reduced,
    with_progress,
)
from titanlab.launch.contract import launch_of
from titanlab.launch.evidence import memory_kills, note_bad_host, suspect
from titanlab.launch.job import Job, Loss, Rendezvous, address_of, lost_ranks, port_of, publish_meeting
from titanlab.launch.launchers import default_config, joined
from titanlab.launch.watch import StopCheck, say, settle, watched
from titanlab.recipe import (
    Recipe,
    check,
    check_host_memory,
    check_unedited,
    from_mapping,
    resolve,
    shortened_warmup,
    to_mapping,
)
from titanlab.records import (
    Identity,
    KillEvidence,
    Outcome,
    OutcomeKind,
    RunFolder,
    check_runs,
    create_run,
    from_exit,
    identify,
)
from titanlab.system import Console, counted, disk_fault, shown_path, tells_of_disk
from titanlab.train import check_beginning, not_read, start_fingerprint, write_at_end


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A recipe that has passed every check, with prepared data and a name."""

    recipe: Recipe
    identity: Identity
    ranks: Ranks | None


def prepare(
    recipes: Sequence[Recipe],
    report: Callable[[str], None],
    *,
    started: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> list[Ready]:
    """Resolve and check recipes, and prepare their data; no run folder is created and nothing starts.

    Args:
        started: the runs have begun before: do not check the weights from which they started, which may be gone.
    """
    host, ranks = this_host(), joined(environ)
    resolved = []
    # All quick checks of all recipes come before the data of any recipe is prepared.
    for given in recipes:
        recipe = resolve(given, world=ranks.world if ranks else None, accelerator=host.accelerator, device=host.device)
        check(recipe)
        processes = ranks.local_world if ranks else recipe.layout.world
        check_host(
            host,
            accelerator=recipe.cluster.accelerator,
            device=recipe.cluster.device,
            processes=processes,
            has_own_gpu=ranks is not None and ranks.has_own_gpu,
        )
        check_host_memory(recipe, host, processes=processes)
        check_runs(recipe.runs)
        if not started:
            check_beginning(recipe)
        resolved.append(recipe)
    if ranks is None or ranks.rank == 0:
        notices = list(map(shortened_warmup, recipes))
        for recipe in () if started else recipes:
            notices += not_read(recipe)
        for notice in dict.fromkeys(filter(None, notices)):
            report(notice)
    ready = []
    for recipe in resolved:
        source.prepare(recipe.data, report=report)
        # Some rules need the corpus itself: its length, or the vocabulary of its tokenizer.
        check(recipe)
        identity = identify(
            recipe,
            data=source.fingerprint(recipe.data),
            hardware=str(recipe.cluster.device),
            repeat=recipe.repeat,
            # A run that has begun has a name already: the weights from which it started are not read again.
            weights=None if started else start_fingerprint(recipe),
        )
        ready.append(Ready(recipe=recipe, identity=identity, ranks=ranks))
    return ready


def execute(ready: Ready, console: Console) -> Outcome:
    """Create or open the run's folder, start the ranks, wait for them, and make sure that the outcome is recorded.

    A finished run is not changed; a stopped run resumes from its latest checkpoint.
    """
    recipe = ready.recipe
    run = create_run(
        recipe.runs,
        sweep=recipe.sweep,
        name=recipe.name,
        identity=ready.identity,
        config=to_mapping(recipe),
        parent=parent_of(recipe.checkpoint.load_from),
    )
    return continue_run(run, recipe, ready.ranks, console)


def continue_run(
    run: RunFolder,
    recipe: Recipe,
    ranks: Ranks | None,
    console: Console,
    *,
    checkpoint: Place | None = None,
) -> Outcome:
    """Begin the next attempt at a run with the given recipe, from its latest checkpoint if there is one.

    Args:
        checkpoint: an older checkpoint of the run to resume from instead; later ones are renamed.
    """
    done = run.result()
    if done is not None and done.kind is OutcomeKind.DONE:
        console.note(
            f"{run.path} is done: {counted(done.steps or 0, 'step')}. For another like it: repeat={recipe.repeat + 1}"
        )
        return done
    if ranks is not None and ranks.rank > 0:
        # Only rank 0 writes records.
        with held_signals():
            failed = processes.start(run, ranks, attempt=None, config=to_mapping(recipe))
        return from_exit(failed[ranks.rank], rank=ranks.rank) if failed else Outcome(kind=OutcomeKind.DONE)
    with run.claim():
        close_earlier(run)
        run.withdraw_cancel()
        put_aside: list[Place] = []
        if checkpoint is not None:
            put_aside = go_back(run, recipe, checkpoint, console.note)
        attempts = Attempts(run, console, recipe=recipe, ranks=ranks, checkpoint=checkpoint, put_aside=put_aside)
        return attempts.make()


class Attempts:
    """The attempts at a claimed run: begin, start the ranks, watch, conclude, and start again or end.

    This process starts all ranks. If torchrun or srun has started it as one rank, it starts only that rank. In a job
    with a task for each rank it starts rank 0, and the tasks of the other ranks join each attempt by its rendezvous.

    Args:
        console: where this process reports; None: its job has a task for each rank, and it reports to its task's log.
        recipe: a prepared recipe; None: the recipe of the job.
        ranks: rank and world of this process, if torchrun or srun has started it.
        checkpoint: the one that the user has chosen for the next attempt; None: the newest.
        put_aside: the checkpoints after the chosen one, which were renamed.
        job: the job of this process, if any; in a job, an attempt that a check prevents gets a result too.

    Attributes:
        restart: the recipe and the reason of an attempt that follows a failure; None: the first attempt.
        round: number of the attempt in this start of the job, from 0.
        members: ranks of the job that take part; empty: all of them.
        has_lost_nodes: whether the last attempt has lost a node of the job.
    """

    def __init__(
        self,
        run: RunFolder,
        console: Console | None,
        *,
        recipe: Recipe | None = None,
        ranks: Ranks | None = None,
        checkpoint: Place | None = None,
        put_aside: Sequence[Place] = (),
        job: Job | None = None,
    ) -> None:
        self.run, self._console, self._recipe, self._ranks, self._job = run, console, recipe, ranks, job
        self._checkpoint, self._put_aside = checkpoint, put_aside
        self.report = say if console is None else console.warn
        self.restart: Restart | None = None
        self._restarts: Restarts | None = None
        self._signals = [] if job is None else job.signals
        self.round = 0
        self.members: tuple[int, ...] = ()
        self.has_lost_nodes = False
        self._loss = Loss()
        self._left_out: set[int] = set()

    @property
    def job(self) -> Job:
        assert self._job is not None
        return self._job

    def make(self) -> Outcome:
        """Make attempts until the ranks do not start again. Returns the last outcome."""
        while True:
            address, port = "", 0
            try:
                recipe = self.recipe() if self.restart is None else self.restart.recipe
                ranks = self._ranks
                if self._console is None:
                    ranks = self.job.place.ranks
                    address, port = address_of(self.job.launcher, self.job.place, os.environ), port_of(os.environ)
                attempt = begin(self.run, recipe, self.report, ranks=ranks, checkpoint=self._checkpoint)
            except Exception as error:
                if self._job is None:
                    raise
                return self._refused(error)
            if self._job is not None:
                self._job.note(attempt)
            if self.restart is not None:
                self.restart.note(self.run, attempt)
            if self._console is None:
                outcome = self._with_tasks(attempt, recipe, address, port)
            else:
                outcome = self._from_here(attempt, recipe, self._console)
            if not self.goes_on_after(outcome, recipe):
                # A stopped run must end soon, and may resume: leave its tracker files to `titanlab sync`.
                is_stopped = outcome.kind.automatic or outcome.kind is OutcomeKind.CANCELLED
                if not is_stopped and (problem := write_at_end(self.run, recipe, attempt)) is not None:
                    self.report(problem)
                return outcome

    def recipe(self) -> Recipe:
        """The recipe of the first attempt, after every check.

        A job that was put back into the queue after the loss of a node may start on fewer nodes: then `reduced`
        chooses a smaller layout, as after a failed attempt.

        Raises:
            ConfigError: the recipe is not valid, or no layout fits so few processes.
        """
        note = self.report if self._console is None else self._console.note
        if self._checkpoint is None and (missed := missed_checkpoint(self.run)):
            note(missed)
        if self._recipe is not None:
            return self._recipe
        self.job.check_code()
        check_unedited(self.run)
        recipe: Recipe = from_mapping(self.job.config())
        if self._console is not None:
            # `environ` is empty: a scheduler's variables may come from the process that submitted, with another rank.
            return prepare([recipe], note, started=True, environ={})[0].recipe
        world, least = self.job.place.ranks.world, recipe.launch.min_world
        if least is None or world >= recipe.layout.world:
            return recipe
        smaller = reduced(recipe, world, least)
        if smaller is None:
            rule = f"has {recipe.layout.world} processes, the job has {world}, and no layout of at least {least} fits"
            cure = f"cancel the job, and submit the run again: titanlab resume {self.run.path}"
            raise ConfigError("launch.min_world", least, rule, cure)
        self.members = tuple(range(smaller.layout.world)) if smaller.layout.world < world else ()
        self.report(f"the job has {world} processes: {change(recipe, smaller)}")
        return smaller

    def _refused(self, error: Exception) -> Outcome:
        config = self.job.config() if self.restart is None else to_mapping(self.restart.recipe)
        outcome = self.job.refused(error, config)
        if self._console is None:
            # Publish a rendezvous without an address: the other ranks wait for it, and then end.
            publish_meeting(self.run, Rendezvous(start=self.job.round(self.round), attempt=outcome.attempt))
            self._say_end(outcome)
        return outcome

    def _from_here(self, attempt: int, recipe: Recipe, console: Console) -> Outcome:
        """Start all ranks, or only the rank of this process, and wait until they end."""
        run, ranks = self.run, self._ranks
        # Hold signals until the attempt has its result: torchrun sends SIGTERM to rank 0 while rank 0 still records why
        # another rank has failed.
        with held_signals() as held:
            held += [] if self._job is None else self._job.signals
            self._signals = held
            keep_tokenizer(run, recipe)
            kills = memory_kills()
            # From here on, rank 0 writes to the terminal.
            console.phase(None)
            if held:
                outcome = with_progress(run, stopped_before_start(held[0][0], attempt=attempt))
                run.write_result(outcome)
                console.note(f"{outcome.kind.value}: {outcome.cause}")
            else:
                if ranks is None:
                    failed = processes.start(run, processes.of_this_host(recipe.layout.world), attempt=attempt)
                else:
                    failed = processes.start(run, ranks, attempt=None)
                shown = set(range(ranks.world)) if ranks is not None else {0} if self._job is None else set()
                outcome = _recorded(run, attempt, failed, console, terminal=shown, memory=kills.evidence())
            if outcome.kind is OutcomeKind.CANCELLED and (by := run.asked_to_cancel()) is not None:
                # The cause begins with the signal that asked the ranks to stop: name the user instead.
                outcome = replace(outcome, cause=f"{by}; {(outcome.cause or '').partition('; ')[2]}")
                run.write_result(outcome)
            if self._put_aside and not any(row["attempt"] == attempt for row in run.metrics("attempt")):
                # The chosen checkpoint cannot be loaded: give the later checkpoints their names back.
                put_back(self._put_aside)
        return outcome

    def _with_tasks(self, attempt: int, recipe: Recipe, address: str, port: int) -> Outcome:
        """Let the tasks of the other ranks join, run rank 0, and record how the attempt has ended."""
        run, job, place = self.run, self.job, self.job.place
        meeting = Rendezvous(
            start=job.round(self.round), attempt=attempt, address=address, port=port, members=self.members
        )
        publish_meeting(run, meeting)
        world = len(self.members) or place.ranks.world
        where = f"{counted(world, 'process', 'processes')} on {', '.join(place.nodes)}"
        self.report(f"{run.path.name}, attempt {attempt}: {where}, job {place.job_id}")
        stop = StopCheck(job, signal_seconds=launch_of(recipe).signal_seconds)
        code = watched(job, recipe, meeting, stop)
        if run.result(attempt) is None:
            settle(run, attempt, world)
        outcome = run.result(attempt) or conclude(run, attempt, {0: code} if code else {})
        corrected = stop.corrected(outcome)
        if corrected != outcome:
            run.write_result(corrected)
        outcome = self.called(corrected, recipe)
        self._say_end(outcome)
        if not self.members:
            # If only some ranks take part, they have new numbers, which do not tell on which host a rank was.
            self.remember_host(outcome)
        return outcome

    def _say_end(self, outcome: Outcome) -> None:
        self.report(f"{outcome.kind.value} at step {outcome.step}: {outcome.cause or outcome.kind.meaning}")

    def remember_host(self, outcome: Outcome) -> None:
        """Remember the host that may have caused a failure, except for jobs that can only run on this host."""
        place = self.job.place
        host = suspect(outcome, place.nodes, ranks_per_node=place.ranks_per_node)
        if host is not None and not default_config(place.launcher).runs_here:
            note_bad_host(self.run, outcome, host)
            clear = f"`titanlab hosts --clear {host}`"
            self.report(f"{host} is remembered: a later job of this run leaves it out, until {clear}")

    def called(self, outcome: Outcome, recipe: Recipe) -> Outcome:
        """Find out which ranks are lost after an attempt. Returns the outcome: `node_fail` if a node is lost.

        Only a job that may become smaller waits for its ranks' answers; the scheduler or other ranks end any other job.
        """
        self._loss, self.has_lost_nodes = Loss(), False
        may_shrink = recipe.launch.restarts and recipe.launch.min_world is not None
        if self._signals or not may_shrink or outcome.kind not in RESTARTED:
            return outcome
        loss = self._loss = lost_ranks(self.job, outcome.attempt, known=self._left_out)
        self.has_lost_nodes = bool(loss.nodes)
        self._left_out |= set(loss.ranks)
        lost = [number for number, rank in enumerate(self._members()) if rank in loss.ranks]
        if not lost or not loss.nodes or outcome.kind is OutcomeKind.OOM:
            return outcome
        cause = f"{loss.words}; {outcome.cause}" if outcome.cause else loss.words
        kind = OutcomeKind.NODE_FAIL
        outcome = replace(outcome, kind=kind, rank=lost[0], cause=cause, traceback=None, exit_code=None)
        self.run.write_result(outcome)
        return outcome

    def goes_on_after(self, outcome: Outcome, recipe: Recipe) -> bool:
        """Decide whether the ranks start again, perhaps with another recipe, and tell the user and the other tasks."""
        # torchrun has its own restarts.
        if self._ranks is not None or not recipe.launch.restarts:
            return False
        self.restart, why_not = None, ""
        # A signal means that somebody wants the run to end.
        if not self._signals:
            lost, usable = "", None
            if self._console is None:
                lost = self._loss.words if set(self._loss.ranks) & set(self._members()) else ""
                usable = self.job.place.ranks.world - len(self._left_out) if recipe.launch.min_world else None
            # Rank 0 of a job cannot be left out: its task writes the records.
            fixed = (0,) if self._console is None else ()
            self._restarts = self._restarts or Restarts(self.run, recipe.launch, fixed=fixed)
            self.restart, why_not = self._restarts.after(outcome, recipe, lost=lost, usable=usable)
            if line := why_not if self.restart is None else self.restart.why:
                self.report(line)
        restart, self.round = self.restart, self.round + 1
        if restart is None:
            if self._console is None:
                # Tell the other ranks, which wait for the next attempt, that there is none.
                meeting = Rendezvous(start=self.job.round(self.round), reason=why_not or "has ended")
                publish_meeting(self.run, meeting)
            return False
        left_out = restart.left_out
        if self._console is None and (left_out is not None or restart.lost):
            self._left_out |= set() if left_out is None else {self._members()[left_out]}
            left = [rank for rank in range(self.job.place.ranks.world) if rank not in self._left_out]
            self.members = tuple(left[: restart.recipe.layout.world])
        elif left_out is not None and recipe.cluster.accelerator == "cuda":
            processes.hide_device(left_out)
        self._checkpoint, self._put_aside = None, ()
        return True

    def _members(self) -> tuple[int, ...]:
        return self.members or tuple(range(self.job.place.ranks.world))


def _recorded(
    run: RunFolder,
    attempt: int,
    failed: Mapping[int, int],
    console: Console,
    *,
    terminal: Collection[int],
    memory: KillEvidence | None,
) -> Outcome:
    """The outcome of the attempt; writes result.json if no rank lived long enough to write it.

    Args:
        failed: exit codes of the ranks that failed, by rank.
        terminal: ranks whose output is on the terminal already.
    """
    recorded = run.result(attempt)
    if recorded is not None:
        return recorded
    try:
        outcome = conclude(run, attempt, failed, memory=memory)
    except OSError as error:
        fault = disk_fault(error)
        if fault is None:
            raise
        outcome = Outcome(kind=OutcomeKind.CRASH, attempt=attempt, cause=fault)
        console.error(f"the run has ended, and {shown_path(run.path)} cannot take a result.json: {fault}")
        return outcome
    if outcome.traceback and outcome.rank not in terminal and not tells_of_disk(outcome.cause):
        console.note(outcome.traceback.rstrip())
    if outcome.kind is OutcomeKind.INFEASIBLE:
        # Print one line with the key, the value, the rule and the cure, as the checks before a start do.
        console.error(outcome.cause or outcome.kind.meaning)
        return outcome
    console.end(
        f"{outcome.kind.value}: {outcome.kind.meaning}",
        [
            ("cause", outcome.cause or ""),
            ("rank", "" if outcome.rank is None else outcome.rank),
            ("step", outcome.step),
            ("folder", shown_path(run.path)),
        ],
        tone="bad",
        next_steps=[f"titanlab diagnose {shown_path(run.path)}"] if outcome.kind is OutcomeKind.HANG else [],
    )
    return outcome
