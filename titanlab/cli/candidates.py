"""The recipes that `titanlab parity` and `titanlab rehearse` take, and the texts that both print."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.prove import Candidate, ProofRow, Reduced
from titanlab.recipe import check_unedited, conf_folder, from_mapping, read_flags, resolve
from titanlab.sweep import COMMAND_LINE, SINGLE, SweepFolder, aligned, open_sweep, plan_study
from titanlab.system import counted, user_path

# Stages of a plan at which a recipe breaks a rule; at other stages the sweep leaves it out on purpose.
BROKEN = ("layout", "composition", "rule")


@dataclass(kw_only=True)
class ProofCandidates:
    """Recipes, and where their results are kept.

    Attributes:
        title: the sweep or the recipe.
        broken: runs that break a rule in their real size, each with the rule.
        left_out: points that the sweep leaves out on purpose, each with the reason.
        folder: of the sweep; None: the recipes do not belong to a sweep.
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


def choose(arguments: Sequence[str], runs: str) -> ProofCandidates:
    """The recipes of overrides, of a recipe's or a sweep's name, or of a sweep that was submitted."""
    if len(arguments) == 1 and is_name(arguments[0]):
        (name,) = arguments
        try:
            return _of_folder(open_sweep(name, runs))
        except ConfigError as error:
            return _of_command_line([override_of(name, error)])
    if arguments and is_name(arguments[0]):
        unknown = ConfigError("recipe", arguments[0], "is no recipe and no sweep of conf", "try +recipe=quickstart")
        arguments = [override_of(arguments[0], unknown), *arguments[1:]]
    return _of_command_line(arguments)


def is_name(argument: str) -> bool:
    """Whether an argument is a name or the path of a folder, not an override or flag."""
    if os.sep in argument and not argument.startswith("+") and user_path(argument).is_dir():
        return True  # A path may contain spaces and equals signs.
    return "=" not in argument and not argument.startswith(("-", "+", "~")) and " " not in argument.strip()


def is_recipe(name: str) -> bool:
    return (conf_folder() / "recipe" / f"{name}.yaml").is_file()


def override_of(name: str, error: ConfigError) -> str:
    """The override for the name of a recipe or a sweep of `conf`; raises the error if there is none."""
    if is_recipe(name):
        return f"+recipe={name}"
    if (conf_folder() / "sweeps" / f"{name}.yaml").is_file():
        return f"+sweeps={name}"
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
    candidates, names = [], set()
    root = Path()
    for planned in study.planned:
        name = f"{planned.recipe.name}-{planned.identity.hash8}"
        names.add(name)
        candidates.append(Candidate(run=name, recipe=planned.recipe))
        root = user_path(planned.recipe.runs)
    folder = root / study.name
    is_kept = study.origin != COMMAND_LINE or SweepFolder(folder).manifest()
    broken = [(drop.point.label, drop.reason) for drop in study.dropped if drop.stage in BROKEN]
    left_out = [(drop.point.label, drop.reason) for drop in study.dropped if drop.stage not in BROKEN]
    named = f"{study.name} ({study.origin})"
    return ProofCandidates(
        title=study.planned[0].recipe.name if study.name == SINGLE else named,
        candidates=candidates,
        broken=broken,
        left_out=left_out,
        folder=folder if is_kept else None,
    )


def _of_folder(sweep: SweepFolder) -> ProofCandidates:
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
    for row in sweep.points():
        dropped = row.get("dropped")
        if isinstance(dropped, dict):
            label = ", ".join(f"{key}={value}" for key, value in row["point"].items())
            target = chosen.broken if dropped.get("stage") in BROKEN else chosen.left_out
            target.append((label, str(dropped.get("reason"))))
    return chosen


_HEADINGS = ("", "run", "layout", "precision", "loss", "grad norm", "gradient", "parameter", "tolerance")


def left_out_lines(chosen: ProofCandidates) -> list[str]:
    if not chosen.left_out:
        return []
    reasons = list(dict.fromkeys(reason for _, reason in chosen.left_out))
    more = f", and {len(reasons) - 1} more reasons" if len(reasons) > 1 else ""
    return [f"{counted(len(chosen.left_out), 'point')} left out by the sweep: {reasons[0]}{more}"]


def sizes_and_notes(proofs: Sequence[Reduced], steps: int) -> list[str]:
    sizes: dict[str, None] = {}
    notes: dict[str, None] = {}
    unfit: list[str] = []
    for proof in proofs:
        recipe = proof.recipe
        if recipe is None:
            continue
        account, training = recipe.model.account(), recipe.training
        sizes[
            f"reduced to {account.layers} layers of {account.dim}, {account.heads} heads and {account.kv_heads} "
            f"key/value heads, vocabulary {account.vocab_size}, {training.global_batch} sequences of "
            f"{training.seq_len} tokens, {counted(steps, 'step')}"
        ] = None
        notes.update(dict.fromkeys(proof.notes))
        if proof.missing:
            axes = ", ".join(proof.missing)
            unfit.append(f"{proof.run}: {axes} did not fit into {proof.layout}; another layout has what is missing")
    shown = list(sizes)
    lines = shown if len(shown) <= 4 else [*shown[:3], f"and {len(shown) - 3} more sizes"]
    return [*lines, *(f"on this CPU: {note}" for note in notes), *unfit]


def table(rows: Sequence[ProofRow]) -> list[str]:
    """The rows with aligned columns; leaves out names of tensors if the terminal is too narrow."""

    def lines(*, with_names: bool) -> list[str]:
        figures = _HEADINGS[4:6] if with_names else _HEADINGS[4:]
        return aligned(_HEADINGS, [_cells(row, with_names=with_names) for row in rows], right=figures)

    whole = lines(with_names=True)
    is_narrow = sys.stdout.isatty() and max(map(len, whole)) > shutil.get_terminal_size().columns
    return lines(with_names=False) if is_narrow else whole


def _cells(row: ProofRow, *, with_names: bool) -> tuple[str, ...]:
    numbers = ["" if number is None else f"{number:.1e}" for number in (row.loss, row.grad_norm)]
    tensors = [
        f"{pair[0]:.1e}" + (f" {pair[1]}" if with_names else "") if pair else ""
        for pair in (row.gradient, row.parameter)
    ]
    limits = row.tolerance.values() if isinstance(row.tolerance, dict) else [row.tolerance]
    tolerance = "/".join(f"{limit:.0e}" for limit in dict.fromkeys(limits) if limit is not None)
    return ("PASS" if row.passed else "FAIL", row.run, row.layout, row.precision, *numbers, *tensors, tolerance)
