"""Configs of launch=local and launch=slurm."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from titanlab.errors import ConfigError
from titanlab.launch.contract import LaunchConfig, Launcher
from titanlab.options import NOT_PRICED, option

_THREADS = {"least": 1, "most": 10_000, "cure": "try 1, or null", **NOT_PRICED}
_RESTARTS = {"least": 0, "cure": "try 3, or 0 for none"}
_MIN_WORLD = {"least": 1, "cure": "try 1, or null"}


def _check_restarts(config: LaunchConfig) -> None:
    if config.min_world is not None and not config.restarts:
        rule = "says how small a restarted run may become, and launch.restarts=0"
        raise ConfigError("launch.min_world", config.min_world, rule, "give launch.restarts=3 too, or leave it null")


@option("launch", "local")
@dataclass(frozen=True, kw_only=True)
class Local(LaunchConfig):
    """Processes on this host.

    Attributes:
        threads: threads of one process; null: an equal share of the host's cores, or OMP_NUM_THREADS of the environment
            if that is less.
        at_once: processes of all runs of a sweep together that run at once; null: as many as the host has cores. A
            larger run runs alone.
        restarts: how often the ranks start again in place, from the newest checkpoint, after one of them has died.
        min_world: after a rank has failed twice in a row, the run goes on without it if at least this many processes
            are left; null: it does not.
    """

    kind: str = "local"
    threads: int | None = field(default=None, metadata=_THREADS)
    at_once: int | None = field(default=None, metadata={"least": 1, "cure": "try 1, or null"})
    restarts: int = field(default=0, metadata=_RESTARTS)
    min_world: int | None = field(default=None, metadata=_MIN_WORLD)

    def __post_init__(self) -> None:
        _check_restarts(self)

    @property
    def runs_here(self) -> bool:
        return True

    @property
    def starts_directly(self) -> bool:
        return True

    def implementation(self) -> Launcher:
        from titanlab.launch.local import LocalLauncher

        return LocalLauncher()


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FLAG = re.compile(r"[a-z][a-z0-9_-]*")
# Flags that titanlab derives from the layout, or uses itself.
_OURS = frozenset(
    [
        *["array", "chdir", "error", "input", "output", "job-name", "requeue", "no-requeue", "signal"],
        *["nodes", "ntasks", "ntasks-per-node", "gpus-per-node"],
    ]
)
# Flags of sbatch without a value. Other flags have the value yes or no: kill-on-invalid-dep=yes.
_BARE = frozenset("contiguous exclusive hold overcommit oversubscribe reboot spread-job use-min-nodes wait".split())


@option("launch", "slurm")
@dataclass(frozen=True, kw_only=True)
class Slurm(LaunchConfig):
    """Jobs of a Slurm cluster. For keys that are null, the site's default applies.

    Attributes:
        partition, account, qos, constraint, nodelist, exclude: flags of sbatch.
        cpus_per_task: cores of one process.
        memory_gib: host memory of one node; 0: all of it.
        minutes: time limit of a job.
        gpu_type: TYPE in `--gpus-per-node=TYPE:N`; null: any.
        gpu_flag: how GPUs are asked for: gpus-per-node, or gres (`--gres=gpu:TYPE:N`).
        ask_for_gpus: false on sites whose jobs get whole nodes and whose Slurm does not manage GPUs.
        array_parallelism: jobs of one array that run at once; null: no limit.
        signal_seconds: how long before its time limit a job gets a signal to save and end; before a preemption it is
            the site's GraceTime.
        requeue: whether a job that was preempted or has reached its time limit puts itself back into the queue.
        max_requeues: how often a job may put itself back.
        restarts: how often the ranks of a job start again in place, from the newest checkpoint, after one has died.
        min_world: after a rank has failed twice in a row, or its node is lost, the others go on without it if at least
            this many processes are left; null: they do not.
        threads: of one process; null: the cores of the process (cpus_per_task, or an equal share of the node's), or
            OMP_NUM_THREADS of the environment if that is less.
        python: interpreter on the nodes; null: the interpreter that submits.
        preamble: lines of bash before the processes start, such as `module load cuda`; one that fails ends the job.
        environment: environment variables of the processes, such as {NCCL_DEBUG: WARN}.
        container: words before the command, such as [apptainer, exec, --nv, image.sif].
        srun_arguments: further arguments of srun.
        extra: further flags of sbatch: {reservation: mine, exclusive: true}. true: the flag without a value; false and
            null leave it out; everything else is its value as typed.
    """

    kind: str = "slurm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    cpus_per_task: int | None = field(default=None, metadata={"least": 1, "cure": "try 8, or null", **NOT_PRICED})
    memory_gib: float | None = field(
        default=None, metadata={"least": 0, "cure": "try 64, 0 for all of a node, or null"}
    )
    minutes: int | None = field(default=None, metadata={"least": 1, "cure": "try 60, or null"})
    gpu_type: str | None = None
    gpu_flag: str = field(default="gpus-per-node", metadata={"choices": ("gpus-per-node", "gres")})
    ask_for_gpus: bool = True
    array_parallelism: int | None = field(default=None, metadata={"least": 1, "cure": "try 8, or null"})
    signal_seconds: int = field(default=120, metadata={"least": 1})
    requeue: bool = True
    max_requeues: int = field(default=20, metadata={"least": 0})
    restarts: int = field(default=0, metadata=_RESTARTS)
    min_world: int | None = field(default=None, metadata=_MIN_WORLD)
    threads: int | None = field(default=None, metadata=_THREADS)
    python: str | None = None
    preamble: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    container: tuple[str, ...] = ()
    srun_arguments: tuple[str, ...] = ()
    extra: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_restarts(self)
        if self.minutes is not None and self.signal_seconds >= self.minutes * 60:
            rule = f"leaves nothing of the {self.minutes} minutes that a job has"
            raise ConfigError("launch.signal_seconds", self.signal_seconds, rule, f"try {self.minutes * 10}")
        for name in ("partition", "account", "qos", "constraint", "nodelist", "exclude", "gpu_type", "python"):
            value = getattr(self, name)
            if value is not None and (not value.strip() or "\n" in value):
                raise ConfigError(f"launch.{name}", value, "must be a name", "name one, or null")
        for name in self.environment:
            if not _NAME.fullmatch(name):
                cure = "use letters, digits and '_', and do not begin with a digit"
                raise ConfigError("launch.environment", name, "is not a variable name", cure)
        for name, value in self.extra.items():
            if not _FLAG.fullmatch(name):
                raise ConfigError("launch.extra", name, "is not a flag of sbatch", "write it long, without the dashes")
            if name.replace("_", "-") in _OURS:
                rule = "is titanlab's own, from the layout, the cluster and other keys of launch"
                raise ConfigError(f"launch.extra.{name}", value, rule, "leave it out")
            if name.replace("_", "-") in _BARE and str(value).lower() in ("yes", "on", "no", "off"):
                cure = f"try {str(value).lower() in ('yes', 'on')}".lower()
                raise ConfigError(f"launch.extra.{name}", value, "is text, and this flag of sbatch takes none", cure)

    @property
    def title(self) -> str:
        return "Slurm"

    def implementation(self) -> Launcher:
        from titanlab.launch.slurm.launcher import SlurmLauncher

        return SlurmLauncher(self)
