"""Writes figures as files for papers, and as elements of an HTML page.

An element uses the page's colours. In files and elements a mark has the attributes `data-run` and `data-column`: the
run folders and the columns from which it is drawn.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl

from titanlab.errors import ConfigError
from titanlab.report.figures import style
from titanlab.report.figures.traced import TracedFigure

# Colours of figures → the page's names for them; all other colours are the same on a light and on a dark page.
COLOURS: Mapping[str, str] = {
    style.BLUE: "--blue",
    style.ORANGE: "--orange",
    style.GREEN: "--green",
    style.YELLOW: "--yellow",
    style.SKY: "--sky",
    style.RED: "--red",
    style.PURPLE: "--purple",
    style.GREY: "--grey",
    style.BLACK: "--ink",
    style.WHITE: "--paper",
    style.INK: "--ink",
    style.MUTED: "--muted",
    style.GRID: "--grid",
    style.PALE: "--pale",
    "#444444": "--ink",
    "#f1f1ef": "--idle",
}
_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT_FAMILY = re.compile(r" ?font-family: [^;]*;?")
_DECIMALS = re.compile(r"(\d+\.\d{2})\d+")
_MOST_RUNS = 50  # run folders named in one attribute; the table below the figure names all


def save(figure: TracedFigure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the ending of its name; the same figure gives the same file.

    Raises:
        ConfigError: the file cannot be written.
    """
    kind = path.suffix.removeprefix(".")
    try:
        if kind == "svg":
            root = _drawn(figure, letters="path")
            _mark(root, figure, prefix="")
            # Without registration, ElementTree would invent prefixes for these namespaces.
            ElementTree.register_namespace("", _SVG)
            ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
            path.write_bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))
        else:
            dates: dict[str, Any] = {"CreationDate": None} if kind == "pdf" else {}
            # Type 42 keeps the letters as TrueType; many journals refuse matplotlib's default, Type 3.
            with _no_missing_letters(), mpl.rc_context({"pdf.fonttype": 42}):
                figure.savefig(path, dpi=160, metadata=dates)
    except OSError as error:
        rule = f"cannot be written ({error.strerror or error})"
        raise ConfigError("--figures", path, rule, "name a folder of yours") from error


def element(figure: TracedFigure, *, name: str, title: str, description: str) -> str:
    """A figure as an `<svg>` element of an HTML page.

    Args:
        name: prefix of ids, which is different for each figure of a page.
    """
    figure.patch.set_visible(False)
    for axis in figure.axes:
        axis.patch.set_visible(False)
    if figure.has_heading:
        figure.axes[0].set_title("", loc="left")
    root = _drawn(figure, letters="none")
    for parent in list(root.iter()):
        for child in list(parent):
            # Drop matplotlib's style sheet: it would apply to the whole page, which already has this rule.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    _mark(root, figure, prefix=f"{name}-")
    _rename(root, prefix=f"{name}-")
    width = root.get("viewBox", "0 0 576 300").split()[2]
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("preserveAspectRatio", "xMinYMid")
    root.set("aria-labelledby", f"{name}-title {name}-description")
    root.set("style", f"--width: {width}px")
    texts = [("title", title), ("desc", description)]
    for place, (tag, text) in enumerate(texts):
        text_node = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag.replace('desc', 'description')}"})
        text_node.text = text
        root.insert(place, text_node)
    for node in root.iter():
        node.tag = node.tag.removeprefix(f"{{{_SVG}}}")
        node.tail = None
        node.text = node.text if node.text and node.text.strip() else None
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _drawn(figure: TracedFigure, *, letters: str) -> ElementTree.Element:
    """The root of the SVG that matplotlib writes.

    Args:
        letters: `none` for text, `path` for shapes that need no font.
    """
    written = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": letters, "svg.hashsalt": "titanlab"}), _no_missing_letters():
        figure.savefig(written, format="svg", metadata={"Date": None})
    return ElementTree.fromstring(written.getvalue())


class _no_missing_letters(warnings.catch_warnings):  # noqa: N801
    """Suppresses warnings about letters that matplotlib's font lacks and draws as boxes; a page uses its own fonts."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        return entered


def _mark(root: ElementTree.Element, figure: TracedFigure, *, prefix: str) -> None:
    """Write each mark's source into its element; with a `prefix`, remove the mark's id, which a page does not use."""
    for node in root.iter():
        mark = figure.marks.get(node.get("id", ""))
        if mark is None:
            continue
        more = len(mark.runs) - _MOST_RUNS
        runs = [style.printable(run) for run in mark.runs[:_MOST_RUNS]]
        node.set("data-run", " ".join([*runs, *([f"(and {more} more)"] if more > 0 else [])]))
        node.set("data-column", " ".join(mark.columns))
        if prefix:
            del node.attrib["id"]
        if mark.text:
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = style.printable(mark.text)
            node.insert(0, title)


def _rename(root: ElementTree.Element, *, prefix: str) -> None:
    """Use the page's colours and fonts; prefix the ids that are used, and remove the others."""
    used = set()
    for node in root.iter():
        for key, value in node.attrib.items():
            if key == _LINK and value.startswith("#"):
                used.add(value.removeprefix("#"))
            used.update(_REFERENCE.findall(value))
    for node in root.iter():
        name = node.attrib.pop("id", None)
        if name in used:
            node.set("id", prefix + name)
        if (link := node.attrib.pop(_LINK, None)) is not None:
            # An image's link contains its bytes; other links are ids.
            node.set("href", f"#{prefix}{link.removeprefix('#')}" if link.startswith("#") else link)
        for key, value in list(node.attrib.items()):
            if key == "style":
                value = _COLOUR.sub(
                    lambda found: f"var({COLOURS[found[0]]})" if found[0] in COLOURS else found[0], value
                )
                value = _FONT_FAMILY.sub("", value)
            if "url(#" in value:
                value = _REFERENCE.sub(rf"url(#{prefix}\1)", value)
            if key in ("d", "x", "y", "transform"):
                value = _DECIMALS.sub(r"\1", value)
            node.set(key, " ".join(value.split()))
        for attribute in ("fill", "stroke"):
            if node.get(attribute) in COLOURS:
                node.set("style", f"{node.get('style', '')}; {attribute}: var({COLOURS[node.attrib.pop(attribute)]})")
