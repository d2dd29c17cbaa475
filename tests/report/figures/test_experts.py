"""The figure of the load of experts."""

from xml.etree import ElementTree

from titanlab.report.figures import svg
from titanlab.report.figures.over_time import ExpertLoad, expert_load


def test_a_large_model_is_a_small_figure(tmp_path):
    """94 blocks of 128 experts, as those of the largest Qwen3, are one picture and not 12,032 boxes."""
    counts = [[(7 * block + expert) % 50 for expert in range(128)] for block in range(94)]
    figure = expert_load([ExpertLoad(runs=["r"], label="r", step=10, steps=5, counts=counts)])
    svg.save(figure, tmp_path / "experts.svg")
    assert (tmp_path / "experts.svg").stat().st_size < 150_000
    assert ElementTree.parse(tmp_path / "experts.svg").getroot().tag.endswith("svg")
