"""A report in Chromium, opened as a file: it needs nothing else, every kind of reader can use it, and it looks so."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CACHE
from tests.report.sweeps import hostile, many, mixed
from tests.sweep.made import Made
from titanlab.cli import main

pytestmark = pytest.mark.browser

SCREENSHOTS = CACHE / "screenshots"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Debian's Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A browser that root starts has no sandbox.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports by the sweep's name."""
    folder = tmp_path_factory.mktemp("reports")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    made = {
        "mixed": mixed(Made(folder, "mixed")),
        "hostile": hostile(Made(folder, "hostile")),
        "many": many(folder, 300),
    }
    empty = Made(folder, "empty")
    empty.run("waiting")
    made["empty"] = empty
    for sweep in made.values():
        assert main(["report", str(sweep.folder.path), "--runs", str(folder)]) == 0
    return {name: sweep.folder.path / f"{sweep.folder.name}.html" for name, sweep in made.items()}


class Opened:
    """A page, and what it has complained of or asked for."""

    def __init__(self, browser: Any, file: Path, **given: Any) -> None:
        self.context = browser.new_context(**given)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())


@pytest.fixture
def opened(chromium, reports) -> Iterator[Any]:
    """`opened("mixed", color_scheme="dark")`: the page of a report."""
    open_ones = []

    def open_report(name: str, **given: Any) -> Opened:
        open_ones.append(Opened(chromium, reports[name], **{"viewport": WIDE, **given}))
        return open_ones[-1]

    yield open_report
    for one in open_ones:
        one.context.close()


@pytest.mark.parametrize("name", ["mixed", "hostile", "many", "empty"])
def test_a_report_opens_without_errors_and_without_a_network(opened, reports, name):
    one = opened(name)
    for details in one.page.locator("summary").all()[:20]:
        details.click()
    assert one.said == []
    assert one.requests == [reports[name].as_uri()]
    # Nothing that a run's files hold has become a part of the page.
    assert one.page.title() == f"{reports[name].stem}: report of titanlab"
    assert one.page.locator("script, img, iframe, object").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["mixed", "hostile", "empty"])
def test_no_serious_fault_of_accessibility(opened, name, scheme):
    from axe_playwright_python.sync_playwright import Axe

    one = opened(name, color_scheme=scheme)
    one.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    found = Axe().run(one.page).response
    assert len(found["passes"]) > 20
    faults = [(fault["id"], fault["nodes"][0]["html"]) for fault in found["violations"]]
    assert not faults


def test_headings_landmarks_and_names(opened):
    page = opened("mixed").page
    assert page.locator("h1").count() == 1
    assert [page.locator(name).count() for name in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    assert page.get_by_role("img").count() == page.locator("figure").count() >= 5
    for image in page.get_by_role("img").all():
        assert len(image.locator("desc").text_content()) > 40


def test_the_keyboard_reaches_the_content(opened):
    page = opened("mixed").page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.locator(".skip").bounding_box()["x"] >= 0
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    # Links, figures that scroll, and folded tables come after each other.
    reached = []
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.tagName"))
    assert {"DIV", "SUMMARY"} <= set(reached)


@pytest.mark.parametrize("name", ["mixed", "hostile", "many"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_window(opened, name, width):
    page = opened(name, viewport={"width": width, "height": 844}).page
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", ["mixed", "hostile"])
def test_links_lead_to_run_folders(opened, reports, name):
    links = opened(name).page.locator("a.run").evaluate_all("all => all.map(one => one.href)")
    assert links
    sweep = reports[name].parent
    folders = {path.as_uri() for path in sweep.iterdir() if path.is_dir()}
    missing = {link for link in links if link not in folders}
    assert all("gone-" in link for link in missing)
    assert len(missing) <= 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screens_in_both_schemes(opened, scheme):
    page = opened("mixed", color_scheme=scheme).page
    page.screenshot(path=SCREENSHOTS / f"report-{scheme}.png", full_page=True)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    # Figures follow the page: their letters have the colour of its text.
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert page.evaluate("getComputedStyle(document.querySelector('svg text')).fill") == ink


def test_a_phone(opened):
    page = opened("mixed", viewport=NARROW, device_scale_factor=2).page
    page.screenshot(path=SCREENSHOTS / "report-phone.png", full_page=True)
    assert page.locator(".hint").is_visible()
    # Letters of figures can be read: the figure scrolls, and is not made small.
    assert page.locator("#pareto svg text").first.bounding_box()["height"] > 8


def test_a_print(opened, tmp_path):
    page = opened("mixed", color_scheme="dark").page
    page.emulate_media(media="print")
    # Paper is white, whatever the screen is.
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("nav").is_visible()
    assert page.locator("details").first.is_hidden()
    file = SCREENSHOTS / "report-print.pdf"
    page.pdf(path=file, format="A4", print_background=True)
    subprocess.run(["pdftoppm", "-r", "60", "-png", file, SCREENSHOTS / "report-print"], check=True)
    assert 3 <= len(list(SCREENSHOTS.glob("report-print-*.png"))) <= 9
