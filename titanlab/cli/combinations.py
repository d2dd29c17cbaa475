"""`titanlab combinations …`: which techniques go together, which row proves it, and which rule refuses them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from titanlab.cli.arguments import json_text
from titanlab.recipe import read_flags
from titanlab.sweep.combinations import REFUSED, VERDICTS, WORKS, Answer, Combinations
from titanlab.system import Console, aligned

# Keys that set the small recipe's machine, model and sizes: they are not techniques.
_WHERE = ("cluster", "model", "world", "training.seq_len", "training.global_batch")


def combinations_verb(args: Namespace) -> int:
    """Returns 0; 1 if what was asked about is refused."""
    flags = read_flags(args.rest)
    where = [
        word for word in flags.overrides if word.startswith(("cluster.", "model.")) or word.partition("=")[0] in _WHERE
    ]
    asked = [word for word in flags.overrides if word not in where]
    with Console() as console:
        combinations = Combinations([*flags.flags, *where])
        point = combinations.point(asked)
        values: dict[str, Any]
        code = 0
        if len(asked) > 1:
            answer = combinations.ask(point)
            lines, values = [f"{answer.verdict}: {_why(answer)}"], vars(answer)
            code = int(answer.verdict == REFUSED)
            pairs = combinations.proven_pairs(point) if answer.verdict == WORKS else []
            lines += aligned(("pair by pair", "proven by"), pairs) if len(pairs) > 1 else []
        elif asked:
            answers = {name: combinations.pair(point, given) for name, given in combinations.techniques.items()}
            rows = [(name, answer.verdict, _why(answer)) for name, answer in answers.items()]
            lines = aligned(("with", "answer", "why"), rows)
            values = {name: vars(answer) for name, answer in answers.items()}
        else:
            table = combinations.table()
            lines = _matrix(list(combinations.techniques), table)
            values = {" × ".join(pair): vars(answer) for pair, answer in table.items()}
        console.note(json_text(values) if args.json else "\n".join(lines))
    return code


def _why(answer: Answer) -> str:
    return answer.why or VERDICTS[answer.verdict][1]


def _matrix(names: Sequence[str], table: Mapping[tuple[str, str], Answer]) -> list[str]:
    """The lower half of the table of all pairs, its legend, and the pairs that a rule refuses."""
    width = max(map(len, names))
    lines = []
    for number, name in enumerate(names, 1):
        marks = "".join(f"  {VERDICTS[table[name, other].verdict][0]}" for other in names[: number - 1])
        lines.append(f"{number:>2} {name:<{width}}{marks}".rstrip())
    lines += [f"{'':{width + 4}}{' '.join(f'{number:>2}' for number in range(1, len(names)))}", ""]
    lines += [f"{mark}  {verdict}: {meaning}" for verdict, (mark, meaning) in VERDICTS.items()]
    refused = {pair: answer.why for pair, answer in table.items() if answer.verdict == REFUSED}
    return [*lines, "", *(f"{one} × {other}: {why}" for (one, other), why in refused.items())]
