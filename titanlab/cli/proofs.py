"""`titanlab parity …` proves that recipes train the same; `titanlab rehearse …` trains them in a small size."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.cli.arguments import MOST_STEPS, PARITY_STEPS, check_number, json_text
from titanlab.errors import ConfigError
from titanlab.prove import (
    FAILED,
    MOST_PROCESSES,
    NOT_COMPARED,
    STEPS,
    Candidate,
    ProofRow,
    Prover,
    Reduced,
    Result,
    RunFailed,
    check_same,
    comparable,
    compare_runs,
    log_of,
    plan_proofs,
    prepare,
    reduce_all,
    rehearse,
    train_in_ranks,
    write_parity,
)
from titanlab.recipe import Recipe, check_unedited, conf_folder, from_mapping, read_flags, resolve
from titanlab.records import NoSuchRun, OutcomeKind, RunFolder, find_run
from titanlab.sweep import COMMAND_LINE, SINGLE, SweepFolder, open_sweep, plan_study
from titanlab.system import Console, aligned, counted, shown_path, user_path

if TYPE_CHECKING:
    from titanlab.prove import TrainingTrace

REFERENCE = "one process with the same model, data, batch and precision, which recomputes and compiles nothing"
# Stages of a plan at which a recipe breaks a rule; at other stages the sweep leaves it out on purpose.
BROKEN = ("layout", "composition", "rule")


@dataclass(kw_only=True)
class ProofCandidates:
    """Recipes, and where their results are kept.

    Attributes:
        broken, left_out: runs that break a rule in their real size, and points that the sweep leaves out on purpose;
            each with the reason.
        folder: the sweep's folder; None: the recipes do not belong to a sweep.
    """

    title: str
    candidates: list[Candidate]
    broken: list[tuple[str, str]] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    folder: Path | None = None

    def only(self, word: str) -> None:
        """Keep runs with this word in their names; a ConfigError if there are none."""
        names = [*(candidate.run for candidate in self.candidates), *(name for name, _ in self.broken)]
        self.candidates = [candidate for candidate in self.candidates if word in candidate.run]
        self.broken = [(name, rule) for name, rule in self.broken if word in name]
        if not self.candidates and not self.broken:
            cure = f"try {names[0]}" if names else ""
            raise ConfigError("--only", word, f"is in no run's name of {self.title}", cure)

    def drop(self, stage: object, label: str, reason: str) -> None:
        """Add a point that the plan of its sweep has dropped."""
        (self.broken if stage in BROKEN else self.left_out).append((label, reason))


def choose(arguments: Sequence[str], runs: str) -> ProofCandidates:
    """The recipes that arguments describe: overrides, a name of a recipe or a sweep in conf, or a submitted sweep."""
    first, *rest = arguments
    if not is_name(first):
        return _of_command_line(arguments)
    try:
        if rest:
            raise ConfigError("recipe", first, "is neither a recipe nor a sweep of conf", "try +recipe=quickstart")
        sweep = open_sweep(first, runs)
    except ConfigError as error:
        return _of_command_line([override_of(first, error), *rest])
    chosen = ProofCandidates(title=f"{sweep.name} ({sweep.path})", candidates=[], folder=sweep.path)
    for run in sweep.runs():
        try:
            check_unedited(run)
            recipe = from_mapping(run.config())
            recipe = resolve(recipe, world=None, accelerator=recipe.cluster.accelerator, device="cpu")
        except ConfigError as error:
            chosen.broken.append((run.path.name, str(error)))
        else:
            chosen.candidates.append(Candidate(run=run.path.name, recipe=recipe))
    if sweep.manifest():
        chosen.candidates = _without_repeats(chosen.candidates)
    for row in sweep.points():
        if isinstance(dropped := row.get("dropped"), dict):
            label = ", ".join(f"{key}={value}" for key, value in row["point"].items())
            chosen.drop(dropped.get("stage"), label, str(dropped.get("reason")))
    return chosen


def is_name(argument: str) -> bool:
    """Whether an argument is a name or the path of a folder, not an override or flag."""
    if os.sep in argument and not argument.startswith("+") and user_path(argument).is_dir():
        return True  # A path may contain spaces and equals signs.
    return "=" not in argument and not argument.startswith(("-", "+", "~")) and " " not in argument.strip()


def override_of(name: str, error: ConfigError) -> str:
    """The override that chooses the recipe or the sweep of this name in `conf`; raises `error` if there is none."""
    for group in ("recipe", "sweeps"):
        if (conf_folder() / group / f"{name}.yaml").is_file():
            return f"+{group}={name}"
    raise error


def one_recipe(expression: str) -> Candidate:
    """The recipe of an expression: a name, or overrides in one argument."""
    try:
        words = shlex.split(expression)
    except ValueError as error:
        cure = "try '+recipe=quickstart world=2'"
        raise ConfigError("recipe", expression, f"cannot be read ({error})", cure) from error
    if len(words) == 1 and is_name(words[0]):
        cure = "try +recipe=NAME, or name two runs (--runs FOLDER)"
        words = [override_of(words[0], ConfigError("recipe", words[0], "is neither a run nor a recipe", cure))]
    chosen = _of_command_line(words)
    if len(chosen.candidates) != 1:
        rule = f"describes {len(chosen.candidates)} recipes, and two are compared"
        raise ConfigError("recipe", expression, rule, "leave the others out, or prove all: titanlab parity +sweeps=…")
    return Candidate(run=" ".join(words), recipe=chosen.candidates[0].recipe)


def _of_command_line(arguments: Sequence[str]) -> ProofCandidates:
    flags = read_flags(arguments)
    if flags.answer or not flags.overrides:
        raise ConfigError("arguments", " ".join(arguments), "name no recipe", "try +recipe=quickstart, or +sweeps=NAME")
    study = plan_study(arguments, elsewhere=True)
    recipes = [(f"{planned.recipe.name}-{planned.identity.hash8}", planned.recipe) for planned in study.planned]
    folder = Path(*(user_path(recipe.runs) for _, recipe in recipes[:1]), study.name)
    is_kept = study.origin != COMMAND_LINE or SweepFolder(folder).manifest()
    chosen = ProofCandidates(
        title=recipes[0][1].name if study.name == SINGLE else f"{study.name} ({study.origin})",
        candidates=_without_repeats([Candidate(run=run, recipe=recipe) for run, recipe in recipes]),
        folder=folder if is_kept else None,
    )
    for drop in study.dropped:
        chosen.drop(drop.stage, drop.point.label, drop.reason)
    return chosen


def _without_repeats(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The first candidate of each recipe. Its repeats train the same, and so may the sweep's control: omit these."""
    kept: dict[Recipe, Candidate] = {}
    for each in sorted(candidates, key=lambda each: each.recipe.repeat):
        kept.setdefault(replace(each.recipe, name="", repeat=0), each)
    return [each for each in candidates if any(each is one for one in kept.values())]


