"""`titanlab parity …`: prove that recipes train the same, or compare the logs of two finished runs."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.cli.arguments import MOST_STEPS, PARITY_STEPS, check_number, json_text
from titanlab.cli.candidates import (
    ProofCandidates,
    choose,
    is_name,
    is_recipe,
    left_out_lines,
    one_recipe,
    sizes_and_notes,
    table,
)
from titanlab.errors import ConfigError
from titanlab.prove import (
    MOST_PROCESSES,
    NOT_COMPARED,
    ProofRow,
    Prover,
    RunFailed,
    check_same,
    comparable,
    compare_runs,
    plan_proofs,
    prepare,
    train_in_ranks,
    write_parity,
)
from titanlab.recipe import Recipe
from titanlab.records import NoSuchRun, OutcomeKind, find_run
from titanlab.system import Console, counted, shown_path

if TYPE_CHECKING:
    from titanlab.prove import TrainingTrace

REFERENCE = "one process with the same model, data, batch and precision, which recomputes and compiles nothing"


def parity_verb(args: Namespace) -> int:
    """Returns 0 if all recipes pass, 1 if one fails, 2 after bad input."""
    rest = args.rest
    if args.steps is not None:
        check_number("--steps", args.steps, MOST_STEPS, PARITY_STEPS)
    if args.processes is not None:
        check_number("--processes", args.processes, 256, MOST_PROCESSES)
    if not rest:
        cure = "try +sweeps=quickstart_layouts, a sweep's name, or two recipes or runs"
        raise ConfigError("arguments", "", "say nothing of what to prove", cure)
    with Console() as console:
        pair = _pair(rest)
        if pair is not None and (runs := _runs(pair, args.runs)) is not None:
            for flag in ("steps", "processes", "only", "inductor"):
                if value := getattr(args, flag):
                    rule = "is for recipes, which are trained; finished runs are compared as they were logged"
                    raise ConfigError(f"--{flag}", value, rule, "leave it out, or give two recipes")
            return _compare(*runs, args, console)
        chosen = choose(rest, args.runs) if pair is None else _of_pair(pair)
        if args.only:
            chosen.only(args.only)
        return _prove(chosen, args, console)


def _pair(arguments: Sequence[str]) -> tuple[str, str] | None:
    """Two runs or two recipes; None if the arguments are one command line."""
    whole = [is_name(argument) or argument.lstrip().startswith("+recipe=") for argument in arguments]
    return (arguments[0], arguments[1]) if len(arguments) == 2 and all(whole) else None


def _runs(pair: tuple[str, str], runs: str) -> tuple[Any, Any] | None:
    """The two runs that a pair names; None if neither is a run."""
    run_folders = []
    for text in pair:
        try:
            run_folders.append(find_run(text, runs) if is_name(text) else None)
        except NoSuchRun:
            run_folders.append(None)
    if run_folders[0] is not None and run_folders[1] is not None:
        return run_folders[0], run_folders[1]
    if run_folders != [None, None]:
        known, other = pair if run_folders[0] is not None else pair[::-1]
        if is_recipe(known):
            # A run may have the name of the recipe from which it was started.
            return None
        rule = f"is no finished run, and {known} is one"
        raise ConfigError("run", other, rule, "compare two runs, or two recipes")
    return None


def _of_pair(pair: tuple[str, str]) -> ProofCandidates:
    first, second = map(one_recipe, pair)
    cure = "compare recipes that differ in layout or technique only"
    check_same(first.run, comparable(first.recipe), comparable(second.recipe), cure)
    candidates = [first] if first == second else [first, second]
    title = "two recipes" if len(candidates) > 1 else "one recipe, given twice"
    return ProofCandidates(title=title, candidates=candidates)


def _compare(first: Any, second: Any, args: Any, console: Console) -> int:
    comparison = compare_runs(first, second)
    row = comparison.row
    if args.json:
        values = {
            "reference": first.path.name,
            "compared_steps": comparison.compared,
            "first_step": {"loss": comparison.first[0], "grad_norm": comparison.first[1]},
            "logged_steps": comparison.logged,
            "rows": [row.to_mapping()],
            "note": NOT_COMPARED,
        }
        console.note(json_text(values))
        return 0 if row.passed else 1
    console.note(f"{row.run} against {first.path.name}, at equal tokens")
    console.note("\n".join(table([row])))
    loss, norm = comparison.first
    console.note(
        f"compared {comparison.compared} of {comparison.logged} logged steps: the largest difference of a loss (at "
        f"{comparison.tokens:,} tokens), the median of the norms; in the first step {loss:.1e} and {norm:.1e}\n"
        f"{NOT_COMPARED}"
    )
    return _verdict([row], console)


def _prove(chosen: ProofCandidates, args: Any, console: Console) -> int:
    if not chosen.candidates:
        name, reason = chosen.broken[0]
        raise ConfigError("run", name, reason, "mend it, or prove another")
    folder = Path(tempfile.mkdtemp(prefix="titanlab-parity-"))
    rows: list[ProofRow] = []
    trainer, code = _Trainer(), 0
    steps, most = args.steps or PARITY_STEPS, args.processes or MOST_PROCESSES
    try:
        proofs = plan_proofs(chosen.candidates, steps=steps, runs=str(folder), most=most, inductor=args.inductor)
        if not args.json:
            count = counted(len(chosen.candidates), "recipe")
            lines = [f"{chosen.title}: {count}, each held to {REFERENCE}"]
            lines += sizes_and_notes(proofs, steps)
            console.note("\n".join([*lines, *left_out_lines(chosen)]))
        prepare()
        prover = Prover(trainer)
        for number, proof in enumerate(proofs, 1):
            for row in prover.rows(proof):
                rows.append(row)
                if not args.json:
                    console.note(f"[{number}/{len(proofs)}] {_line(row)}")
        rows += [ProofRow(run=name, layout="", precision="", passed=False, reason=why) for name, why in chosen.broken]
    except KeyboardInterrupt:
        console.error(f"interrupted; {counted(len(rows), 'row')} of {counted(len(chosen.candidates), 'recipe')} done")
        code = OutcomeKind.CANCELLED.exit_code
    finally:
        if not trainer.failed:
            shutil.rmtree(folder, ignore_errors=True)
    kept = _kept(chosen, rows, console)
    if args.json:
        values = {"reference": REFERENCE, "rows": [row.to_mapping() for row in rows], "file": kept}
        console.note(json_text(values))
        return code or (0 if all(row.passed for row in rows) else 1)
    if rows:
        console.note("\n".join(["", *table(rows), ""]))
    if kept:
        console.note(f"kept in {kept}")
    return code or _verdict(rows, console)  # after an interruption, some recipes are not proved


class _Trainer:
    """Trains reduced recipes in forked ranks, and reads their traces.

    Attributes:
        failed: whether a run has failed; its folder stays.
    """

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, recipe: Recipe) -> Sequence[TrainingTrace]:
        # Imported here: it imports torch.
        from titanlab.prove import Tracer, TrainingTrace

        ended = train_in_ranks(
            recipe, lambda made, run, ranks: Tracer(made.layout, run.path / f"trace-{ranks.rank}.pt")
        )
        if ended.outcome.kind is not OutcomeKind.DONE:
            self.failed = True
            raise RunFailed(ended)
        traces = [TrainingTrace.load(ended.run.path / f"trace-{rank}.pt") for rank in range(recipe.layout.world)]
        shutil.rmtree(ended.run.path, ignore_errors=True)
        return traces


def _kept(chosen: ProofCandidates, rows: Sequence[ProofRow], console: Console) -> str | None:
    """Store the rows in the sweep's folder. Returns the file's path as text."""
    if chosen.folder is None or not rows:
        return None
    try:
        return shown_path(write_parity(chosen.folder, [row.to_mapping() for row in rows], reference=REFERENCE))
    except (OSError, ConfigError) as error:
        console.warn(f"the result is not kept with the sweep: {error}")
        return None


def _line(row: ProofRow) -> str:
    word = "PASS" if row.passed else "FAIL"
    named = "  ".join(part for part in (word, row.run, row.layout, row.precision) if part)
    return named if row.passed else f"{named}: {row.reason}"


def _verdict(rows: Sequence[ProofRow], console: Console) -> int:
    failed = [row for row in rows if not row.passed]
    for row in failed:
        console.note("  ".join(part for part in ("FAIL", row.run, row.precision) if part) + f": {row.reason}")
    runs = counted(len({row.run for row in rows}), "recipe")
    if failed:
        console.note(f"{len({row.run for row in failed})} of {runs} failed")
        return 1
    console.note(f"PASS: {runs}")
    return 0
