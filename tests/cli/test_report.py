"""`titanlab report`: where the page is written, and what is refused."""

import errno
from pathlib import Path

import pytest

from tests.report.sweeps import mixed
from tests.sweep.made import Made, begin, end
from titanlab.cli import main


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return mixed(Made(tmp_path / "runs")).folder.path


def test_the_page_lies_in_the_sweeps_folder(sweep, shown):
    answer, path = shown("report", "layouts").splitlines()
    assert "is the fastest" in answer
    assert path == "report: runs/layouts/layouts.html"
    assert (sweep / "layouts.html").is_file()
    # It is none of the sweep's runs.
    assert "layouts.html" not in shown("status", "layouts")


def test_another_place(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    made = Made(tmp_path / "runs")
    run = made.run("alone")
    begin(run)
    end(run)
    sweep = made.folder.path
    for into, file in (("a/b.html", "a/b.html"), ("c", "c/layouts.html"), ("a", "a/layouts.html")):
        assert main(["report", str(sweep), "--into", into]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"report: {file}"
        assert Path(file).is_file()


@pytest.mark.full
def test_figures_beside_it(sweep, shown):
    lines = shown("report", "layouts", "--figures", "figures", "--format", "svg", "--by", "memory").splitlines()
    assert "needs the least memory" in lines[0]
    assert lines[1:3] == ["figure: figures/scaling.svg", "figure: figures/pareto.svg"]
    assert all(Path(line.partition(": ")[2]).is_file() for line in lines[1:])


def test_a_folder_that_cannot_be_written_is_one_line(sweep, capsys, monkeypatch):
    def refuse(path, text):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("titanlab.report.report.write_text", refuse)
    assert main(["report", "layouts"]) == 2
    said = capsys.readouterr().err
    assert said.endswith("layouts.html: cannot be written (Permission denied); try --into FILE or FOLDER of yours\n")