def heading(chosen: ProofCandidates, what: str, proofs: Sequence[Reduced], steps: int) -> str:
    """The lines printed at the start: the recipes, their small sizes, and the points that the sweep leaves out."""
    sizes, notes, unfit = list[str](), list[str](), list[str]()
    for proof in proofs:
        if (recipe := proof.recipe) is None:
            continue
        account, training = recipe.model.account(), recipe.training
        sizes.append(
            f"reduced to {account.layers} layers of {account.dim}, {account.heads} heads and {account.kv_heads} "
            f"key/value heads, vocabulary {account.vocab_size}, {training.global_batch} sequences of "
            f"{training.seq_len} tokens, {counted(steps, 'step')}"
        )
        notes += [f"on this CPU: {note}" for note in proof.notes]
        if proof.missing:
            axes = ", ".join(proof.missing)
            unfit.append(f"{proof.run}: {axes} did not fit into {proof.layout}; another layout has what is missing")
    shown = list(dict.fromkeys(sizes))
    shown = shown if len(shown) <= 4 else [*shown[:3], f"and {len(shown) - 3} more sizes"]
    lines = [f"{chosen.title}: {counted(len(chosen.candidates), 'recipe')}{what}"]
    lines += [*shown, *dict.fromkeys(notes), *unfit]
    if chosen.left_out:
        reasons = list(dict.fromkeys(reason for _, reason in chosen.left_out))
        more = f", and {len(reasons) - 1} more reasons" if len(reasons) > 1 else ""
        lines.append(f"{counted(len(chosen.left_out), 'point')} left out by the sweep: {reasons[0]}{more}")
    return "\n".join(lines)


