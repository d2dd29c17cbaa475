"""What a site's Slurm accepts: the check before a submission, and what `titanlab doctor` reports."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from titanlab.errors import ConfigError
from titanlab.launch.contract import LaunchConfig
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm.command import ask_slurm, seconds_of
from titanlab.launch.submission import JobShape
from titanlab.system import Finding, counted, fail, ok, warn

COMMANDS = ("sbatch", "srun", "squeue", "sinfo")
_SITE_COMMANDS = (*COMMANDS, "scontrol", "scancel", "sacct")
_SITE_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class _Partition:
    name: str = ""
    nodes: int = 0
    is_up: bool = False
    minutes: float = 0.0
    cores: float = 0.0
    devices: frozenset[str] = frozenset()


def check(jobs: Sequence[tuple[LaunchConfig, JobShape]]) -> None:
    """Check that Slurm is installed and has the partitions and nodes that the jobs need.

    Raises:
        ConfigError: Slurm is not installed or does not answer, or a partition is unknown or too small.
    """
    for command in COMMANDS:
        if shutil.which(command) is None:
            rule = f"Slurm is not here: there is no {command} on PATH"
            raise ConfigError("launch", "slurm", rule, "submit from a login node of the cluster, or try launch=local")
    partitions = _partitions()
    if isinstance(partitions, str):
        cure = "try again when `sinfo` answers; nothing was submitted"
        raise ConfigError("launch", "slurm", f"Slurm does not answer ({partitions})", cure)
    for config, shape in jobs:
        assert isinstance(config, Slurm)
        # No name means the default partition, which `_partitions` also lists under the empty name.
        partition = config.partition if config.partition is not None else ""
        names = [name for name in partition.split(",") if name in partitions or partition]
        for name in names:
            if name not in partitions:
                cure = f"known: {', '.join(sorted(filter(None, partitions)))}"
                raise ConfigError("launch.partition", config.partition, "Slurm knows no such partition", cure)
        # Slurm takes the first partition that fits. If none fits, the error names the largest one.
        names.sort(key=lambda name: -partitions[name].nodes)
        refusals = [_refusal(config, shape, name, partitions[name]) for name in names]
        if None not in refusals and (refusal := next(iter(refusals), None)) is not None:
            raise refusal


def _refusal(config: Slurm, shape: JobShape, name: str, partition: _Partition) -> ConfigError | None:
    """Why jobs of a shape would never start in a partition; sbatch would accept them, and they would wait forever."""
    where = f"partition {name}" if name else "the default partition"
    if shape.nodes > partition.nodes:
        rule = f"needs {shape.nodes} nodes, and {where} has {partition.nodes}"
        cure = f"try world={partition.nodes * shape.tasks_per_node}, or another partition"
        return ConfigError("world", shape.processes, rule, cure)
    if not partition.is_up:
        cure = "choose another launch.partition, or wait until the site brings it up"
        return ConfigError("launch.partition", config.partition, f"{where} is down", cure)
    # A quality of service may have its own limits.
    if shape.minutes is not None and shape.minutes > partition.minutes and config.qos is None:
        rule = f"is more than {where} allows, {partition.minutes:g}"
        return ConfigError("launch.minutes", shape.minutes, rule, f"try {partition.minutes:g}, or another partition")
    cores = (shape.cpus_per_task or 1) * shape.tasks_per_node
    if cores > partition.cores:
        rule = f"needs {cores} cores of a node with {counted(shape.tasks_per_node, 'process', 'processes')}"
        rule += f", and {where} has nodes of {partition.cores:g}"
        most = int(partition.cores // shape.tasks_per_node)
        cure = f"try {most}" if most else f"try cluster.per_node={partition.cores:g}"
        return ConfigError("launch.cpus_per_task", shape.cpus_per_task, rule, f"{cure}, or another partition")
    return None


def _partitions() -> dict[str, _Partition] | str:
    """Every partition by its name, the default one also by the empty name; or why Slurm does not answer."""
    listed = ask_slurm("sinfo", "--noheader", "--all", "--format=%P %D %a %l %c %G", seconds=_SITE_SECONDS)
    if listed.output is None:
        return str(listed.problem)
    partitions: dict[str, _Partition] = {}
    for line in listed.output.splitlines():
        name, count, state, limit, cores, devices = (line.split() + [""] * 6)[:6]
        if not count.isdecimal():
            continue
        for key in [name.rstrip("*"), *([""] if name.endswith("*") else [])]:
            # A partition whose nodes differ has several lines; `8+` stands for nodes with at least 8 cores.
            known = partitions.get(key, _Partition())
            partitions[key] = _Partition(
                name=name.rstrip("*"),
                nodes=known.nodes + int(count),
                is_up=known.is_up or state in ("up", ""),
                minutes=max(known.minutes, (seconds_of(limit) or inf) / 60),
                cores=max(known.cores, float(cores) if cores.isdecimal() else inf),
                devices=known.devices | ({devices} - {"(null)", ""}),
            )
    return partitions


def check_slurm(config: Slurm) -> Iterator[Finding]:
    """What `titanlab doctor` says of commands, controller, partitions, a test submission, and settings."""
    missing = [command for command in _SITE_COMMANDS if shutil.which(command) is None]
    if len(missing) == len(_SITE_COMMANDS):
        yield ok("Slurm", "is not on this host; launch=local needs none")
        return
    if missing:
        yield fail("Slurm", f"lacks {', '.join(missing)} on PATH", "add Slurm's folder of programs to PATH")
        return
    partitions = _partitions()
    if isinstance(partitions, str):
        yield fail("Slurm", partitions, "submit from a login node; ask the site if the controller is down")
        return
    if not partitions:
        yield fail("partitions", "sinfo lists none that can be read", "see `sinfo`")
        return
    names = [name for name in partitions if name]
    shown = ", ".join(f"{name} ({partitions[name].nodes})" for name in names[:8]) + (" …" if len(names) > 8 else "")
    targets = (config.partition or partitions.get("", _Partition()).name).split(",")
    if any(name and name not in names for name in targets):
        yield fail("partitions", f"{shown}; launch.partition={config.partition} is not among them", f"try {names[0]}")
    elif not any(targets):
        yield warn("partitions", f"{shown}; none is the default", "give launch.partition")
    elif not all(partitions[name].is_up for name in targets):
        yield fail("partitions", f"{shown}; {', '.join(targets)} is down", "choose another launch.partition, or wait")
    else:
        yield ok("partitions", f"{shown}; jobs go to {', '.join(targets)}")
    devices = sorted(frozenset[str]().union(*(partition.devices for partition in partitions.values())))
    if devices:
        yield ok("devices of nodes", ", ".join(devices[:6]))
    elif config.ask_for_gpus:
        yield ok("devices of nodes", "none that Slurm manages; on nodes with GPUs: launch.ask_for_gpus=false")
    yield _check_submission(config)
    text = ask_slurm("scontrol", "show", "config", seconds=_SITE_SECONDS).output or ""
    settings = dict(re.findall(r"^(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
    if settings:
        yield from check_settings(settings, config)
    else:
        hint = "see `scontrol show config`: requeue and preemption are not known"
        yield warn("settings", "scontrol show config says nothing", hint)


def _check_submission(config: Slurm) -> Finding:
    """Test a submission with `sbatch --test-only`, which puts nothing into the queue."""
    shape = JobShape(processes=1, tasks_per_node=1, cpus_per_task=config.cpus_per_task, minutes=config.minutes)
    try:
        check([(config, shape)])
    except ConfigError as error:
        return fail("submission", error.problem, error.cure)
    names = ("partition", "account", "qos", "constraint", "nodelist", "exclude")
    flags = {**{name: getattr(config, name) for name in names}, "time": config.minutes}
    words = [f"--{name}={value}" for name, value in flags.items() if value is not None]
    answer = ask_slurm("sbatch", "--test-only", "--nodes=1", "--ntasks=1", *words, "--wrap=true", seconds=_SITE_SECONDS)
    if answer.output is None:
        return fail("submission", str(answer.problem), "set the keys of launch: account, partition, qos, minutes")
    # Slurm answers on standard error: `sbatch: Job 12 to start at … using 1 processors on nodes n1 in partition gpu`.
    when = re.search(r"to start at (\S+)", answer.errors + answer.output)
    return ok("submission", f"a job of one task could start at {when[1]}" if when else "Slurm would take a job")


def check_settings(settings: Mapping[str, str], config: Slurm) -> Iterator[Finding]:
    """What `titanlab doctor` says about Slurm's configuration, line by line."""
    if (version := settings.get("SLURM_VERSION")) is not None:
        yield ok("version", version)
    requeue = settings.get("JobRequeue")
    if requeue == "0" and config.requeue:
        text = "JobRequeue=0: jobs stay in the queue only if they ask for it; titanlab does (launch.requeue)"
        yield ok("requeue", text)
    elif not config.requeue:
        yield warn("requeue", "launch.requeue=false", "a job that is preempted, or whose time is over, ends for good")
    else:
        yield ok("requeue", f"JobRequeue={requeue}" if requeue else "launch.requeue=true")
    kind, mode = settings.get("PreemptType", "preempt/none"), settings.get("PreemptMode", "OFF").upper()
    text = f"{kind.removeprefix('preempt/')}, mode {settings.get('PreemptMode')}"
    if kind in ("preempt/none", "(null)") or mode == "OFF":
        yield ok("preemption", "off: no job is preempted")
    elif "CANCEL" in mode or "REQUEUE" in mode:
        exempt = settings.get("PreemptExemptTime", "")
        note = f", not in its first {exempt}" if seconds_of(exempt) else ""
        saves = "a run saves, and goes back into the queue; GraceTime of the partition counts"
        yield ok("preemption", f"{text}{note}: {saves}")
    elif "SUSPEND" in mode or "GANG" in mode:
        hint = "a suspended run looks like one that hangs: raise training.step_timeout_seconds"
        yield warn("preemption", f"{text}: jobs are stopped and go on later", hint)
    else:
        yield ok("preemption", text)
    accounting = settings.get("AccountingStorageType", "")
    if accounting in ("", "(null)", "accounting_storage/none"):
        text = "off: some minutes after its end, Slurm forgets how a job ended"
        hint = "titanlab then relies on its own records; run `titanlab status` soon after a job ends"
        yield warn("accounting", text, hint)
    else:
        words = ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID")
        answer = ask_slurm(*words, seconds=_SITE_SECONDS)
        if answer.output is None:
            hint = "how jobs ended is not known until it answers"
            yield warn("accounting", f"{accounting}; {answer.problem}", hint)
        else:
            yield ok("accounting", accounting)
    limit = settings.get("MaxArraySize", "")
    if limit == "0":
        yield fail("arrays", "MaxArraySize=0: sbatch refuses arrays", "ask the site to allow arrays of jobs")
    elif limit.isdecimal():
        yield ok("arrays", f"of up to {int(limit) - 1} jobs; larger sweeps are split")
    kill = settings.get("KillWait", "").split()
    if kill and kill[0].isdecimal() and config.signal_seconds < int(kill[0]):
        text = f"launch.signal_seconds={config.signal_seconds} is less than KillWait ({kill[0]} s)"
        yield warn("time to save", text, "give a step and a checkpoint enough time: launch.signal_seconds=120")
