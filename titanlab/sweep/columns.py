"""Columns of a sweep's table: names, types and meanings, the same in `status --json` and in the files of `collect`.

docs/comparing.md shows them; a test compares that page with this list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from titanlab.costs import meter
from titanlab.costs.layout import AXES, Layout

# Increase it when a column changes its meaning or is removed, but not for new columns.
SCHEMA = 2
# One column for each key that the sweep varies.
POINT = "point."

TEXT, WHOLE, NUMBER, TRUTH = "text", "whole", "number", "yes/no"


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    type: str
    meaning: str


def _columns(type: str, **meanings: str) -> list[Column]:  # noqa: A002
    return [Column(name, type, meaning) for name, meaning in meanings.items()]


COLUMNS: tuple[Column, ...] = (
    *_columns(
        TEXT,
        sweep="the sweep's name",
        run="name of the run's folder; empty for a point that was dropped",
        name="the run's label, without the hash",
        hash8="first digits of its identity",
    ),
    *_columns(WHOLE, repeat="number of the repetition of an otherwise equal run"),
    *_columns(TRUTH, control="a run of the sweep's [control](sweeps.md#control)"),
    *_columns(
        TEXT,
        state="`dropped`, `prepared`, `queued`, `starting`, `running`, `saving`, `ended`; `missing` where the folder "
        "is gone, `unreadable` where it cannot be read",
        outcome="the word for its end, of [these](run-folder.md#resultjson); `infeasible` also for points that break "
        "a rule; empty until it has ended",
        previous_outcome="of the attempt before, for a run that has not ended or goes on again",
        dropped_stage="what dropped the point: `where`, `layout`, `composition`, `rule`, `duplicate`",
        cause="first line of what ended it, or why the point was dropped; of a run that goes on, which rank is stopped "
        "(SIGSTOP)",
    ),
    *_columns(
        WHOLE,
        rank="whose failure it was",
        step="optimizer steps done",
        steps="how many there are to be",
        attempt="number of the latest attempt",
        restarts="attempts that began by themselves after a rank had died, with `launch.restarts`",
    ),
    *_columns(TEXT, parent_run="the run from whose checkpoint it started, as `sweep/folder`; empty: from none"),
    *_columns(WHOLE, parent_step="the step of that checkpoint"),
    *_columns(WHOLE, **{f"layout.{axis}": f"degree of the axis `{axis}`" for axis in AXES}),
    *_columns(TEXT, **{"layout.label": "its short form: `dp_s2·tp2`, or `single`"}),
    *_columns(WHOLE, world="processes", hosts="machines that ran them", cores="CPU cores that they had, in all"),
    *_columns(TRUTH, oversubscribed="more processes than cores, on CPU: its speed says nothing"),
    *_columns(
        TEXT,
        accelerator="`cpu` or `cuda`",
        device="the accelerator's name",
        model="the model's family",
        precision="option of the group",
        ac="option of the group: activation checkpointing",
        compile="what is compiled: `off`, `blocks`, `loss`, `blocks+loss`",
        schedule="option of the group; empty without a pipeline",
        optimizer="option of the group",
        data="option of the group",
    ),
    *_columns(
        WHOLE,
        seed="of initial values and of the order of data",
        layers="of the model",
        dim="of the model",
        seq_len="tokens of a sequence",
        global_batch="sequences of a step, over all processes",
        microbatch="sequences of one forward pass of one process",
        tokens_per_step="over all processes",
    ),
    *_columns(
        NUMBER,
        tokens_per_second="of one device: the median step after warm-up; until it has ended, of the latest row",
        tokens_per_second_all="that, times the devices",
        tflops="of one device, likewise",
        mfu_percent="of the device's peak, likewise; empty where that is unknown",
    ),
    *_columns(
        TEXT, mfu_convention="FLOPs per token, and the peak that they are divided by; of float8 runs that of bfloat16"
    ),
    *_columns(
        NUMBER,
        step_seconds="likewise",
        step_seconds_q1="a quarter of the steps after warm-up took less; once it has ended",
        step_seconds_q3="a quarter of them took more",
        data_percent="share of a step that waits for data, likewise",
    ),
    *_columns(WHOLE, measured_steps="how many the medians are taken over"),
    *_columns(
        NUMBER,
        memory_gib="largest peak of all ranks: reserved by the allocator on a GPU, resident memory on CPU",
    ),
    *_columns(WHOLE, memory_rank="whose it is; empty where the ranks were not compared"),
    *_columns(
        NUMBER,
        **{
            "estimate.step_seconds": "`step_seconds` as the [planner](planner.md) estimated it at submission",
            "estimate.tokens_per_second": "likewise, of one device",
            "estimate.memory_gib": "likewise, of the rank that needs most",
        },
    ),
    *_columns(TEXT, **{"estimate.note": "why there is no estimate"}),
    *_columns(
        NUMBER,
        first_loss="of the attempt's first step",
        loss="training loss of the last step",
        validation_loss="the last one",
    ),
    *_columns(
        WHOLE,
        tokens_seen="trained on so far, in all attempts",
        skipped_steps="whose gradients were not finite, and which updated nothing; empty where none can be skipped",
    ),
    *_columns(
        NUMBER,
        flops_per_token="forward and backward, of the whole model",
        compile_seconds="spent on compilation, which no step counts",
        train_seconds="in the attempt's steps",
        paused_seconds="between them: validation, checkpoints, compilation",
        seconds_left="estimate, while it runs",
    ),
    *_columns(
        TEXT,
        launcher="`local` or `slurm`, `torchrun`",
        job_id="of the job that has it, as `squeue` shows it",
        queue_reason="why the job waits, in the scheduler's word",
        scheduler_state="the scheduler's word for the job's state or end; UNKNOWN: it gives no answer",
    ),
    *_columns(WHOLE, exit_code="of the process that failed; -N where signal N ended it"),
    *_columns(TEXT, code="fingerprint of the code that ran it"),
    *_columns(TRUTH, stale="that code is not the code that is here now"),
    *_columns(TEXT, git_commit="of that code; empty for an installed package"),
    *_columns(TRUTH, git_dirty="it was changed after that commit; `attempts/N/code.patch` has the changes"),
    *_columns(TEXT, torch="its version", host_names="of the machines that ran it, with commas"),
    *_columns(
        NUMBER,
        started="when the latest attempt began",
        updated="when the run was last heard of",
        ended="when it ended",
    ),
    *_columns(
        TEXT,
        tracker_gap="what the run's tracker lacks of it, once it has ended, and the command that makes up for it",
        folder="the run's",
    ),
)
NAMES = tuple(column.name for column in COLUMNS)
_TYPES = {column.name: column.type for column in COLUMNS}


def fitting(name: str, value: Any) -> Any:
    """The value of a column as files take it; None if it is of another kind than the column, as in a damaged file."""
    kind = _TYPES.get(name, TEXT)
    if kind == TEXT:
        # A file has UTF-8, which JSON's escapes go beyond.
        return value.encode(errors="replace").decode() if isinstance(value, str) else None
    if isinstance(value, bool) or kind == TRUTH:
        return value if isinstance(value, bool) and kind == TRUTH else None
    if kind == NUMBER:
        try:
            # A float, because parquet refuses whole numbers above 2**53 as floats.
            return float(value) if isinstance(value, int | float) else None
        except OverflowError:
            return None
    # In a file, a whole number has 64 bits.
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def point_keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the point's columns, as the rows have them after all others."""
    return [name for name in next(iter(rows), {}) if name.startswith(POINT)]