def table(rows: Sequence[ProofRow]) -> list[str]:
    """The rows with aligned columns; leaves out names of tensors if the terminal is too narrow."""
    headings = ("", "run", "layout", "precision", "loss", "grad norm", "gradient", "parameter", "tolerance")

    def lines(*, with_names: bool) -> list[str]:
        cells = []
        for row in rows:
            numbers = ["" if number is None else f"{number:.1e}" for number in (row.loss, row.grad_norm)]
            for pair in (row.gradient, row.parameter):
                name = f" {pair[1]}" if pair and with_names else ""
                numbers.append(f"{pair[0]:.1e}{name}" if pair else "")
            limits = row.tolerance.values() if isinstance(row.tolerance, dict) else [row.tolerance]
            tolerance = "/".join(f"{limit:.0e}" for limit in dict.fromkeys(limits) if limit is not None)
            verdict = "PASS" if row.passed else "FAIL"
            cells.append((verdict, row.run, row.layout, row.precision, *numbers, tolerance))
        return aligned(headings, cells, right=headings[4:6] if with_names else headings[4:])

    whole = lines(with_names=True)
    is_narrow = sys.stdout.isatty() and max(map(len, whole)) > shutil.get_terminal_size().columns
    return lines(with_names=False) if is_narrow else whole


def parity_verb(args: Namespace) -> int:
    """Returns 0 if all recipes pass, 1 if one fails, 2 after bad input."""
    rest = args.rest
    if args.steps is not None:
        check_number("--steps", args.steps, MOST_STEPS, PARITY_STEPS)
    if args.processes is not None:
        check_number("--processes", args.processes, 256, MOST_PROCESSES)
    if not rest:
        cure = "try +sweeps=quickstart_layouts, a sweep's name, or two recipes or runs"
        raise ConfigError("arguments", "", "do not say what to prove", cure)
    # Two runs or two recipes; otherwise the arguments are one command line.
    is_pair = len(rest) == 2 and all(is_name(word) or word.lstrip().startswith("+recipe=") for word in rest)
    with Console() as console:
        if is_pair and (runs := _runs(rest, args.runs)) is not None:
            for flag in ("steps", "processes", "only", "inductor"):
                if value := getattr(args, flag):
                    rule = "applies to recipes, which are trained; finished runs are compared as they were logged"
                    raise ConfigError(f"--{flag}", value, rule, "leave it out, or give two recipes")
            return _compare(*runs, args, console)
        if is_pair:
            first, second = map(one_recipe, rest)
            cure = "compare recipes that differ in layout or technique only"
            check_same(first.run, comparable(first.recipe), comparable(second.recipe), cure)
            title = "two recipes" if first != second else "one recipe, given twice"
            chosen = ProofCandidates(title=title, candidates=[first, second] if first != second else [first])
        else:
            chosen = choose(rest, args.runs)
        if args.only:
            chosen.only(args.only)
        return _prove(chosen, args, console)


def _runs(names: Sequence[str], runs: str) -> tuple[RunFolder, RunFolder] | None:
    """The two runs of these names; None if neither is a run."""
    found = dict[str, RunFolder]()
    for name in filter(is_name, names):
        with contextlib.suppress(NoSuchRun):
            found[name] = find_run(name, runs)
    others = [name for name in names if name not in found]
    if not others:
        return found[names[0]], found[names[1]]
    for known in found:
        # A run may have the name of a recipe: then the two arguments may mean two recipes.
        if not (conf_folder() / "recipe" / f"{known}.yaml").is_file():
            rule, cure = f"is not a finished run, and {known} is one", "compare two runs, or two recipes"
            raise ConfigError("run", others[0], rule, cure)
    return None


