"""The pictures of docs/ideas-in-pictures.md are those that benchmarks/pictures.py draws, and say what they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.benchmarks.scripts import script
from tests.docs.pages import PAGES, ROOT, read

PICTURES = script("pictures")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "draw",
    [
        # The planner simulates the pipelines of 405B, which takes some seconds.
        pytest.param(draw, id=draw.__name__, marks=[pytest.mark.full] if draw is PICTURES.stack else [])
        for draw in PICTURES.PICTURES
    ],
)
def test_a_picture_is_what_the_script_draws(draw):
    picture = draw()
    committed = (PICTURES.IMAGES / f"{picture.name}.svg").read_text(encoding="utf-8")
    # Not `==` in the assertion: pytest would compare thousands of lines.
    is_same = committed == picture.svg()
    assert is_same, f"docs/images/{picture.name}.svg is another picture: make pictures"
    root = ElementTree.fromstring(committed)
    assert len(root.find(f"{SVG}title").text) > 20
    assert len(root.find(f"{SVG}desc").text) > 80
    named = root.get("aria-labelledby").split()
    assert named == [root.find(f"{SVG}title").get("id"), root.find(f"{SVG}desc").get("id")]
    assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text
    # Texts begin inside of the picture; ends depend on the reader's font.
    width, height = (float(root.get(name)) for name in ("width", "height"))
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("x")) < width
        assert 0 < float(text.get("y")) < height - 6


def test_an_axis_has_one_colour_and_other_axes_have_others():
    axes = [PICTURES.COLOURS[name] for name in ("shard", "tensor", "context", "pipeline", "expert")]
    for colours in zip(*axes, strict=True):
        assert len(set(colours)) == len(axes)


def test_every_picture_of_a_page_has_a_text_for_those_who_do_not_see_it():
    pictures = [(page, *found) for page in PAGES for found in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", read(page))]
    assert len(pictures) > len(PICTURES.PICTURES)
    for page, text, target in pictures:
        assert len(text) > 20, f"{page}: {target}"
        assert ((ROOT / page).parent / target).is_file(), f"{page}: {target}"
    shown = {target.removeprefix("images/") for page, _, target in pictures if page == "docs/ideas-in-pictures.md"}
    assert shown == {path.name for path in PICTURES.IMAGES.glob("ideas-*.svg")}