def as_text(value: Any) -> str:
    """A point's value as one types it: `null`, `true`, `0.001`, `fsdp_tp`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_text, value)) + "]"
    return str(value)


def recipe_columns(config: Mapping[str, Any]) -> dict[str, Any]:
    """The layout, techniques and sizes of a resolved recipe.

    Raises:
        LookupError, TypeError: it is not a recipe.
    """
    training, compiled = config["training"], config["compile"]
    degrees = {axis: config["parallelism"][axis] for axis in AXES}
    # Configs of earlier versions have no experts.
    layout = Layout(**degrees, expert=config["parallelism"].get("expert", 1))
    # As Recipe.microbatch; creating a Recipe would take longer than the whole row.
    microbatch = training["microbatch"] or (1 if layout.pipeline > 1 else training["global_batch"] // layout.data)
    return {
        **{f"layout.{axis}": degree for axis, degree in layout.degrees().items()},
        "layout.label": layout.label,
        "world": layout.world,
        "repeat": config["repeat"],
        "seed": config["seed"],
        "accelerator": config["cluster"]["accelerator"],
        "device": config["cluster"]["device"],
        **{group: config[group]["kind"] for group in ("model", "precision", "ac", "optimizer", "data")},
        "compile": "+".join(part for part in ("blocks", "loss") if compiled.get(part)) or "off",
        "schedule": config["schedule"]["kind"] if layout.pipeline > 1 else None,
        "layers": config["model"].get("layers"),
        "dim": config["model"].get("dim"),
        "seq_len": training["seq_len"],
        "global_batch": training["global_batch"],
        "microbatch": microbatch,
        "tokens_per_step": training["global_batch"] * training["seq_len"],
    }


def figure_columns(metrics: Mapping[str, Any], *, world: int) -> dict[str, Any]:
    """Speed, memory and losses, from a result's summary or from the latest row of a running attempt."""
    # Rows of metrics have a separate key for the median; in a summary the only value is the median.
    step_seconds = metrics.get(meter.STEP_SECONDS_MEDIAN, metrics.get(meter.STEP_SECONDS))
    per_device = metrics.get(meter.TOKENS_PER_SECOND)
    peak, formula = metrics.get("peak_tflops"), metrics.get("flops_convention")
    convention = None
    if peak is not None and formula is not None:
        source = metrics.get("peak_source") or "unknown source"
        convention = f"{formula} FLOPs a token, over {peak:.4g} TFLOP/s ({source})"
    # The largest peak of all ranks; the rank that logs may have needed more after the ranks were last compared.
    memory, memory_rank = metrics.get(meter.MEMORY_MOST), metrics.get(meter.MEMORY_MOST_RANK)
    own = metrics.get(meter.MEMORY_RESERVED, metrics.get("memory/max_resident(GiB)"))
    if memory is None or (own is not None and own > memory):
        memory, memory_rank = own, 0 if own is not None and world == 1 else None
    return {
        "tokens_per_second": per_device,
        "tokens_per_second_all": None if per_device is None else per_device * world,
        "tflops": metrics.get(meter.TFLOPS),
        "mfu_percent": metrics.get(meter.MFU),
        "mfu_convention": convention,
        "step_seconds": step_seconds,
        "step_seconds_q1": metrics.get(meter.STEP_SECONDS_LOW),
        "step_seconds_q3": metrics.get(meter.STEP_SECONDS_HIGH),
        "data_percent": metrics.get(meter.DATA_PERCENT),
        "measured_steps": metrics.get(meter.MEASURED_STEPS),
        "memory_gib": memory,
        "memory_rank": memory_rank,
        "first_loss": metrics.get("first_loss"),
        "loss": metrics.get(meter.LOSS),
        "validation_loss": metrics.get(meter.VALIDATION_LOSS),
        "tokens_seen": metrics.get(meter.TOKENS_SEEN),
        "skipped_steps": metrics.get(meter.SKIPPED_STEPS),
        "flops_per_token": metrics.get("flops_per_token"),
        "compile_seconds": metrics.get("compile/seconds"),
        "train_seconds": metrics.get(meter.TRAIN_SECONDS),
        "paused_seconds": metrics.get(meter.PAUSED_SECONDS),
    }


