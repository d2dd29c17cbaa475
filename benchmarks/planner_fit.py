"""Fits the efficiencies of the planner's time model to published runs, and prints the error of every run.

    python benchmarks/planner_fit.py --memory    only the allocator's excess
    python benchmarks/planner_fit.py             the rows, the cross-validated error, the values
    python benchmarks/planner_fit.py --write     keeps them: titanlab/plan/efficiencies.json and
                                                 benchmarks/results/planner_fit.json

The cross-validated error of a run is that of a fit without its source and table. `benchmarks/published` says which rows
take part.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from published_runs import Published, published_runs

from titanlab.cli.compose import compose
from titanlab.plan import machine_of, most_memory
from titanlab.plan.block_time import TRANSPOSED, KernelGroup, kernel_seconds
from titanlab.plan.calibration import fit
from titanlab.plan.machine import FILE, HOST, LIMITS, Efficiencies, Machine
from titanlab.plan.pipeline_time import simulated_time
from titanlab.plan.step_time import step_time
from titanlab.recipe import Recipe, resolve

SESSION = Path(__file__).parent / "results" / "gpu_session_h200" / "gpu_session.jsonl"
RESULT = Path(__file__).parent / "results" / "planner_fit.json"
# Launches and latencies are not fitted: their time and that of small collectives are too similar in these runs. The
# host's seconds are those of benchmarks/host_cost.py.
FITTED = tuple(name for name in LIMITS if name not in ("launch_seconds", "latency", *HOST))
# Runs of one table that differ by less than this are not put in order.
APART = 0.05


class Runs:
    """Runs, with the parts of their machines that no parameter changes."""

    def __init__(self, runs: Sequence[Published]) -> None:
        self.runs = list(runs)
        self.machines = [machine_of(run.recipe) for run in runs]

    def errors(self, values: Efficiencies) -> list[float]:
        """Logarithm of estimated over measured tokens per second, by run."""
        # Rows with equal machines share one, so that they share times of blocks.
        shared: dict[str, Machine] = {}
        found = []
        for run, machine in zip(self.runs, self.machines, strict=True):
            key = f"{run.recipe.cluster}"
            if key not in shared:
                shared[key] = dataclasses.replace(machine, efficiencies=values)
            estimate = step_time(run.recipe, shared[key], pipeline=simulated_time).tokens_per_second
            found.append(math.log(estimate / run.tokens_per_second))
        return found


def cross_validated(runs: Sequence[Published], names: Sequence[str]) -> dict[int, float]:
    """Relative error of each run by a fit without its table."""
    found = {}
    for table in dict.fromkeys(run.table for run in runs):
        rest = Runs([run for run in runs if run.table != table])
        out = [run for run in runs if run.table == table]
        values = fit(rest.errors, Efficiencies(), names)
        for run, error in zip(out, Runs(out).errors(values), strict=True):
            found[run.number] = math.exp(error) - 1
    return found


def ordered_pairs(runs: Sequence[Published], errors: dict[int, float]) -> list[tuple[int, int, bool]]:
    """Pairs of variants of one table that differ by more than `APART`, and whether the estimates have their order.

    Variants have the same model, number of GPUs and sequence.
    """
    pairs = []
    for one, other in itertools.combinations(runs, 2):
        same = all(one.row[name] == other.row[name] for name in ("hw", "gpus", "model", "seq_len"))
        measured = math.log(one.tokens_per_second / other.tokens_per_second)
        if one.table != other.table or not same or abs(measured) <= math.log(1 + APART):
            continue
        estimated = measured + math.log1p(errors[one.number]) - math.log1p(errors[other.number])
        pairs.append((one.number, other.number, measured * estimated > 0))
    return pairs


def regrets(runs: Sequence[Published], errors: dict[int, float]) -> list[dict[str, Any]]:
    """By table, for its variants of one model on as many GPUs with equal sequences: the measured speed of the variant
    that is estimated as the fastest, over the best measured speed.
    """
    groups: dict[tuple[str, ...], list[Published]] = {}
    for run in runs:
        groups.setdefault((*run.table, *(run.row[name] for name in ("hw", "gpus", "model", "seq_len"))), []).append(run)
    found = []
    for own in (own for own in groups.values() if len(own) > 1):
        pick = max(own, key=lambda run: run.tokens_per_second * (1 + errors[run.number]))
        share = pick.tokens_per_second / max(run.tokens_per_second for run in own)
        ids = [run.number for run in own]
        found.append({"ids": ids, "pick": pick.number, "regret": round(share, 4)})
    return found


def session_study(values: Efficiencies, excess: float) -> list[dict[str, Any]]:
    """The runs of the session on an H200, which no fit uses: errors of speed and of reserved memory."""
    found = []
    for line in SESSION.read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] not in ("run", "held"):
            continue
        (recipe,) = compose(entry["keys"])
        recipe = resolve(recipe, world=None, accelerator="cuda", device="NVIDIA H200")
        machine = dataclasses.replace(machine_of(recipe), efficiencies=values, allocator_excess=excess)
        seconds = step_time(recipe, machine, pipeline=simulated_time).seconds + _chunk_casts(recipe, machine)
        reserved, figures = machine.reserved_bytes(most_memory(recipe).allocated), entry["figures"]
        measured = figures["step_seconds"]
        if recipe.compile.records_graphs:
            # The others of the eight steps recorded graphs.
            measured = statistics.median(figures["step_seconds_all"][-2:])
        found.append(
            {
                "run": entry["row"],
                "measured": round(recipe.tokens_per_step / measured, 1),
                "error": round(measured / seconds - 1, 4),
                "memory_error": round(reserved / figures["reserved_bytes"] - 1, 4),
            }
        )
    return found


def _chunk_casts(recipe: Recipe, machine: Machine) -> float:
    """Seconds that the code of the session (b91c34e) took beyond today's code: it cast and copied the weight of a head
    in float8 for each chunk of tokens, and not once.
    """
    account = recipe.model.account()
    product = recipe.precision.products(account).get(account.head)
    if product is None or not recipe.loss_chunk:
        return 0.0
    weight = f"{account.head}.weight"
    cast = 0.0 if weight in recipe.precision.float8_gathered(account) else product.eager_cast_bytes
    more = math.ceil(recipe.training.seq_len * recipe.microbatch / recipe.loss_chunk) - 1
    moved = recipe.microbatches * more * math.prod(account.parameters[weight]) * (cast + TRANSPOSED)
    return kernel_seconds([KernelGroup(0.0, "", moved, recipe.microbatches * more, False)], machine)


def memory_study(runs: Sequence[Published]) -> dict[str, Any]:
    """The allocator's excess, reserved over allocated memory: the median over the runs that publish memory.

    Its cross-validated error is that of the median of the other tables.
    """
    ratios = {
        run.number: run.memory_bytes / most_memory(run.recipe).allocated for run in runs if run.memory_bytes is not None
    }
    tables = {run.number: run.table for run in runs}
    fitted = {run.number for run in runs if run.fitted}

    def excess(without: tuple[str, str] | None) -> float:
        return statistics.median(
            ratio for number, ratio in ratios.items() if number in fitted and tables[number] != without
        )

    errors = {number: excess(tables[number]) / ratio - 1 for number, ratio in ratios.items()}
    return {
        "runs": sum(number in fitted for number in ratios),
        "allocator_excess": round(excess(None), 4),
        "cross_validated_median_error": _median(error for number, error in errors.items() if number in fitted),
        "rows": [
            {"id": number, "fitted": number in fitted, "error": round(excess(None) / ratio - 1, 4),
             "cross_validated_error": round(errors[number], 4)}
            for number, ratio in ratios.items()
        ],
    }  # fmt: skip


def study(names: Sequence[str]) -> dict[str, Any]:
    """The fit, and the errors of all runs."""
    everything = published_runs()
    runs = [run for run in everything if run.fitted]
    values = fit(Runs(runs).errors, Efficiencies(), names)
    errors = dict(
        zip((run.number for run in everything), map(math.expm1, Runs(everything).errors(values)), strict=True)
    )
    left_out = cross_validated(runs, names)
    pairs = ordered_pairs(runs, left_out)
    memory = memory_study([run for run in everything if run.fsdp])
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "runs": len(runs),
        "tables": len({run.table for run in runs}),
        "median_error": _median(errors[run.number] for run in runs),
        "cross_validated_median_error": _median(left_out.values()),
        "pairs": len(pairs),
        "pairs_in_order": sum(right for *_, right in pairs),
        "wrong_pairs": [list(pair[:2]) for pair in pairs if not pair[2]],
        "regrets": regrets(runs, left_out),
        "efficiencies": {name: float(f"{value:.4g}") for name, value in dataclasses.asdict(values).items()},
        "memory": memory,
        "session": session_study(values, memory["allocator_excess"]),
        "rows": [_row(run, errors[run.number], left_out.get(run.number)) for run in everything],
    }


def _row(run: Published, error: float, left_out: float | None) -> dict[str, Any]:
    return {
        "id": run.number,
        "source": run.row["source"],
        "table": run.row["table"],
        "run": _label(run),
        "fsdp": run.fsdp,
        "fitted": run.fitted,
        "measured": run.tokens_per_second,
        "error": round(error, 4),
        "cross_validated_error": None if left_out is None else round(left_out, 4),
    }


def _label(run: Published) -> str:
    row = run.row
    layout = run.recipe.layout.label
    compiled = ", compiled" if row["compile"] == "Y" else ""
    return f"{row['model']}, {row['hw'].split(',')[0]}, {layout}, {row['precision']}, ac={run.recipe.ac.kind}{compiled}"


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(abs(value) for value in values), 4)


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the values and the errors")
    parser.add_argument("--only", nargs="+", default=list(FITTED), choices=list(LIMITS), help="parameters to fit")
    parser.add_argument("--memory", action="store_true", help="only the memory's part; the rest as it is kept")
    arguments = parser.parse_args()
    if arguments.memory:
        found = json.loads(RESULT.read_text())
        found["memory"] = memory_study([run for run in published_runs() if run.fsdp])
    else:
        found = study(arguments.only)
    for row in found["rows"]:
        left_out = row["cross_validated_error"]
        text = "not fitted" if left_out is None else f"{left_out:+7.1%}"
        print(f"{row['id']:4d} {row['measured']:9.1f} {row['error']:+7.1%} {text:>10}  {row['run']}")
    for row in found["memory"]["rows"]:
        print(f"{row['id']:4d} memory {row['error']:+7.1%} {row['cross_validated_error']:+7.1%} {row['fitted']}")
    print(json.dumps({key: value for key, value in found.items() if key != "rows"}, indent=2))
    if arguments.write:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        facts = {key: found[key] for key in ("date", "runs", "median_error", "cross_validated_median_error")}
        facts["allocator_excess"] = found["memory"]["allocator_excess"]
        facts["memory_error"] = found["memory"]["cross_validated_median_error"]
        # Four digits: more are not known.
        facts["efficiencies"] = {name: float(f"{value:.4g}") for name, value in found["efficiencies"].items()}
        FILE.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