def _compare(first: RunFolder, second: RunFolder, args: Namespace, console: Console) -> int:
    comparison = compare_runs(first, second)
    row, (loss, norm) = comparison.row, comparison.first
    if args.json:
        values = {
            "reference": first.path.name,
            "compared_steps": comparison.compared,
            "first_step": {"loss": loss, "grad_norm": norm},
            "logged_steps": comparison.logged,
            "rows": [asdict(row)],
            "note": NOT_COMPARED,
        }
        console.note(json_text(values))
        return 0 if row.passed else 1
    console.note(f"{row.run} against {first.path.name}, at equal tokens")
    console.note("\n".join(table([row])))
    console.note(
        f"compared {comparison.compared} of {comparison.logged} logged steps: the largest difference of a loss (at "
        f"{comparison.tokens:,} tokens), the median of the norms; in the first step {loss:.1e} and {norm:.1e}\n"
        f"{NOT_COMPARED}"
    )
    return _verdict([row], console)


def _prove(chosen: ProofCandidates, args: Namespace, console: Console) -> int:
    if not chosen.candidates:
        name, reason = chosen.broken[0]
        raise ConfigError("run", name, reason, "mend it, or prove another")
    folder = Path(tempfile.mkdtemp(prefix="titanlab-parity-"))
    rows: list[ProofRow] = []
    trainer, code = Trainer(), 0
    steps, most = args.steps or PARITY_STEPS, args.processes or MOST_PROCESSES
    say = _silent if args.json else console.note
    try:
        proofs = plan_proofs(chosen.candidates, steps=steps, runs=str(folder), most=most, inductor=args.inductor)
        say(heading(chosen, f", each compared with {REFERENCE}", proofs, steps))
        prepare()
        prover = Prover(trainer)
        for number, proof in enumerate(proofs, 1):
            for row in prover.rows(proof):
                rows.append(row)
                named = _joined("PASS" if row.passed else "FAIL", row.run, row.layout, row.precision)
                say(f"[{number}/{len(proofs)}] {named if row.passed else f'{named}: {row.reason}'}")
        rows += [ProofRow(run=name, layout="", precision="", passed=False, reason=why) for name, why in chosen.broken]
    except KeyboardInterrupt:
        console.error(f"interrupted; {counted(len(rows), 'row')} of {counted(len(chosen.candidates), 'recipe')} done")
        code = OutcomeKind.CANCELLED.exit_code
    finally:
        if not trainer.failed:
            shutil.rmtree(folder, ignore_errors=True)
    values, kept = [asdict(row) for row in rows], None
    if chosen.folder is not None and rows:
        try:
            kept = shown_path(write_parity(chosen.folder, rows, reference=REFERENCE))
        except (OSError, ConfigError) as error:
            console.warn(f"the result is not kept with the sweep: {error}")
    if args.json:
        console.note(json_text({"reference": REFERENCE, "rows": values, "file": kept}))
        return code or (0 if all(row.passed for row in rows) else 1)
    if rows:
        console.note("\n".join(["", *table(rows), ""]))
    if kept:
        console.note(f"kept in {kept}")
    return code or _verdict(rows, console)  # After an interruption, print no PASS: recipes are missing.


class Trainer:
    """Trains the small copies of recipes in forked ranks, and reads their traces. Folders of failed runs stay."""

    failed = False

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


def _silent(text: str) -> None:
    """Print nothing: with --json, standard output has only JSON."""


def _joined(*parts: str) -> str:
    return "  ".join(filter(None, parts))


def _verdict(rows: Sequence[ProofRow], console: Console) -> int:
    failed = [row for row in rows if not row.passed]
    for row in failed:
        console.note(f"{_joined('FAIL', row.run, row.precision)}: {row.reason}")
    runs = counted(len({row.run for row in rows}), "recipe")
    console.note(f"{len({row.run for row in failed})} of {runs} failed" if failed else f"PASS: {runs}")
    return 1 if failed else 0


