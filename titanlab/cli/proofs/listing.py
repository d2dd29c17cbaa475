"""Texts of proofs and rehearsals: sizes, notes and tables."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from titanlab.cli.proofs.candidates import Chosen
from titanlab.parity.proof import Row
from titanlab.sweep.listing import aligned
from titanlab.system.text import counted

_HEADINGS = ("", "run", "layout", "precision", "loss", "grad norm", "gradient", "parameter", "tolerance")


def left_out_lines(chosen: Chosen) -> list[str]:
    """A line about the points that a sweep leaves out on purpose."""
    if not chosen.left_out:
        return []
    reasons = list(dict.fromkeys(reason for _, reason in chosen.left_out))
    more = f", and {len(reasons) - 1} more reasons" if len(reasons) > 1 else ""
    return [f"{counted(len(chosen.left_out), 'point')} left out by the sweep: {reasons[0]}{more}"]


def sizes_and_notes(proofs: Sequence[Any], steps: int) -> list[str]:
    """Lines about the reduced sizes, and about what is not as in the originals."""
    sizes: dict[str, None] = {}
    notes: dict[str, None] = {}
    unfit: list[str] = []
    for proof in proofs:
        recipe = proof.reduced.recipe
        account, training = recipe.model.account(), recipe.training
        sizes[
            f"reduced to {account.layers} layers of {account.dim}, {account.heads} heads and {account.kv_heads} "
            f"key/value heads, vocabulary {account.vocab_size}, {training.global_batch} sequences of "
            f"{training.seq_len} tokens, {counted(steps, 'step')}"
        ] = None
        notes.update(dict.fromkeys(proof.reduced.notes))
        if proof.missing:
            axes = ", ".join(proof.missing)
            unfit.append(f"{proof.run}: {axes} did not fit into {proof.layout}; another layout has what is missing")
    shown = list(sizes)
    lines = shown if len(shown) <= 4 else [*shown[:3], f"and {len(shown) - 3} more sizes"]
    return [*lines, *(f"on this CPU: {note}" for note in notes), *unfit]


def table(rows: Sequence[Row]) -> list[str]:
    """The rows with aligned columns; without the names of tensors where a terminal is too narrow for them."""
    lines = _aligned(rows, with_names=True)
    if sys.stdout.isatty() and max(map(len, lines)) > shutil.get_terminal_size().columns:
        return _aligned(rows, with_names=False)
    return lines


def _aligned(rows: Sequence[Row], *, with_names: bool) -> list[str]:
    cells = [_cells(row, with_names=with_names) for row in rows]
    figures = _HEADINGS[4:6] if with_names else _HEADINGS[4:]
    return aligned(_HEADINGS, cells, right=figures)


def _cells(row: Row, *, with_names: bool) -> tuple[str, ...]:
    return (
        "PASS" if row.passed else "FAIL",
        row.run,
        row.layout,
        row.precision,
        _figure(row.loss),
        _figure(row.grad_norm),
        *(
            _figure(pair[0]) + (f" {pair[1]}" if with_names else "") if pair else ""
            for pair in (row.gradient, row.parameter)
        ),
        _tolerance(row),
    )


def _tolerance(row: Row) -> str:
    if row.tolerance is None:
        return ""
    if not isinstance(row.tolerance, dict):
        return f"{row.tolerance:.0e}"
    return "/".join(f"{number:.0e}" for number in dict.fromkeys(row.tolerance.values()))


def _figure(number: float | None) -> str:
    return "" if number is None else f"{number:.1e}"
