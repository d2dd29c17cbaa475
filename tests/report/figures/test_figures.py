"""All figures: each is drawn where nothing is known yet, leaves no state behind, and is cut where there is too much."""

import sys

import matplotlib as mpl

from titanlab.report import figures
from titanlab.report.frames import metrics_frame, sweep_frame


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
