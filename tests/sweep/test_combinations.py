"""`titanlab combinations` and docs/combinations.md agree with what training refuses, and with what it really trains."""

from __future__ import annotations

import dataclasses
import os
import random
import re
from pathlib import Path

import pytest

from tests import tiny
from titanlab.cli import main
from titanlab.recipe import conf_folder
from titanlab.sweep.combinations import EITHER, INCLUDED, PROVEN, REFUSED, WORKS, Combinations, features, rows

PAGE = Path(__file__).parents[2] / "docs" / "combinations.md"
# Parts of the page: heading, and the first technique that is under it.
HEADINGS = {
    "Layouts": "ddp",
    "What goes with a layout": "cpu_offload",
    "Pipeline schedules": "schedule=1f1b",
    "Precisions": "precision=bf16",
    "Activation checkpointing": "ac=full",
    "Optimizers": "optimizer=adamw_4bit",
}
# Small, and so that the pool need not wait: nothing here is about sizes.
HERE = ("cluster=cpu", "compile.backend=aot_eager", "model.dim=64", "model.ffn_dim=192", "training.seq_len=64")


@pytest.fixture(scope="module")
def combinations():
    return Combinations()


@pytest.fixture(scope="module")
def here():
    return Combinations(HERE)


def pairs_of(combinations, count, seed):
    names = list(combinations.techniques)
    pairs = [(one, other) for place, one in enumerate(names) for other in names[:place]]
    return random.Random(seed).sample(pairs, count)


def agree(here, pair, pool, folder, capsys):
    """The answer for a pair is what `titanlab train` says or does."""
    points = [here.techniques[name] for name in pair]
    answer = here.pair(*points)
    if answer.verdict in (EITHER, INCLUDED):
        return
    both = {key: value for point in points for key, value in point.items()}
    if answer.verdict == REFUSED:
        degrees = {key.partition(".")[2]: value for key, value in both.items() if key.startswith("parallelism.")}
        data = degrees.get("replicate", 1) * degrees.get("shard", 1) * degrees.get("pipeline", 1)
        given = [f"{key}={str(value).lower()}" for key, value in both.items()]
        base = ["data=synthetic", "checkpoint=off", "training.steps=2", "model.layers=4", *HERE]
        assert main(["train", *base, f"training.global_batch={4 * data}", *given, f"runs={folder}"]) == 2
        assert capsys.readouterr().err.strip() == f"error: {answer.why}"
        return
    recipe = dataclasses.replace(here.recipe(both), runs=str(folder), name="-".join(pair).replace("=", "_"))
    pool.run(recipe.world, tiny.as_rank, recipe, tiny.begin(recipe), limit_seconds=500)


def test_a_technique_of_the_users_own_is_asked_about(tmp_path, capsys):
    (tmp_path / "precision").mkdir()
    text = (conf_folder() / "precision" / "bf16.yaml").read_text()
    (tmp_path / "precision" / "mine.yaml").write_text(text)
    assert main(["combinations", "fsdp", "--config-dir", str(tmp_path), "precision=mine"]) == 0
    assert capsys.readouterr().out.startswith("proven: ")


def test_what_is_said_of_a_pair_is_what_training_does(here, pool, tmp_path, capsys):
    pairs = [
        ("reduce_each", "schedule=zbv"),
        ("loss_chunk", "tp_without_loss_parallel"),
        ("optimizer=muon", "ep"),
        ("precision=float8_tensorwise", "cpu_offload"),
        ("async_tp", "fsdp"),
        ("precision=bf16", "cp"),
        ("document_mask", "cp"),
    ]
    # One that a rule refuses, and one that trains; tests with the mark `full` try 200.
    for pair in (pairs[0], pairs[-1]):
        agree(here, pair, pool, tmp_path, capsys)
    assert [here.pair(*(here.techniques[name] for name in pair)).verdict for pair in pairs] == [
        *[REFUSED] * 5,
        PROVEN,
        WORKS,
    ]


