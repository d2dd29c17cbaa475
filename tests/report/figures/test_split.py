"""Parts of a step."""

from titanlab.report.figures.bars import StepSplit, step_time_split


def test_parts_are_stacked_and_estimates_say_so():
    parts = {"forward": 0.2, "backward": 0.4, "shard": 0.1, "data": 0.0, "strange": 0.05}
    splits = [
        StepSplit(run="a", label="dp_s2", seconds=parts, columns=["breakdown/forward(s)"]),
        StepSplit(run="b", label="tp2", seconds={"compute": 0.5}, columns=["config.yaml"], is_measured=False),
    ]
    figure = step_time_split(splits)
    texts = {mark.text for mark in figure.marks.values()}
    assert texts == {
        "dp_s2: forward 200 ms",
        "dp_s2: backward 400 ms",
        "dp_s2: exposed: shard 100 ms",
        "dp_s2: strange 50.0 ms",
        "tp2: compute 500 ms, estimated",
    }
    assert [text.get_text() for text in figure.axes[0].texts] == ["750 ms", "500 ms (estimate)"]
    bars = [patch for patch in figure.axes[0].patches if round(patch.get_y() + 0.36) == 0]
    assert sum(bar.get_width() for bar in bars) == sum(parts.values())


def test_nothing_is_drawn_of_nothing():
    figure = step_time_split([])
    assert [text.get_text() for text in figure.axes[0].texts] == ["no run"]
