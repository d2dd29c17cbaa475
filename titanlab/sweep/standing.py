"""Where a run of a sweep stands, by its folder and by the word of its job's launcher."""

from __future__ import annotations

from titanlab.launch.contract import States
from titanlab.launch.submission import Submission
from titanlab.records.outcome import OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.sweep.sweep_folder import SweepFolder

# Ends after which a job may have gone back into the queue by itself.
_PUT_BACK = (OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME)


def standing(run: RunFolder, job: tuple[Submission, int] | None, states: States) -> tuple[str, str | None]:
    """Where a run stands, and how it ended.

    Args:
        job: its latest submission, and its index there.
        states: of jobs, by token and index.

    Returns:
        `done`, `queued`, `running`, `ended` otherwise, or `submit` if it never had a job; the word for the end.
    """
    result = run.result()
    outcome = result.kind.value if result else None
    if result is not None and result.kind is OutcomeKind.DONE:
        return "done", outcome
    if job is not None:
        submission, index = job
        found = states.get((submission.token, index))
        word = found.state if found else "unknown"
        # A job that was cancelled in the queue may be known to nobody for a while; its end is written down.
        told = result is not None and result.ended >= submission.created and result.kind not in _PUT_BACK
        if word in ("pending", "requeued") or (word == "unknown" and not told):
            # Of what nobody knows, nothing is done twice.
            return "queued", None
        if word == "running":
            return "running", None
    if run.is_claimed():
        return "running", None
    if job is not None or outcome is not None:
        return "ended", outcome
    return "submit", None


def supersede(folder: SweepFolder, run: RunFolder) -> None:
    """Put a run's folder aside, so that it can be done anew.

    Raises:
        ConfigError: somebody works on it.
    """
    folder.superseded.mkdir(exist_ok=True)
    with run.claim():
        number = 1
        while (aside := folder.superseded / f"{run.path.name}.{number}").exists():
            number += 1
        run.path.rename(aside)
