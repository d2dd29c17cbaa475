"""`titanlab rehearse …`: train every recipe of a sweep for a few steps on this CPU, in a small size."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlab.cli.arguments import MOST_STEPS, check_number, json_text
from titanlab.cli.candidates import ProofCandidates, choose, left_out_lines, sizes_and_notes
from titanlab.errors import ConfigError
from titanlab.prove import FAILED, MOST_PROCESSES, STEPS, Result, log_of, prepare, reduce_all, rehearse, train_in_ranks
from titanlab.records import OutcomeKind
from titanlab.sweep import aligned
from titanlab.system import Console, counted, shown_path

_HEADINGS = ("", "run", "layout", "outcome", "cause")


def rehearse_verb(args: Namespace) -> int:
    """Returns 0 if all recipes are ok, 1 if one failed, 2 after bad input."""
    check_number("--steps", args.steps, MOST_STEPS, STEPS)
    check_number("--processes", args.processes, 256, MOST_PROCESSES)
    if not args.rest:
        cure = "try +sweeps=quickstart_layouts, +recipe=quickstart, or the name of a sweep"
        raise ConfigError("arguments", "", "say nothing of what to rehearse", cure)
    with Console() as console:
        chosen = choose(args.rest, args.runs)
        if args.only:
            chosen.only(args.only)
        return _rehearse(chosen, args, console)


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_empty = not any(folder.iterdir())
    except OSError as error:
        rule = f"cannot be made ({error.strerror or type(error).__name__})"
        raise ConfigError("--keep", folder, rule, "give a folder of yours") from error
    if not is_empty:
        # Runs of an earlier rehearsal would resume.
        raise ConfigError("--keep", folder, "has files already", "give an empty folder, or a new one")
    return folder.absolute()


def _rehearse(chosen: ProofCandidates, args: Any, console: Console) -> int:
    folder = _made(args.keep) if args.keep is not None else Path(tempfile.mkdtemp(prefix="titanlab-rehearse-"))
    infeasible = OutcomeKind.INFEASIBLE.value
    results = [
        Result(run=name, layout="", state=FAILED, outcome=infeasible, cause=reason) for name, reason in chosen.broken
    ]
    try:
        return _rehearse_in(folder, chosen, results, args, console)
    finally:
        if args.keep is None and not any(result.log for result in results):
            shutil.rmtree(folder, ignore_errors=True)


def _rehearse_in(folder: Path, chosen: ProofCandidates, results: list[Result], args: Any, console: Console) -> int:
    """Rehearse with runs in a folder, and add to the results. Returns the exit code."""
    rehearsals = reduce_all(
        chosen.candidates, steps=args.steps, runs=str(folder), most=args.processes, inductor=args.inductor, saves=True
    )
    total = len(results) + len(rehearsals)
    code = 0
    if not args.json:
        lines = [f"{chosen.title}: {counted(len(chosen.candidates), 'recipe')}"]
        lines += sizes_and_notes(rehearsals, args.steps)
        console.note("\n".join([*lines, *left_out_lines(chosen)]))
        for number, result in enumerate(results, 1):
            console.note(f"[{number}/{total}] {_line(result)}")

    def train(recipe: Any) -> Any:
        ended = train_in_ranks(recipe)
        if args.keep is None and ended.outcome.kind is OutcomeKind.DONE:
            shutil.rmtree(ended.run.path, ignore_errors=True)
        return ended

    try:
        if any(rehearsal.recipe for rehearsal in rehearsals):
            prepare()

        for result in rehearse(rehearsals, train, lambda ended: str(log_of(ended))):
            results.append(result)
            if not args.json:
                console.note(f"[{len(results)}/{total}] {_line(result)}")
    except KeyboardInterrupt:
        console.error(f"interrupted; {len(results)} of {counted(total, 'rehearsal')} done")
        code = OutcomeKind.CANCELLED.exit_code
    failed = [result for result in results if result.state == FAILED]
    code = code or (1 if failed else 0)
    if args.json:
        values = {"rehearsals": [result.to_mapping() for result in results], "planned": total}
        console.note(json_text(values))
        return code
    if failed or not code:
        console.note("\n".join(_summary(results, failed)))
    if args.keep is not None:
        console.note(f"kept in {shown_path(folder)}")
    return code


def _line(result: Result) -> str:
    named = "  ".join(part for part in (result.state, result.run, result.layout) if part)
    if result.same_as is not None:
        named += f"  the same as {result.same_as}"
    elif result.processes:
        named += f"  {counted(result.processes, 'process', 'processes')}  {result.seconds:.1f} s"
    return named if result.state != FAILED else f"{named}  {result.outcome}: {result.cause}"


def _summary(results: Sequence[Result], failed: Sequence[Result]) -> list[str]:
    runs = len({result.run for result in results})
    if not failed:
        return [f"ok: {counted(runs, 'recipe')} in {counted(len(results), 'rehearsal')}"]
    lines = [""]
    lines += aligned(
        _HEADINGS, [(result.state, result.run, result.layout, result.outcome, result.cause) for result in failed]
    )
    logs = dict.fromkeys(result.log for result in failed if result.log)
    lines += ["", *(f"log of the rank that failed: {shown_path(Path(log))}" for log in logs)]
    lines.append(f"{len({result.run for result in failed})} of {counted(runs, 'recipe')} failed")
    return lines
