"""Which checkpoints of a run can go, by the rules of its recipe, and which always stay."""

import pytest

from tests.checkpoint.test_contents import made as saved
from tests.sweep.made import Made, begin, end
from titanlab.sweep.clean import removable


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints of steps 2, 4, 6 and 8, which has not ended; its recipe keeps two."""
    made = Made(tmp_path / "runs").run("a", keep=2)
    begin(made)
    made.checkpoints.mkdir(exist_ok=True)
    for step in (2, 4, 6, 8):
        saved(made.checkpoints, step)
    return made


def rules(run, **given):
    path = run.path / "config.yaml"
    text = path.read_text()
    for key, value in given.items():
        before = {"keep": "keep: 2", "keep_every": "keep_every: 0"}[key]
        assert before in text
        text = text.replace(before, f"{key}: {value}")
    path.write_text(text)


def goes(run, *, keep=None, named=()):
    return [row.step for row in removable(run, run.checkpoints, keep=keep, verifies=False, named=named)]


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        ({"keep": 1}, [2, 4, 6]),
        # Zero: all of them.
        ({"keep": 0}, []),
        ({"keep_every": 4}, [2]),
        ({"keep": 1, "keep_every": 100}, [2, 4, 6]),
        # No number of a recipe.
        ({"keep": "x"}, []),
        ({"keep_every": "yes"}, [2, 4]),
    ],
)
def test_rules_of_the_recipe(run, given, gone):
    rules(run, **given)
    assert goes(run) == gone


@pytest.mark.parametrize(("keep", "gone"), [(1, [2, 4, 6]), (3, [2]), (99, [])])
def test_a_number_that_is_asked_for_goes_before_the_recipes(run, keep, gone):
    assert goes(run, keep=keep) == gone
    rules(run, keep=0)
    assert goes(run, keep=keep) == gone


@pytest.mark.parametrize(
    ("kind", "keep", "gone"),
    [("done", 2, [2, 4, 6]), ("done", 0, []), ("crash", 2, [2, 4]), ("preempted", 2, [2, 4])],
)
def test_of_a_run_that_is_done_one_stays(run, kind, keep, gone):
    rules(run, keep=keep)
    end(run, kind)
    assert goes(run) == gone


@pytest.mark.parametrize(
    ("named", "gone"),
    [
        ("checkpoints/step-00000002", [4]),
        # A name with which another one only begins.
        ("checkpoints/step-0000000", [2, 4]),
        # The folder of checkpoints, or the run.
        ("checkpoints/", []),
    ],
)
def test_those_from_which_other_runs_start_stay(run, named, gone):
    assert goes(run, named=["s3://bucket/elsewhere", f"{run.path.resolve()}/{named}"]) == gone