@pytest.mark.full
@pytest.mark.parametrize("tenth", range(20))
def test_two_hundred_random_pairs_are_refused_or_train(here, pool, tmp_path, capsys, tenth):
    for pair in pairs_of(here, 200, seed=34)[10 * tenth : 10 * tenth + 10]:
        agree(here, pair, pool, tmp_path, capsys)


def test_every_option_of_the_groups_is_a_technique(combinations):
    """Otherwise a new option would be missing on the page."""
    for group, own in {"schedule": "csv", "precision": "fp32", "ac": "none", "optimizer": "adamw"}.items():
        options = {path.stem for path in (conf_folder() / group).glob("*.yaml")} - {own}
        assert {name for name in combinations.techniques if name.startswith(f"{group}=")} == {
            f"{group}={option}" for option in options
        }


def test_a_row_proves_what_its_recipe_combines():
    """A row is read from the page; what it says is what the recipe of the test that writes the row has."""
    from tests.prove.parity_rows import ROWS as LAYOUTS
    from tests.prove.technique_rows import ROWS as TECHNIQUES

    read = {(row.page, row.number): row.features for row in rows()}
    assert len(read) == len(LAYOUTS) + len(TECHNIQUES)
    for page, all_of in {"parity.md": LAYOUTS, "techniques.md": TECHNIQUES}.items():
        for number, row in enumerate(all_of, 1):
            made = tiny.recipe("runs", **row.recipe_keys())
            trained = {each for each in features(made) if not each.startswith(("data.", "model.attention"))}
            said = {each for each in read[page, number] if not each.startswith("data.")}
            assert said <= trained, (page, number)


@pytest.mark.full
def test_the_page_shows_all_pairs(combinations):
    text, written = PAGE.read_text(), page(PAGE.read_text(), combinations)
    if os.environ.get("TITANLAB_WRITE_PARITY") == "1":
        PAGE.write_text(written)
        text = written
    assert text == written, "TITANLAB_WRITE_PARITY=1 writes the page"


def page(text, combinations):
    table, names = combinations.table(), list(combinations.techniques)
    rules = list(dict.fromkeys(answer.why for answer in table.values() if answer.verdict == REFUSED))
    starts = [names.index(name) for name in HEADINGS.values()]

    def cell(one, other):
        answer = table.get((one, other)) or table.get((other, one))
        if answer is None or answer.verdict in (INCLUDED, EITHER):
            return {INCLUDED: "=", EITHER: "or"}[answer.verdict] if answer else ""
        if answer.verdict == PROVEN:
            number, name = re.fullmatch(r"row (\d+) of docs/(.*)", answer.why).groups()
            return f"[{'L' if name == 'parity.md' else 'T'}{number}]({name})"
        return "yes" if answer.verdict == WORKS else f"[**no** {rules.index(answer.why) + 1}](#why-not)"

    lines = []
    for heading, start, end in zip(HEADINGS, starts, [*starts[1:], len(names)], strict=True):
        columns = names[start:end]
        shown = [f"`{name.rpartition('=')[2]}`" for name in columns]
        lines += ["", f"### {heading}", "", f"| | {' | '.join(shown)} |", "|---" * (len(columns) + 1) + "|"]
        for row in names[start:]:
            place = columns.index(row) if row in columns else len(columns)
            cells = [cell(row, column) if number < place else "" for number, column in enumerate(columns)]
            if any(cells):
                lines.append(f"| `{row}` | {' | '.join(cells)} |")
    why = [f"{number}. `{rule}`" for number, rule in enumerate(rules, 1)]
    for mark, block in (("table", [*lines[1:], ""]), ("rules", ["", *why, ""])):
        text = re.sub(
            f"(<!-- {mark} -->\n).*?(<!-- {mark} end -->)",
            lambda found, block=block: found[1] + "\n".join(block) + "\n" + found[2],
            text,
            flags=re.DOTALL,
        )
    return text
