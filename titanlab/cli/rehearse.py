"""`titanlab rehearse …`: train every recipe of a sweep for a few steps on this CPU, in a small size."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlab.cli.arguments import FlagParser, check_number
from titanlab.cli.candidates import ProofCandidates, choose, left_out_lines, sizes_and_notes
from titanlab.errors import ConfigError
from titanlab.prove.forked import log_of, prepare, train_in_ranks
from titanlab.prove.proof import FAILED, STEPS, Result, rehearse
from titanlab.prove.reduction import MOST_PROCESSES, Reduced, reduce_all
from titanlab.records.outcome import OutcomeKind
from titanlab.sweep.listing import aligned
from titanlab.system.files import finite, user_path
from titanlab.system.terminal import Console
from titanlab.system.text import counted, shown_path

_MOST_STEPS = 100
_HEADINGS = ("", "run", "layout", "outcome", "cause")

_HELP = f"""\
titanlab rehearse: find what would break on the cluster, on this CPU

usage: titanlab rehearse [+sweeps=NAME | SWEEP | +recipe=NAME] [KEY=VALUE …] [FLAG …]

  titanlab rehearse +sweeps=llama3_405b_512gpus             every recipe of a sweep, {STEPS} steps each
  titanlab rehearse +sweeps=llama3_405b_512gpus --only 1f1b
  titanlab rehearse +recipe=llama3_1_8b_256gpus_4d

Each recipe is composed and checked in its real size, then reduced and trained for {STEPS} steps: its layout is folded
to at most {MOST_PROCESSES} processes; schedule, precision, checkpointing, compiled parts, optimizer, validation and
kind of checkpoints stay. Axes that do not fit together get a second rehearsal. A failure does not stop the others.

options:
  --only WORD     recipes with this word in their names
  --steps N       of each rehearsal (default {STEPS}, at most {_MOST_STEPS})
  --processes N   most processes of a layout (default {MOST_PROCESSES})
  --keep FOLDER   keep the folders of the reduced runs there; otherwise only those of failed ones stay
  --inductor      let inductor compile what it compiles in the recipe: minutes instead of seconds
  --json          the result as JSON
  --runs FOLDER   the folder of runs (default runs)
  -h, --help      this page

Exit codes: 0 all are ok, 1 one failed, 2 bad input. What a rehearsal cannot find: docs/proofs.md."""


def rehearse_verb(arguments: Sequence[str]) -> int:
    """Returns 0 if all recipes are ok, 1 if one failed, 2 after bad input."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_HELP)
        return 0
    args, rest = _parse(arguments)
    if not rest:
        cure = "try +sweeps=quickstart_layouts, +recipe=quickstart, or the name of a sweep"
        raise ConfigError("arguments", "", "say nothing of what to rehearse", cure)
    with Console() as console:
        chosen = choose(rest, args.runs)
        if args.only:
            chosen.only(args.only)
        return _rehearse(chosen, args, console)


def _parse(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    parser = FlagParser("rehearse")
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--processes", type=int, default=MOST_PROCESSES)
    parser.add_argument("--keep", type=user_path)
    parser.add_argument("--runs", default="runs")
    parser.add_argument("--inductor", action="store_true")
    parser.add_argument("--json", action="store_true")
    args, rest = parser.parse_known_args(list(arguments))
    check_number("--steps", args.steps, _MOST_STEPS, STEPS)
    check_number("--processes", args.processes, 256, MOST_PROCESSES)
    return args, rest


def _made(folder: Path) -> Path:
    """The folder of `--keep`, which is made.

    Raises:
        ConfigError: it has files, or cannot be made.
    """
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
        console.note("\n".join(_heading(chosen, rehearsals, args.steps)))
        for number, result in enumerate(results, 1):
            console.note(f"[{number}/{total}] {_line(result)}")
    try:
        if any(rehearsal.recipe for rehearsal in rehearsals):
            prepare()

        for result in rehearse(rehearsals, _trainer(keep=args.keep is not None), lambda ended: str(log_of(ended))):
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
        console.note(json.dumps(finite(values), indent=2, ensure_ascii=False))
        return code
    if failed or not code:
        console.note("\n".join(_summary(results, failed)))
    if args.keep is not None:
        console.note(f"kept in {shown_path(folder)}")
    return code


def _trainer(*, keep: bool) -> Any:
    def train(recipe: Any) -> Any:
        ended = train_in_ranks(recipe)
        if not keep and ended.outcome.kind is OutcomeKind.DONE:
            shutil.rmtree(ended.run.path, ignore_errors=True)
        return ended

    return train


def _heading(chosen: ProofCandidates, rehearsals: Sequence[Reduced], steps: int) -> list[str]:
    lines = [f"{chosen.title}: {counted(len(chosen.candidates), 'recipe')}"]
    lines += sizes_and_notes(rehearsals, steps)
    return lines + left_out_lines(chosen)


def _line(result: Result) -> str:
    """One result as a line of progress."""
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
