"""The standing of a run in its sweep, from its folder and the state of its job."""

from __future__ import annotations

from titanlab.launch.contract import States
from titanlab.launch.submission import Submission
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.sweep_folder import SweepFolder


def standing(run: RunFolder, job: tuple[Submission, int] | None, states: States) -> tuple[str, str | None]:
    """What a run is doing, and how it ended.

    Args:
        job: its latest submission, and its index there.
        states: of jobs, by token and index.

    Returns:
        `done`, `queued`, `running`, `ended` (with another outcome), or `submit` (it never had a job); and the outcome.
    """
    result = run.result()
    outcome = result.kind.value if result else None
    if result is not None and result.kind is OutcomeKind.DONE:
        return "done", outcome
    if job is not None:
        submission, index = job
        job_state = states.get((submission.token, index))
        word = job_state.state if job_state else "unknown"
        # For a while the scheduler may not know a job that was cancelled in the queue; then its result counts.
        # After some ends the job may have put itself back into the queue.
        has_result = result is not None and result.ended >= submission.created and not result.kind.automatic
        if word in ("pending", "requeued") or (word == "unknown" and not has_result):
            # The scheduler may still have an unknown job; do not submit it again.
            return "queued", None
        if word == "running":
            return "running", None
    if run.is_claimed():
        return "running", None
    if job is not None or outcome is not None:
        return "ended", outcome
    return "submit", None


def supersede(folder: SweepFolder, run: RunFolder) -> None:
    """Move a run's folder aside, so that the run can start from the beginning.

    Raises:
        ConfigError: another process has claimed the run.
    """
    folder.superseded.mkdir(exist_ok=True)
    with run.claim():
        number = 1
        while (aside := folder.superseded / f"{run.path.name}.{number}").exists():
            number += 1
        run.path.rename(aside)
