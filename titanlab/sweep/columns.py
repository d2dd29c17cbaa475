"""Names and types of a sweep's columns, in `status --json` and in files; docs/comparing.md has their meanings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from titanlab.costs import AXES, Layout, meter

# Increase it when a column changes its meaning or is removed, but not for new columns.
SCHEMA = 2
# One column for each key that the sweep varies.
POINT = "point."

TEXT, WHOLE, NUMBER, TRUTH = "text", "whole", "number", "yes/no"


COLUMNS: Mapping[str, str] = {
    name: kind
    for kind, names in (
        (TEXT, "sweep run name hash8"),
        (WHOLE, "repeat"),
        (TRUTH, "control"),
        (TEXT, "state outcome previous_outcome dropped_stage cause"),
        (WHOLE, "rank step steps attempt restarts"),
        (TEXT, "parent_run"),
        (WHOLE, "parent_step"),
        (WHOLE, " ".join(f"layout.{axis}" for axis in AXES)),
        (TEXT, "layout.label"),
        (WHOLE, "world hosts cores"),
        (TRUTH, "oversubscribed"),
        (TEXT, "accelerator device model precision ac compile schedule optimizer data"),
        (WHOLE, "seed layers dim seq_len global_batch microbatch tokens_per_step"),
        (NUMBER, "tokens_per_second tokens_per_second_all tflops mfu_percent"),
        (TEXT, "mfu_convention"),
        (NUMBER, "step_seconds step_seconds_q1 step_seconds_q3 data_percent"),
        (WHOLE, "measured_steps"),
        (NUMBER, "memory_gib"),
        (WHOLE, "memory_rank"),
        (NUMBER, "estimate.step_seconds estimate.tokens_per_second estimate.memory_gib"),
        (TEXT, "estimate.note"),
        (NUMBER, "first_loss loss validation_loss"),
        (WHOLE, "tokens_seen skipped_steps"),
        (NUMBER, "flops_per_token compile_seconds train_seconds paused_seconds seconds_left"),
        (TEXT, "launcher job_id queue_reason scheduler_state"),
        (WHOLE, "exit_code"),
        (TEXT, "code"),
        (TRUTH, "stale"),
        (TEXT, "git_commit"),
        (TRUTH, "git_dirty"),
        (TEXT, "torch host_names"),
        (NUMBER, "started updated ended"),
        (TEXT, "tracker_gap folder"),
    )
    for name in names.split()
}
"""The type of each column, in the order of the table."""
NAMES = tuple(COLUMNS)


def fitting_value(name: str, value: Any) -> Any:
    """The value of a column as files take it; None if it is of another kind than the column, as in a damaged file."""
    kind = COLUMNS.get(name, TEXT)
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
    layout = Layout(**degrees, expert=config["parallelism"]["expert"])
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
