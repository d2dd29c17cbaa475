"""Reports as files."""

import sys
import time

import pytest

from tests.report.sweeps import many, mixed
from titanlab.errors import ConfigError
from titanlab.report import write_report
from titanlab.report.report import sweep_figures
from titanlab.sweep import SweepFolder, SweepTable


def test_figures_for_papers(made, tmp_path):
    mixed(made)
    figures = sweep_figures(made.folder.path)
    assert list(figures) == ["pareto", "throughput", "step-time", "loss", "timeline"]
    into, folder = tmp_path / "report.html", tmp_path / "figures"
    report = write_report(made.folder, SweepTable(made.folder).rows(), into=into, figures=folder, format="svg")
    assert report.figures == [folder / f"{name}.svg" for name in figures]
    assert {path.name for path in folder.iterdir()} == {path.name for path in report.figures}
    assert report.sentence in into.read_text().replace("&gt;", ">")
    # A title is in the file, which stands alone, and not in the page, which has a heading.
    assert "memory against tokens per second" in figures["pareto"].axes[0].get_title(loc="left")


def test_what_is_no_sweep_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="is no sweep's folder"):
        sweep_figures(tmp_path)


def test_without_matplotlib_there_is_one_line(made, tmp_path, monkeypatch):
    mixed(made)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib, which is not installed; pip install 'titanlab\[plots\]'"):
        write_report(made.folder, [], into=tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_an_older_report_is_replaced_whole(made, tmp_path):
    made.write()
    into = tmp_path / "report.html"
    into.write_text("old")
    write_report(made.folder, [], into=into)
    assert into.read_text().endswith("</html>")
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.full
def test_a_thousand_runs_in_ten_seconds_and_five_megabytes(tmp_path):
    sweep = many(tmp_path / "runs", 1000).folder
    write_report(SweepFolder(sweep.path), [], into=tmp_path / "empty.html")  # what is imported once
    begin = time.process_time()
    into = tmp_path / "report.html"
    write_report(SweepFolder(sweep.path), SweepTable(sweep).rows(), into=into)
    assert time.process_time() - begin < 10
    assert into.stat().st_size < 5_000_000
