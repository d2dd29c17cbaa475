"""A job puts itself back into the queue if the run did not cause its end; after a lost node it accepts fewer nodes."""

from __future__ import annotations

import time

from titanlab.launch.job.job import Job, say
from titanlab.launch.job.roll_call import node_of, ranks_per_node
from titanlab.launch.restarts import reduced
from titanlab.recipe.recipe import Recipe, from_mapping
from titanlab.records.outcome import Outcome, OutcomeKind

# After rank 0 has gone silent, ranks on other nodes wait for the scheduler to notice that its node is lost. Slurm needs
# SlurmdTimeout, which is 300 s by default, and up to a third of it more.
LOST_SECONDS = 900.0
_ASK_SECONDS = 5.0
# Between the tries of two nodes; the scheduler refuses a second requeue of the same start.
_NEXT_SECONDS = 15.0


def requeue_after(job: Job, outcome: Outcome, *, has_saved: bool, has_lost_nodes: bool = False) -> None:
    """Put a job that was preempted, reached its time limit or lost nodes back into the queue, to resume from there.

    Args:
        has_saved: whether this start of the job has saved a checkpoint.
        has_lost_nodes: whether the last attempt has lost a node, and the ranks that are left do not go on.
    """
    if not job.launcher.can_requeue:
        return
    if has_lost_nodes and outcome.kind is OutcomeKind.NODE_FAIL and not job.signals:
        requeue(job, least_nodes=fewest_nodes(job))
    elif outcome.kind not in (OutcomeKind.PREEMPTED, OutcomeKind.WALLTIME):
        return
    elif outcome.kind is OutcomeKind.WALLTIME and not has_saved:
        say("not put back into the queue: this attempt has saved nothing, and the next one would not either")
    else:
        requeue(job)


def requeue(job: Job, *, least_nodes: int | None = None) -> None:
    """Put a job back into the queue, if its config allows it.

    Args:
        least_nodes: on how few nodes it may start again; None: only on as many as it has now.
    """
    launch, place = job.launch, job.place
    if not launch.get("requeue", False):
        say("not put back into the queue: launch.requeue=false")
        return
    if place.restart >= launch.get("max_requeues", 0):
        say(f"not put back into the queue: it has been {place.restart} times (launch.max_requeues)")
        return
    most = len(place.nodes)
    if least_nodes is None or least_nodes >= most:
        refused, target = job.launcher.requeue(place), "the queue"
    else:
        refused = job.launcher.requeue_on_fewer(place, least=least_nodes, most=most)
        target = f"the queue for {least_nodes} to {most} nodes"
    say(f"not put back into {target}: {refused}" if refused else f"put back into {target}")


def fewest_nodes(job: Job) -> int | None:
    """The smallest number of its nodes on which a job's run can go on under `launch.min_world`; None: only on all."""
    recipe: Recipe = from_mapping(job.config())
    least, ranks = recipe.launch.min_world, ranks_per_node(job.place)
    if least is None:
        return None
    counts = range(1, len(job.place.nodes))
    return next((count for count in counts if reduced(recipe, count * ranks, least) is not None), None)


def survives(job: Job, recipe: Recipe) -> bool:
    """Whether a job goes on without a node that fails: its scheduler does not end it then."""
    return recipe.launch.min_world is not None and len(job.place.nodes) > 1 and job.launcher.can_requeue


def requeue_without_rank_0(job: Job, recipe: Recipe, attempt: int) -> bool:
    """After rank 0 has gone: if its node is lost, put the job back into the queue from a rank on another node.

    A job that survives the loss of a node also survives that of the first one, where its batch script ran; nobody else
    would end it before its time limit.

    Args:
        attempt: whose result rank 0 has not written; if it appears, rank 0 has not gone.

    Returns:
        whether this rank or another one has done that.
    """
    if not survives(job, recipe):
        return False
    place, end = job.place, time.monotonic() + LOST_SECONDS
    # One rank of each node asks, so that the scheduler is asked by few, and one more dead process prevents nothing.
    asks, lost = place.ranks.rank % ranks_per_node(place) == 0, frozenset[str]()
    while place.nodes[0] not in lost:
        if job.run.result(attempt) is not None or time.monotonic() > end:
            return False
        if job.signals:
            return not asks
        time.sleep(_ASK_SECONDS)
        lost = job.launcher.lost_nodes(place) if asks else lost
    say(f"{place.launcher} has taken {place.nodes[0]} from the job, on which rank 0 was")
    # From here to the requeue and its range of nodes as little time as possible: the scheduler then ends this process.
    least_nodes = fewest_nodes(job)
    left = [node for node in place.nodes if node not in lost]
    node = node_of(place, place.ranks.rank)
    time.sleep(_NEXT_SECONDS * left.index(node) if node in left else 0.0)
    requeue(job, least_nodes=least_nodes)
    return True
