"""All figures: each is drawn where nothing is known yet, leaves no state behind, and is cut where there is too much."""

import sys

import matplotlib as mpl
import pytest

from tests.report.figures.test_bars import bars, texts
from tests.sweep.made import begin, end, train
from titanlab.report import figures
from titanlab.report.frames import metrics_frame, sweep_frame


@pytest.mark.parametrize(
    "draw", [figures.throughput_by_layout, figures.memory_by_layout, figures.outcomes, figures.loss_by_tokens]
)
def test_a_sweep_of_which_nothing_is_known_yet_is_drawn(made, tmp_path, draw):
    made.write()
    frame = (metrics_frame if draw is figures.loss_by_tokens else sweep_frame)(made.folder.path)
    figure = draw(frame)
    assert texts(figure)
    figure.savefig(tmp_path / "figure.png")


def test_drawing_leaves_no_state_behind(mixed, tmp_path):
    before = dict(mpl.rcParams)
    runs, steps = sweep_frame(mixed.folder.path), metrics_frame(mixed.folder.path)
    drawn = [
        figures.throughput_by_layout(runs),
        figures.memory_by_layout(runs),
        figures.outcomes(runs),
        figures.loss_by_tokens(steps),
    ]
    for number, figure in enumerate(drawn):
        figure.savefig(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").stat().st_size > 5000
    assert dict(mpl.rcParams) == before
    # Others may have imported it; no figure of ours is registered there.
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []


def test_many_runs_are_cut(made):
    for place in range(70):
        run = made.run(f"r{place}", seed=place, point={"seed": place})
        begin(run)
        train(run, losses=[5.0, 4.0])
        end(run)
    runs = sweep_frame(made.folder.path)
    figure = figures.throughput_by_layout(runs)
    assert len(bars(figure)) == 60
    assert figure.axes[0].get_ylabel() == "the first 60 of 70"
    loss = figures.loss_by_tokens(metrics_frame(made.folder.path))
    assert len(loss.axes[0].lines) == 70
    assert loss.legends[0].get_title().get_text() == "… and 56 more"
