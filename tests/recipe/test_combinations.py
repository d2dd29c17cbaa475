"""Lists of options: on the command line, in a recipe's file, in a sweep and in a frozen recipe."""

import pytest

from titanlab.cli.compose import compose
from titanlab.recipe import to_mapping
from titanlab.recipe.next_attempt import overridden

TINY = "model=llama_2m data=synthetic"


def test_on_the_command_line():
    given = f"{TINY} tracker=[wandb,tensorboard] tracker.wandb.project=mine tracker.tensorboard.flush_seconds=3"
    (recipe,) = compose(given.split())
    assert (recipe.tracker.kind, recipe.tracker.wandb.project) == ("wandb+tensorboard", "mine")
    assert recipe.tracker.tensorboard.flush_seconds == 3
    # One option has its keys where it always had them.
    for one in ("tracker=wandb", "tracker=[wandb]"):
        (recipe,) = compose(f"{TINY} {one} tracker.project=mine".split())
        assert (recipe.tracker.kind, recipe.tracker.project) == ("wandb", "mine")


@pytest.fixture
def own(tmp_path):
    """A folder of options of the user's own."""
    for group in ("recipe", "sweeps", "tracker"):
        (tmp_path / group).mkdir()
    (tmp_path / "tracker" / "mine.yaml").write_text("defaults: [wandb_schema, _self_]\nproject: mine\n")
    top = "# @package _global_\ndefaults:\n  - override /model: llama_2m\n  - override /data: synthetic\n"
    (tmp_path / "recipe" / "two.yaml").write_text(
        f"{top}  - override /tracker: [mine, tensorboard]\ntracker: {{tensorboard: {{flush_seconds: 2}}}}\n"
    )
    (tmp_path / "sweeps" / "two.yaml").write_text(
        f"{top}  - override /hydra/sweeper: space\n  - override /tracker: [wandb, tensorboard]\n"
        "hydra:\n  mode: MULTIRUN\n  sweeper:\n    space:\n      product: {seed: [0, 1]}\n"
    )
    return tmp_path


def test_in_files(own):
    (recipe,) = compose(["--config-dir", str(own), "+recipe=two", "tracker.mine.entity=us"])
    parts = recipe.tracker.parts()
    assert {name: part.kind for name, part in parts.items()} == {"mine": "wandb", "tensorboard": "tensorboard"}
    assert (parts["mine"].project, parts["mine"].entity, parts["tensorboard"].flush_seconds) == ("mine", "us", 2)
    # A frozen recipe takes keys too, as `titanlab resume` gives them.
    again = overridden(to_mapping(recipe), ["tracker.mine.mode=offline"], file=own)
    assert (again.tracker.mine.mode, again.tracker.kind) == ("offline", "mine+tensorboard")


def test_in_sweeps(own):
    recipes = compose(["--config-dir", str(own), "+sweeps=two", "tracker.wandb.project=ours"])
    assert [(one.seed, one.tracker.kind, one.tracker.wandb.project) for one in recipes] == [
        (0, "wandb+tensorboard", "ours"),
        (1, "wandb+tensorboard", "ours"),
    ]
    recipes = compose([*TINY.split(), "-m", "tracker=[wandb,tensorboard],jsonl"])
    assert [one.tracker.kind for one in recipes] == ["wandb+tensorboard", "jsonl"]
