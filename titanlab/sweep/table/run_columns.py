"""Columns of a run's row, from the content of its files: recipe, figures, machine. Mappings in, plain values out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titanlab.costs import meter
from titanlab.costs.layout import AXES, Layout


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
    return {
        "tokens_per_second": per_device,
        "tokens_per_second_all": None if per_device is None else per_device * world,
        "tflops": metrics.get(meter.TFLOPS),
        "mfu_percent": metrics.get(meter.MFU),
        "mfu_convention": _convention(metrics),
        "step_seconds": step_seconds,
        "step_seconds_q1": metrics.get(meter.STEP_SECONDS_LOW),
        "step_seconds_q3": metrics.get(meter.STEP_SECONDS_HIGH),
        "data_percent": metrics.get(meter.DATA_PERCENT),
        "measured_steps": metrics.get(meter.MEASURED_STEPS),
        **_memory(metrics, world=world),
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


def _convention(metrics: Mapping[str, Any]) -> str | None:
    """What an MFU means: FLOPs per token over a peak; None without a peak."""
    peak, formula = metrics.get("peak_tflops"), metrics.get("flops_convention")
    if peak is None or formula is None:
        return None
    return f"{formula} FLOPs a token, over {peak:.4g} TFLOP/s ({metrics.get('peak_source') or 'unknown source'})"


def _memory(metrics: Mapping[str, Any], *, world: int) -> dict[str, Any]:
    """The largest peak of all ranks, and whose it is; of the rank that logs where the ranks were not compared."""
    own = metrics.get(meter.MEMORY_RESERVED, metrics.get("memory/max_resident(GiB)"))
    most = metrics.get(meter.MEMORY_MOST)
    # The rank that logs may have needed more after the last comparison.
    if most is None or (own is not None and own > most):
        return {"memory_gib": own, "memory_rank": 0 if own is not None and world == 1 else None}
    return {"memory_gib": most, "memory_rank": metrics.get(meter.MEMORY_MOST_RANK)}


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
