"""The options that a space varies: the recipe's own first, each once."""

import pytest

from tests.plan.layouts import planned
from titanlab.errors import ConfigError
from titanlab.options import discover
from titanlab.plan.space import VARIED, choices_of
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.precision.cast_schema import Fp16, Fp32
from titanlab.techniques.schedule.published_schema import GPipe


def names(choices):
    return [choice.name for choice in choices]


def test_the_recipes_own_option_comes_first():
    choices = choices_of(planned(schedule=GPipe(), precision=Fp32()), vary=VARIED)
    assert (names(choices.schedules)[0], names(choices.precisions)[0]) == ("gpipe", "fp32")
    assert choices.schedules[0].value == GPipe()
    assert choices.acs[0].value == NoCheckpointing()


def test_each_option_is_there_once():
    choices = choices_of(planned(), vary=VARIED)
    for each in (choices.schedules, choices.acs, choices.precisions, choices.compiles):
        assert len(set(names(each))) == len(each)
        assert len({repr(choice.value) for choice in each}) == len(each)


def test_schedules_and_checkpointing_always_vary_and_the_rest_on_demand():
    choices = choices_of(planned())
    kinds = {choice.value.kind for choice in choices.schedules}
    assert {"1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zbv", "dualpipe_v"} <= kinds
    # A schedule of a file needs a value from a person.
    assert kinds < {option.kind for option in discover()["schedule"].values()}
    assert (names(choices.precisions), names(choices.compiles)) == (["bf16"], ["off"])


def test_a_schedule_with_several_stages_of_a_rank_says_how_many():
    found = names(choices_of(planned()).schedules)
    assert {"1f1b", "zbv ×2", "interleaved_1f1b ×2", "interleaved_1f1b ×4"} <= set(found)


def test_a_policy_that_a_compiler_chooses_is_not_estimated():
    choices = choices_of(planned())
    assert "none" in names(choices.acs)
    assert all(choice.value.compiler_budget() is None for choice in choices.acs)
    assert "memory_budget" not in {choice.value.kind for choice in choices.acs}
    assert "memory_budget" in {option.kind for option in discover()["ac"].values()}


def test_fields_that_are_not_at_their_default_are_named():
    choices = choices_of(planned(precision=Fp16(init_scale=8.0, dynamic=False)), vary=("precision",))
    assert names(choices.precisions)[0] == "fp16 init_scale=8.0 dynamic=false"
    # The default is another choice.
    assert "fp16" in names(choices.precisions)[1:]


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (Compile(), ["off", "block+loss"]),
        (Compile(blocks=True), ["block", "off", "block+loss"]),
        (Compile(loss=True), ["loss", "off", "block+loss"]),
        (Compile(blocks=True, loss=True), ["block+loss", "off"]),
    ],
)
def test_compilation_varies_between_nothing_and_all(own, found):
    assert names(choices_of(planned(compile=own), vary=("compile",)).compiles) == found
    assert names(choices_of(planned(compile=own)).compiles) == found[:1]


def test_a_recipes_own_choices_come_first_and_once():
    choices = choices_of(planned())
    assert next(choice.name for choice in choices.acs) == "none"
    assert len({choice.name for choice in choices.acs}) == len(choices.acs)
    assert [choice.name for choice in choices.precisions] == ["bf16"]
    assert len(choices_of(planned(), vary=("precision", "compile")).precisions) > 3


@pytest.mark.parametrize("name", ["optimizer", "", "Precision"])
def test_other_groups_do_not_vary(name):
    with pytest.raises(ConfigError, match="--vary"):
        choices_of(planned(), vary=(name,))
