"""The site that `make docs` builds: every page is in it, every link leads somewhere, and nothing is loaded from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT, read

ENVIRON = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
# What a browser loads by itself: scripts, styles, pictures, fonts. Links that a reader follows are not among them.
LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\ssrc=\"([^\"]+)\"|<link\b[^>]*\shref=\"([^\"]+)\"")
LOADED_BY_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")


def build(config: Path, into: Path) -> subprocess.CompletedProcess[str]:
    # Not with --quiet: then warnings are not errors.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(into)]
    return subprocess.run(command, cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    into = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", into)
    assert built.returncode == 0, built.stderr
    assert re.findall(r"^(?!INFO ).+", built.stderr, re.MULTILINE) == []
    return into


@pytest.mark.full
def test_every_page_is_there(site):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert all((site / page).with_suffix(".html").is_file() for page in pages)
    assert {"contributing.html", "changelog.html", "404.html"} <= {path.name for path in site.iterdir()}


@pytest.mark.full
def test_nothing_is_loaded_from_elsewhere(site):
    loaded = {
        target
        for path in site.rglob("*.html")
        for found in LOADED.finditer(path.read_text())
        for target in found.groups()
        if target
    }
    loaded |= {
        target
        for path in site.rglob("*.css")
        for found in LOADED_BY_STYLE.finditer(path.read_text())
        for target in found.groups()
        if target and not target.startswith("data:")
    }
    assert len(loaded) > 5
    assert [target for target in loaded if re.match(r"(\w+:)?//", target)] == []
    # Nothing of the repository is copied there that is neither a page nor part of one.
    assert {path.suffix for path in site.rglob("*") if path.is_file()} <= {
        *(".html", ".css", ".js", ".map", ".json", ".svg", ".png", ".xml", ".gz", ".inv")
    }


@pytest.mark.full
def test_files_of_the_repository_that_pages_link_to_are_pages(site):
    page = (site / "models.html").read_text()
    assert 'href="source/titanlab/techniques/model/llama.py.html"' in page
    source = (site / "source" / "titanlab" / "techniques" / "model" / "llama.py.html").read_text()
    assert "class Llama" in re.sub(r"<[^>]+>", "", source)
    assert 'href="extending.html"' in (site / "contributing.html").read_text()
    assert 'id="titanlab.report.frames.sweep_frame"' in (site / "api" / "report.html").read_text()


def test_links_that_lead_nowhere_and_pages_without_a_place_are_errors(tmp_path):
    config = small_site(tmp_path, "# Home\n\n[page](gone.md) [part](#nowhere) [part](contributing.md#nowhere)\n")
    (tmp_path / "docs" / "more.md").write_text("# More\n")
    built = build(config, tmp_path / "site")
    assert built.returncode == 1
    for said in ("'gone.md'", "'#nowhere'", "'contributing.md#nowhere'", "  - more.md"):
        assert said in built.stderr


@pytest.mark.parametrize("target", ["../titanlab/gone.py", "../../secrets.py"])
def test_a_link_to_a_file_that_the_repository_lacks_is_an_error(tmp_path, target):
    built = build(small_site(tmp_path, f"# Home\n\n[file]({target})\n"), tmp_path / "site")
    assert built.returncode == 1
    assert "gone.py, which is not in the repository" in built.stderr or "secrets.py, which is not" in built.stderr


def test_a_small_site_without_faults_is_built(tmp_path):
    built = build(small_site(tmp_path, "# Home\n\n[part](../CONTRIBUTING.md#contributingmd)\n"), tmp_path / "site")
    assert (built.returncode, "WARNING" in built.stderr) == (0, False), built.stderr


def small_site(folder: Path, home: str) -> Path:
    """The settings of the site, with one page and one decision."""
    settings = yaml.safe_load(read("mkdocs.yml"))
    settings["nav"] = [{"Home": "index.md"}, {"Contributing": "contributing.md"}, {"Changes": "changelog.md"}]
    settings["nav"].append({"Decisions": []})
    # It reads the source of the package, which takes a second and is not here.
    settings["plugins"] = ["search"]
    (folder / "docs" / "decisions").mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "site", folder / "docs" / "site", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "docs" / "decisions" / "0001-one.md").write_text("# 0001 · One\n")
    (folder / "docs" / "index.md").write_text(home)
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        (folder / name).write_text(f"# {name}\n")
    config = folder / "mkdocs.yml"
    config.write_text(yaml.safe_dump(settings))
    return config


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_pages_outside_docs_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)(?:#([^)]+))?\)", read(page))
    assert links
    for target, anchor in links:
        assert (ROOT / target).exists(), target
        if anchor:
            assert anchor in {slug(heading) for heading in re.findall(r"^#+ (.*)$", read(target), re.MULTILINE)}, target


def slug(heading: str) -> str:
    """The anchor of a heading, as in the repository's view and on the site."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")
