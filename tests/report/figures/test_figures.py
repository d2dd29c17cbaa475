"""Figures: what is drawn is what the frames hold, and every axis says what it is."""

import sys

import matplotlib as mpl
import pytest

from tests.sweep.made import SUMMARY, begin, end, train
from titanlab.costs import meter
from titanlab.report import figures
from titanlab.report.frames import metrics_frame, sweep_frame


@pytest.fixture
def mixed(made):
    """Two recipes that are done, one of them oversubscribed and thrice, one that failed, one under way, two dropped."""
    for repeat, speed in enumerate((900.0, 1000.0, 1100.0)):
        run = made.run("fsdp", shard=2, repeat=repeat)
        begin(run, cores=1)
        train(run, losses=[5.0, 4.0, 3.0])
        end(run, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: speed})
    single = made.run("single")
    begin(single)
    train(single, losses=[5.0, 4.0, 3.0])
    end(single, metrics={**SUMMARY, meter.TOKENS_PER_SECOND: 3000.0})
    failed, running = made.run("tp", tensor=2), made.run("cp", context=2)
    begin(failed)
    end(failed, "oom")
    begin(running)
    train(running, losses=[5.0, 4.5])
    made.drop("rule", "no", parallelism="tp3")
    made.drop("where", "no", parallelism="tp5")
    return made


def bars(figure):
    """Lengths of the bars, from top to bottom, and which are hatched."""
    axis = figure.axes[0]
    return [(round(patch.get_y() + 0.36), patch.get_width(), patch.get_hatch()) for patch in axis.patches]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_throughput(mixed):
    runs = sweep_frame(mixed.folder.path)
    figure = figures.throughput_by_layout(runs)
    assert bars(figure) == [(0, 1000.0, "////"), (1, 3000.0, None)]
    assert texts(figure) == ["1,000  (MFU 41.5%)", "3,000  (MFU 41.5%)", "oom", "running"]
    axis = figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["dp_s2", "single", "tp2", "cp2"]
    assert axis.get_xlabel() == "tokens per second of one device, median step after warm-up"
    # The three runs of the first recipe are to be seen, too.
    assert [list(line.get_xdata()) for line in axis.lines] == [[900.0], [1000.0], [1100.0]]
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text().startswith("oversubscribed")
    together = figures.throughput_by_layout(runs, together=True)
    assert [length for _, length, _ in bars(together)] == [2000.0, 3000.0]


def test_memory(mixed):
    figure = figures.memory_by_layout(sweep_frame(mixed.folder.path))
    # How many cores there were has nothing to do with it.
    assert bars(figure) == [(0, 0.75, None), (1, 0.75, None)]
    assert "GiB" in figure.axes[0].get_xlabel()
    assert figure.legends == []


def test_loss(mixed):
    figure = figures.loss_by_tokens(metrics_frame(mixed.folder.path))
    lines = figure.axes[0].lines
    assert [list(line.get_ydata()) for line in lines] == [[5.0, 4.0, 3.0]] * 4 + [[5.0, 4.5]]
    assert list(lines[0].get_xdata()) == [384, 768, 1152]
    # Curves that lie on each other are told by their widths.
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(set(widths), reverse=True)
    assert figure.axes[0].get_xlabel() == "tokens trained on"
    assert figure.axes[0].get_ylabel() == "loss (nats per token)"


def test_outcomes(mixed):
    figure = figures.outcomes(sweep_frame(mixed.folder.path))
    axis = figure.axes[0]
    labels = [label.get_text() for label in axis.get_yticklabels()]
    assert labels == ["dp_s2", "single", "tp2", "cp2", "(dropped: rule)", "(dropped: where)"]
    told = [text.get_text() for text in figure.legends[0].get_texts()]
    assert told == ["done (4)", "oom (1)", "running (1)", "dropped (2)"]
    lengths = {}
    for place, length, _ in bars(figure):
        lengths[place] = lengths.get(place, 0) + length
    assert lengths == {0: 3, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


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
