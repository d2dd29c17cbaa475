"""The part of a launcher's config that recipes and ranks read. Torch-free."""

from __future__ import annotations

from typing import Protocol

from titanlab.costs.setting import Setting


class LaunchSettings(Protocol):
    """What a recipe knows of its launcher's config, which is a `titanlab.launch.contract.LaunchConfig`.

    That contract stands above recipes, because its methods are about jobs, and recipes are below jobs.

    Attributes:
        kind: its name.
        threads: of one process; None: OMP_NUM_THREADS, but not more than the process has cores; all without it.
        cpus_per_task: cores of one process; None: the launcher's choice.
        memory_gib: host memory of one node; None: the launcher's choice.
        minutes: time limit of a job; None: the launcher's choice, or none.
        signal_seconds: how long before its time limit a job gets a signal to save and end.
        requeue: whether a job that was preempted or reached its time limit puts itself back into the queue.
        max_requeues: how often it may do that.
        restarts: how often the ranks start again in place, from the newest checkpoint, after one of them has died.
        min_world: after a rank has failed twice in a row, or its node is lost, the others go on without it, as at least
            so many processes; null: they do not.
    """

    kind: str
    threads: int | None = None
    cpus_per_task: int | None = None
    memory_gib: float | None = None
    minutes: int | None = None
    signal_seconds: int = 0
    requeue: bool = False
    max_requeues: int = 0
    restarts: int = 0
    min_world: int | None = None

    @property
    def runs_here(self) -> bool:
        """Whether jobs run on this host, so that its devices and memory are those of the cluster."""
        return False

    @property
    def starts_directly(self) -> bool:
        """Whether `titanlab train` starts the ranks itself and waits for them (`Launcher.start`), without a queue."""
        return False

    def check(self, setting: Setting) -> None:
        """Check that the rest of the recipe fits this launcher.

        Raises:
            ConfigError: it does not fit.
        """
        return  # the default; mypy takes an empty body for an abstract method
