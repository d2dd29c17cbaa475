"""What a plan prints of its recipes."""

from __future__ import annotations

from tests.plan.layouts import planned, ranking_of
from titanlab.costs import Layout
from titanlab.plan.search import overrides
from titanlab.plan.space import choices_of
from titanlab.techniques.ac.recomputation_schema import SelectiveLayer
from titanlab.techniques.schedule.published_schema import Interleaved1F1B


def printed(recipe, *, pipeline, ac, schedule):
    """The arguments of the first recipe of the space with these choices."""
    ranking = ranking_of(recipe)
    layout = next(layout for layout in ranking.space.layouts() if layout.pipeline == pipeline)
    points = ranking.space.points(layout)
    point = next(one for one in points if (one.ac.name, one.schedule.name) == (ac, schedule))
    return overrides(ranking.estimate(point), recipe)


def test_options_have_their_numbers_also_those_that_are_defaults():
    """The recipe of the request has every=4 and four stages, and keeps them unless they are said."""
    recipe = planned(ac=SelectiveLayer(every=4), schedule=Interleaved1F1B(stages_per_rank=4))
    arguments = printed(recipe, pipeline=2, ac="selective_layer", schedule="interleaved_1f1b ×2")
    assert {"ac=selective_layer", "ac.every=2", "ac.keep=false"} < set(arguments)
    assert {"schedule=interleaved_1f1b", "schedule.stages_per_rank=2"} < set(arguments)


def test_a_layout_without_a_pipeline_needs_no_schedule():
    arguments = printed(planned(), pipeline=1, ac="none", schedule="")
    assert "ac=none" in arguments
    assert not [one for one in arguments if one.startswith("schedule")]


def test_what_varies_is_said_if_it_is_not_the_requests():
    recipe = planned()
    choices = choices_of(recipe, vary=("precision", "compile"))
    ranking = ranking_of(recipe, precisions=choices.precisions, compiles=choices.compiles)
    points = {(one.precision.name, one.compile.name): one for one in ranking.space.points(Layout(shard=8))}
    own = overrides(ranking.estimate(points["bf16", "off"]), recipe)
    assert not [one for one in own if one.startswith(("precision", "compile"))]
    other = overrides(ranking.estimate(points["float8_rowwise", "block+loss"]), recipe)
    assert {"precision=float8_rowwise", "compile.blocks=true", "compile.loss=true", "compile.mode=default"} < set(other)
