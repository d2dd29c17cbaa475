"""`titanlab diagnose RUN`: say again why a run hung, and where each of its ranks was."""

from __future__ import annotations

import json
from collections.abc import Sequence

from titanlab.cli.arguments import Arguments
from titanlab.distributed.hang import has_hung, hung_attempt
from titanlab.records.diagnosis import rank_rows, table_lines
from titanlab.records.run_folder import RunFolder
from titanlab.records.run_search import find_run
from titanlab.system.files import finite
from titanlab.system.terminal import Console


def main(arguments: Sequence[str]) -> int:
    """Print the diagnosis of a run's newest attempt, or of the given attempt."""
    parser = Arguments("diagnose", "Say again why a run hung, and where each of its ranks was.")
    parser.add_argument("run", help="the run's folder, name, or the first digits of its hash")
    parser.add_argument("--attempt", type=int, help="number of the attempt (default the newest)")
    parser.add_argument("--json", action="store_true", help="the same as JSON, with whole stacks")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    run = find_run(args.run, args.runs)
    attempt = run.chosen_attempt(args.attempt)
    with Console() as console:
        if attempt and has_hung(run, attempt):
            _show(run, attempt, console, as_json=args.json)
        elif args.json:
            result = run.result(attempt) if attempt else run.result()
            outcome = None if result is None else result.kind.value
            console.note(json.dumps({"run": run.path.name, "attempt": attempt, "hung": False, "outcome": outcome}))
        else:
            console.note(_without_hang(run, attempt))
    return 0


def _without_hang(run: RunFolder, attempt: int) -> str:
    """One line that says how the attempt ended."""
    result = run.result(attempt) if attempt else run.result()
    if result is None:
        state = run.status()
        stopped = run.stopped(attempt) if attempt else None
        text = f"did not hang; it has not ended{'' if state is None else f' ({state.state})'}"
        text = f"has not ended; {stopped}" if stopped else text
    else:
        text = f"did not hang; it ended as {result.kind.value}: {result.cause or result.kind.meaning}"
    earlier = [number for number in run.attempts() if number != attempt and has_hung(run, number)]
    more = f"; attempt {earlier[-1]} hung, see --attempt {earlier[-1]}" if earlier else ""
    return f"{run.path.name}, attempt {attempt}, {text}{more}"


def _show(run: RunFolder, attempt: int, console: Console, *, as_json: bool) -> None:
    hung = hung_attempt(run, attempt)
    diagnosis = hung.diagnosis
    rows = rank_rows(
        diagnosis, hung.records, {**hung.others, **dict.fromkeys(hung.damaged, "damaged")}, world=hung.world
    )
    result = run.result(attempt)
    if as_json:
        values = {
            "run": run.path.name,
            "attempt": attempt,
            "hung": True,
            "outcome": None if result is None else result.kind.value,
            "cause": None if result is None else result.cause,
            "verdict": diagnosis.verdict,
            "ranks": diagnosis.ranks,
            "pending": diagnosis.pending,
            "damaged": list(hung.damaged.values()),
            "rows": rows,
        }
        console.note(json.dumps(finite(values), indent=2, ensure_ascii=False))
        return
    for line in hung.damaged.values():
        console.warn(line)
    console.note("\n".join([f"{run.path.name}, attempt {attempt}: {diagnosis.verdict}", "", *table_lines(rows)]))
