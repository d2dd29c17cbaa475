"""`notes="…"`: any text, through every door; shown, sent to trackers, and no part of a run's identity."""

import dataclasses

import pytest

from tests import tiny
from tests.recipe.test_texts import composed, from_file
from tests.sweep.conftest import quiet
from tests.sweep.files import plan, sweep_text, write_sweep
from tests.sweep.studies import SLURM, seeds, study
from titanlab.cli import main
from titanlab.errors import ConfigError
from titanlab.recipe import from_mapping, to_mapping
from titanlab.recipe.next_attempt import overridden
from titanlab.sweep.submit import submit
from titanlab.train.tracking import tracked_run

ODD = "first, [bold]second[/bold]: it's <b>why</b> (see #12)? a=b {x} \\"


FULL = [pytest.param(text, marks=pytest.mark.full) for text in ("12", "'fast' beats 'slow'", '"a" or "b"', "'")]


@pytest.mark.parametrize("text", [ODD, "two\nlines 👩‍💻", *FULL])
def test_notes_are_the_text_as_typed_through_every_door(tmp_path, text):
    assert composed(f"notes={text}").notes == text
    assert overridden(to_mapping(composed()), [f"notes={text}"], file=tmp_path).notes == text
    # A dollar sign in a file is OmegaConf's.
    for typed in (f"notes={text} ${{x}}", f"+notes=\\${{x}} {text}"):
        assert composed(typed).notes == typed.partition("=")[2]
    assert overridden(to_mapping(composed()), [f"notes={text} ${{x}}"], file=tmp_path).notes == f"{text} ${{x}}"
    written = "\n  ".join(["notes: |-", *text.split("\n")])
    assert from_file(tmp_path, "recipe", f"# @package _global_\ndefaults: [quickstart]\n{written}\n").notes == text


def test_quotes_around_notes_are_hydras_and_null_is_none(tmp_path):
    for typed, notes in (("'a, b'", "a, b"), ('"a, b"', "a, b"), ("null", None)):
        assert composed(f"notes={typed}").notes == notes
        assert overridden(to_mapping(composed()), [f"notes={typed}"], file=tmp_path).notes == notes


@pytest.mark.parametrize("text", ["\x1b[31mred", "half \ud83d", "x" * 2001])
def test_what_no_text_is_and_too_much_of_it_are_refused(tmp_path, text):
    recipe = tiny.recipe(tmp_path)
    with pytest.raises(ConfigError, match="notes") as refused:
        dataclasses.replace(recipe, notes=text)
    assert len(str(refused.value).encode(errors="replace")) < 200


def test_runs_with_other_notes_are_the_same_runs():
    arguments = "training.steps=20,30", "data=synthetic"
    bare, noted = plan(*arguments), plan(*arguments, "notes=a, b")
    assert [run.identity for run in noted.planned] == [run.identity for run in bare.planned]
    assert (noted.name, {run.recipe.notes for run in noted.planned}) == (bare.name, {"a, b"})


def test_a_sweeps_file_has_notes_and_its_space_has_none(tmp_path):
    space = {"product": {"training.steps": [20, 30]}}
    arguments = write_sweep(tmp_path, sweep_text(space, base="notes: of the file\n"))
    assert {run.recipe.notes for run in plan(*arguments).planned} == {"of the file"}
    with pytest.raises(ConfigError, match="must have one value for the whole sweep"):
        plan(*write_sweep(tmp_path, sweep_text({"product": {"notes": ["a", "b"]}})))


def noted(runs, notes):
    made = study(runs, seeds(2), launch=SLURM)
    planned = [dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, notes=notes)) for run in made.planned]
    return dataclasses.replace(made, planned=tuple(planned))


def test_recipes_with_notes_of_their_own_give_the_sweep_none(slurm, tmp_path):
    made = noted(tmp_path / "runs", "of one")
    other = dataclasses.replace(made.planned[1], recipe=dataclasses.replace(made.planned[1].recipe, notes="of another"))
    folder = submit(dataclasses.replace(made, planned=(made.planned[0], other)), quiet).folder
    assert folder.notes() == ""
    assert sorted(run.config()["notes"] for run in folder.runs()) == ["of another", "of one"]


def test_a_sweep_shows_the_notes_of_its_latest_submission_and_a_run_its_own(slurm, tmp_path, capsys):
    def shown(*words):
        assert main(list(words)) == 0
        return capsys.readouterr().out

    folder = submit(noted(tmp_path / "runs", ODD), quiet).folder
    again = submit(noted(tmp_path / "runs", "the second look"), quiet)
    assert not again.submissions
    runs = ("--runs", str(tmp_path / "runs"))
    assert shown("status", "layouts", *runs).startswith("layouts · the second look\n")
    assert "  notes: the second look\n" in shown("collect", "layouts", *runs)
    run = folder.runs()[0]
    assert ODD in shown("status", "layouts", run.path.name, *runs)
    assert tracked_run(from_mapping(run.config()), run, attempt=1).notes == ODD
    shown("report", "layouts", *runs)
    assert "the second look" in (folder.path / "layouts.html").read_text()
    submit(noted(tmp_path / "runs", ODD), quiet)
    shown("report", "layouts", *runs)
    page = (folder.path / "layouts.html").read_text()
    assert "[bold]second[/bold]" in page
    assert "<b>why" not in page