def rehearse_verb(args: Namespace) -> int:
    """Returns 0 if all recipes are ok, 1 if one failed, 2 after bad input."""
    check_number("--steps", args.steps, MOST_STEPS, STEPS)
    check_number("--processes", args.processes, 256, MOST_PROCESSES)
    if not args.rest:
        cure = "try +sweeps=quickstart_layouts, +recipe=quickstart, or the name of a sweep"
        raise ConfigError("arguments", "", "do not say what to rehearse", cure)
    with Console() as console:
        chosen = choose(args.rest, args.runs)
        if args.only:
            chosen.only(args.only)
        folder = Path(tempfile.mkdtemp(prefix="titanlab-rehearse-")) if args.keep is None else args.keep.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"cannot be made ({error.strerror})"
            raise ConfigError("--keep", args.keep, rule, "give a folder of yours") from error
        if any(folder.iterdir()):
            # Runs of an earlier rehearsal would resume.
            raise ConfigError("--keep", args.keep, "has files already", "give an empty folder, or a new one")
        bad = OutcomeKind.INFEASIBLE.value
        results = [Result(run=name, layout="", state=FAILED, outcome=bad, cause=why) for name, why in chosen.broken]
        try:
            return _rehearse(folder, chosen, results, args, console)
        finally:
            if args.keep is None and not any(result.log for result in results):
                shutil.rmtree(folder, ignore_errors=True)


def _rehearse(folder: Path, chosen: ProofCandidates, results: list[Result], args: Namespace, console: Console) -> int:
    """Rehearse the chosen recipes, with runs in `folder`, and append to `results`. Returns the exit code."""
    rehearsals = reduce_all(
        chosen.candidates, steps=args.steps, runs=str(folder), most=args.processes, inductor=args.inductor, saves=True
    )
    total, code = len(results) + len(rehearsals), 0
    say = _silent if args.json else console.note

    def show(number: int, result: Result) -> None:
        named = _joined(result.state, result.run, result.layout)
        if result.same_as is not None:
            named += f"  the same as {result.same_as}"
        elif result.processes:
            named += f"  {counted(result.processes, 'process', 'processes')}  {result.seconds:.1f} s"
        if result.state == FAILED:
            named += f"  {result.outcome}: {result.cause}"
        say(f"[{number}/{total}] {named}")

    def train(recipe: Any) -> Any:
        ended = train_in_ranks(recipe)
        if args.keep is None and ended.outcome.kind is OutcomeKind.DONE:
            shutil.rmtree(ended.run.path, ignore_errors=True)
        return ended

    say(heading(chosen, "", rehearsals, args.steps))
    for number, result in enumerate(results, 1):
        show(number, result)
    try:
        if any(rehearsal.recipe for rehearsal in rehearsals):
            prepare()
        for result in rehearse(rehearsals, train, lambda ended: str(log_of(ended))):
            results.append(result)
            show(len(results), result)
    except KeyboardInterrupt:
        console.error(f"interrupted; {len(results)} of {counted(total, 'rehearsal')} done")
        code = OutcomeKind.CANCELLED.exit_code
    failed = [result for result in results if result.state == FAILED]
    code = code or (1 if failed else 0)
    if args.json:
        console.note(json_text({"rehearsals": [asdict(result) for result in results], "planned": total}))
        return code
    runs = counted(len({result.run for result in results}), "recipe")
    if failed:
        cells = [(result.state, result.run, result.layout, result.outcome, result.cause) for result in failed]
        lines = ["", *aligned(("", "run", "layout", "outcome", "cause"), cells), ""]
        logs = dict.fromkeys(result.log for result in failed if result.log)
        lines += [f"log of the rank that failed: {shown_path(Path(log))}" for log in logs]
        console.note("\n".join([*lines, f"{len({result.run for result in failed})} of {runs} failed"]))
    elif not code:
        console.note(f"ok: {runs} in {counted(len(results), 'rehearsal')}")
    if args.keep is not None:
        console.note(f"kept in {shown_path(folder)}")
    return code
