"""The recipes of a sweep, compared: what is one recipe, what is shown of it, and its name."""

import pytest

from tests.sweep.made import begin, end, train
from tests.sweep.table.plain import row
from titanlab.sweep import RecipeRuns, SweepTable, comparison, groups


def test_recipes_are_compared_by_layout_and_what_else_differs(made):
    for name, given in [("fsdp", {"shard": 2}), ("fsdp_tp", {"shard": 2, "tensor": 2})]:
        for bf16 in (False, True):
            run = made.run(f"{name}-{bf16}", bf16=bf16, point={"parallelism": name, "precision": bf16}, **given)
            begin(run)
            end(run)
    lines = comparison(SweepTable(made.folder).rows())
    # The microbatch follows from the layout: nobody has chosen it.
    assert lines == [
        "layout     processes  precision  tokens/s  of all    MFU   GiB    loss  outcome",
        "dp_s2              2  fp32         1,000   2,000   41.5%  0.75  4.2500  done",
        "dp_s2              2  bf16         1,000   2,000   41.5%  0.75  4.2500  done",
        "dp_s2·tp2          4  fp32         1,000*  4,000*  41.5%  0.75  4.2500  done",
        "dp_s2·tp2          4  bf16         1,000*  4,000*  41.5%  0.75  4.2500  done",
        "* oversubscribed: more processes than cores, so that the speed says nothing",
    ]


def test_repeats_are_one_line_and_what_is_not_done_has_no_figures(made):
    for repeat, speed in enumerate((500.0, 1000.0, 2000.0)):
        run = made.run("fsdp", shard=2, repeat=repeat)
        begin(run)
        end(run, metrics={"throughput(tps)": speed})
    failed = made.run("fsdp", shard=2, repeat=3)
    begin(failed)
    train(failed)
    end(failed, "hang", metrics={"throughput(tps)": 1.0})
    (group,) = groups(SweepTable(made.folder).rows())
    assert (group.label, group.typical("tokens_per_second")) == ("dp_s2", pytest.approx(1000.0))
    assert comparison(SweepTable(made.folder).rows())[1].split() == [
        "dp_s2",
        "2",
        "1,000",
        "2,000",
        *"3 done, 1 hang".split(),
    ]


def test_what_no_column_shows_is_told_by_the_sweeps_key(made):
    for rate in (1e-3, 3e-3):
        run = made.run("a", lr=rate, point={"optimizer.lr": rate, "training.steps": 10})
        begin(run)
        end(run)
    compared = groups(SweepTable(made.folder).rows())
    assert [group.label for group in compared] == ["single · optimizer.lr 0.001", "single · optimizer.lr 0.003"]


def test_nothing_is_compared_with_nothing():
    assert groups([]) == []
    assert comparison([]) == []
    # Points that came to no run, and runs whose recipe cannot be read, are none.
    assert groups([row(state="dropped"), row(recipe=None, state="unreadable", outcome=None)]) == []


@pytest.mark.parametrize(
    ("differing", "label"),
    [
        ({"seq_len": 8192}, "dp_s2 · seq_len 8,192"),
        ({"schedule": None, "ac": "full"}, "dp_s2 · full"),
        # A swept key says its name: its value alone says little.
        ({"point.optimizer.lr": "0.001"}, "dp_s2 · optimizer.lr 0.001"),
    ],
)
def test_the_label_of_a_recipe_is_its_layout_and_what_differs(differing, label):
    assert RecipeRuns("dp_s2", 2, differing, []).label == label


def test_a_column_is_told_only_where_it_tells_recipes_apart():
    rows = [row(precision="fp32", microbatch=4, dim=64), row("tp2", precision="fp32", microbatch=8, dim=64)]
    # The microbatch follows from the layout.
    assert [dict(group.differing) for group in groups(rows)] == [{}, {}]
    rows.append(row(precision="fp32", microbatch=2, dim=64))
    assert [group.label for group in groups(rows)] == [
        "dp_s2 · microbatch 4",
        "tp2 · microbatch 8",
        "dp_s2 · microbatch 2",
    ]


def test_two_keys_that_change_together_are_told_by_one():
    rows = [row(**{"point.a": "1", "point.b": "x"}), row(**{"point.a": "2", "point.b": "y"})]
    assert [group.label for group in groups(rows)] == ["dp_s2 · a 1", "dp_s2 · a 2"]


def test_the_control_is_a_recipe_of_its_own():
    rows = [row(control=None), row(control=True, speed=900.0), row(control=False)]
    recipe, control = groups(rows)
    assert (len(recipe.rows), recipe.is_control) == (2, False)
    assert (len(control.rows), control.is_control) == (1, True)
    assert [line.split()[0:2] for line in comparison(rows)[1:]] == [["dp_s2", "2"], ["dp_s2", "(control)"]]


def test_figures_are_of_the_runs_that_are_done_and_have_a_value():
    (group,) = groups([row(speed=1.0), row(speed=4.0), row(speed=None), row(speed=9.0, outcome="oom")])
    assert group.values("tokens_per_second") == [1.0, 4.0]
    # The same figure as in a ranking, which compares ratios: their median is 2.5.
    assert group.typical("tokens_per_second") == pytest.approx(2.0)
    assert group.typical("loss") is None
