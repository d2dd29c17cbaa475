"""Figures as files, and as elements of a page."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.report.sweeps import mixed
from titanlab.report.figures import svg
from titanlab.report.figures.bars import throughput_by_layout
from titanlab.sweep import SweepTable


@pytest.fixture
def figure(made):
    return throughput_by_layout(SweepTable(mixed(made).folder).rows(), ranked=True, bands={"single": (900.0, 1100.0)})


@pytest.mark.parametrize("kind", ["svg", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("png", "pdf"))])
def test_the_same_runs_give_the_same_file(made, tmp_path, kind):
    rows = SweepTable(mixed(made).folder).rows()
    for name in ("a", "b"):
        svg.save(throughput_by_layout(rows), tmp_path / f"{name}.{kind}")
    first = (tmp_path / f"a.{kind}").read_bytes()
    assert first == (tmp_path / f"b.{kind}").read_bytes()
    assert len(first) > 5000


def test_a_pdf_has_no_letters_of_type_3(figure, tmp_path):
    """Many journals and conferences refuse them."""
    svg.save(figure, tmp_path / "a.pdf")
    written = (tmp_path / "a.pdf").read_bytes()
    assert b"/Subtype /CIDFontType2" in written
    assert b"/Subtype /Type3" not in written


def test_marks_of_a_file_name_their_runs_and_columns(figure, tmp_path, made):
    svg.save(figure, tmp_path / "a.svg")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    marks = [one for one in root.iter() if "data-run" in one.attrib]
    folders = {run.path.name for run in made.folder.runs()}
    assert len(marks) == len(figure.marks) > 10
    assert {name for mark in marks for name in mark.get("data-run").split()} == folders
    assert {mark.get("data-column") for mark in marks} >= {"tokens_per_second", "outcome state"}


def test_an_element_has_the_pages_colours_and_ids_of_its_own(figure):
    text = svg.element(figure, name="speed", title="Speed & more", description="<b>bars</b>")
    HTMLParser().feed(text)
    assert text.startswith("<svg ")
    assert "Speed &amp; more" in text
    assert "&lt;b&gt;bars" in text
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert all(name.startswith("speed-") for name in ids)
    assert len(set(ids)) == len(ids)
    used = {*re.findall(r'href="#([^"]*)"', text), *re.findall(r"url\(#([^)]*)\)", text)}
    assert used <= set(ids)
    # No colour but by name, so that it follows the page; no font but the page's.
    assert re.findall(r"#[0-9a-f]{6}", text) == []
    assert "font-family" not in text
    assert "fill: var(--blue)" in text