def provenance_columns(env: Mapping[str, Any] | None, job: Mapping[str, Any]) -> dict[str, Any]:
    """The commit, versions and hosts of an attempt.

    Args:
        env: of the attempt; None: it has not begun. Parts of it may be missing, if no process lived to begin it.
        job: the attempt's job.json; empty: no scheduler gave it nodes.
    """
    code, host, packages = ((env or {}).get(section) or {} for section in ("code", "host", "packages"))
    git = code.get("git") or {}
    names = [str(node) for node in job.get("nodes") or []] or ([str(host["name"])] if host.get("name") else [])
    return {
        "git_commit": git.get("sha"),
        "git_dirty": git.get("dirty"),
        "torch": packages.get("torch"),
        "host_names": ",".join(names) or None,
    }


def machine_columns(env: Mapping[str, Any] | None, job: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Hosts and cores of an attempt, and whether it had more processes than cores.

    Args:
        env: of the attempt; None: it has not begun. Without a host: no process lived to begin it, or it is damaged.
        job: the attempt's job.json; empty: no scheduler gave it nodes.
        config: the attempt's recipe.
    """
    host = (env or {}).get("host", {})
    full_name, usable = host.get("name"), host.get("usable_cores")
    if not isinstance(full_name, str) or not isinstance(usable, int | None):
        return {}
    name = full_name.partition(".")[0]
    nodes = {str(node).partition(".")[0] for node in job.get("nodes") or []}
    # On a test cluster, Slurm may have several names for one machine: count its cores once.
    hosts = len(nodes) if name in nodes else 1
    cores = None if usable is None else usable * hosts
    on_cpu = config["cluster"]["accelerator"] == "cpu"
    is_oversubscribed = None if cores is None else on_cpu and config["world"] > cores
    return {"hosts": hosts, "cores": cores, "oversubscribed": is_oversubscribed}
