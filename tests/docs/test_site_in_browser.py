"""The site in Chromium: it opens from a folder and from a server, asks for nothing elsewhere, and its search finds pages."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.docs.test_site import build

pytestmark = pytest.mark.browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    assert build(ROOT / "mkdocs.yml", into).returncode == 0
    return into


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The address of a server that has the site."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def page() -> Iterator[Any]:
    """A page that keeps what it complains of (`said`) and what it asks for (`asked`)."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # A browser that root starts has no sandbox.
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        opened = browser.new_page()
        opened.said, opened.asked = [], []
        opened.on("console", lambda message: message.type == "error" and opened.said.append(message.text))
        opened.on("pageerror", lambda error: opened.said.append(str(error)))
        opened.on("request", lambda request: opened.asked.append(request.url))
        yield opened
        browser.close()


def test_pages_open_from_a_folder(site, page):
    for name in ("index.html", "tutorial.html", "api/report.html", "source/titanlab/techniques/model/llama.py.html"):
        page.goto((site / name).as_uri())
        assert page.locator("h1").count() == 1
    page.goto((site / "index.html").as_uri())
    page.get_by_role("link", name="my Slurm cluster").first.click()
    assert page.locator("h1").inner_text().startswith("My Slurm cluster")
    assert page.said == []
    assert [url for url in page.asked if not url.startswith(site.as_uri())] == []


def test_the_search_finds_a_page(served, page):
    page.goto(f"{served}/index.html")
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").fill("flight recorder")
    page.get_by_role("link", name="How runs end").first.wait_for(timeout=20_000)
    assert page.said == []
    assert [url for url in page.asked if not url.startswith((served, "blob:", "data:"))] == []
