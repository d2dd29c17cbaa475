"""`titanlab combinations …`: which techniques go together, which row proves it, and which rule refuses them."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from titanlab.cli.arguments import json_text
from titanlab.sweep.combinations import EITHER, INCLUDED, PROVEN, REFUSED, WORKS, Answer, Combinations, Row
from titanlab.system import Console, aligned

# Keys that say where and on what the techniques are combined.
_WHERE = ("cluster", "model", "training", "world")
_MARKS = {PROVEN: "P", WORKS: "w", REFUSED: "X", INCLUDED: "=", EITHER: "|"}
_LEGEND = {
    PROVEN: "works, and a row of docs/parity.md or docs/techniques.md holds it to one process",
    WORKS: "works: no rule refuses it",
    REFUSED: "refused, by the rule below",
    INCLUDED: "one of the two has the other in it",
    EITHER: "one or the other: both set the same key",
}


def combinations_verb(args: Namespace) -> int:
    """Returns 0; 1 if what was asked about is refused."""
    where = [word for word in args.rest if word.startswith("-") or word.partition("=")[0].split(".")[0] in _WHERE]
    asked = [word for word in args.rest if word not in where]
    with Console() as console:
        combinations = Combinations(where)
        point = combinations.point(asked)
        if len(asked) > 1:
            answer = combinations.ask(point)
            pairs = list(combinations.proven_pairs(point)) if answer.verdict == WORKS else []
            lines, values = _one(answer, pairs), {"combination": asked, **_values(answer)}
            code = int(answer.verdict == REFUSED)
        elif asked:
            answers = {other: combinations.pair(point, given) for other, given in combinations.techniques.items()}
            lines = aligned(("with", "answer", "why"), [(name, *_cells(each)) for name, each in answers.items()])
            values = {"technique": asked[0], "with": {name: _values(each) for name, each in answers.items()}}
            code = 0
        else:
            table = combinations.table()
            lines, code = _matrix(list(combinations.techniques), table), 0
            values = {"pairs": [{"pair": pair, **_values(each)} for pair, each in table.items()]}
        console.note(json_text(values) if args.json else "\n".join(lines))
    return code


def _place(row: Row) -> str:
    return f"row {row.number} of docs/{row.page}"


def _cells(answer: Answer) -> tuple[str, str]:
    why = str(answer.refusal) if answer.refusal else _place(answer.row) if answer.row else ""
    return answer.verdict, why or (_LEGEND[answer.verdict] if answer.verdict in (INCLUDED, EITHER) else "")


def _values(answer: Answer) -> dict[str, Any]:
    row = None if answer.row is None else {"page": f"docs/{answer.row.page}", "row": answer.row.number}
    return {"answer": answer.verdict, "row": row, "rule": None if answer.refusal is None else str(answer.refusal)}


def _one(answer: Answer, pairs: Sequence[tuple[str, str, Row | None]]) -> list[str]:
    if answer.refusal is not None:
        return [f"refused: {answer.refusal}"]
    if answer.row is not None:
        return [f"works, proven by {_place(answer.row)}"]
    rows = [(f"{one} × {other}", "no row" if row is None else _place(row)) for one, other, row in pairs]
    if len(rows) < 2:
        return ["works: no rule refuses it; no row proves it"]
    return ["works: no rule refuses it; no row has all of it, but pair by pair:", *aligned(("pair", "proven by"), rows)]


def _matrix(names: Sequence[str], table: Mapping[tuple[str, str], Answer]) -> list[str]:
    """The lower half of the table of all pairs, its legend and the rules that refuse."""

    def lines() -> Iterator[str]:
        width = max(map(len, names))
        for number, name in enumerate(names, 1):
            marks = " ".join(f" {_MARKS[table[name, other].verdict]}" for other in names[: number - 1])
            yield f"{number:>2} {name:<{width}} {marks}".rstrip()
        yield f"   {'':<{width}} {' '.join(f'{number:>2}' for number in range(1, len(names)))}"
        yield ""
        yield from (f"{mark}  {_LEGEND[verdict]}" for verdict, mark in _MARKS.items())
        yield ""
        refused = sorted(
            (str(answer.refusal), f"{one} × {other}") for (one, other), answer in table.items() if answer.refusal
        )
        for rule, pairs in itertools.groupby(refused, key=lambda each: each[0]):
            yield f"{', '.join(pair for _, pair in pairs)}: {rule}"

    return list(lines())
