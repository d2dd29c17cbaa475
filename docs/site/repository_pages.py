"""Hook of mkdocs: what the site has beside the pages of docs/.

Pages of docs/ link to files of the repository, such as `../titanlab/techniques/model/llama.py`. In the repository these
links open the file. For the site, each such file becomes a page with its text, and the link leads there.
CONTRIBUTING.md and CHANGELOG.md become pages too. The decisions are listed in the order of their numbers.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

# Files outside docs/ that are pages of their own, and their names on the site.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
DOCS = "docs"
# README.md says on GitHub what index.md says here.
HOME = {"README.md": "index.md"}
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json", ".md": "markdown"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions in the navigation, which names their section and nothing else."""
    assert config.nav is not None
    (section,) = [entry for entry in config.nav if isinstance(entry, dict) and "Decisions" in entry]
    folder = Path(config.docs_dir) / "decisions"
    section["Decisions"] = [{_title(path): f"decisions/{path.name}"} for path in sorted(folder.glob("*.md"))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside docs/."""
    root = _root(config)
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(root / name).read_text(encoding="utf-8")))
    linked = {
        target
        for file in files.documentation_pages()
        for target in _links(_place(file.src_uri), file.content_string)
        if _is_source(target)
    }
    for target in sorted(linked):
        page = File.generated(
            config, _source_page(target), content=_source_text(root, target), inclusion=InclusionLevel.NOT_IN_NAV
        )
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside docs/ lead to their pages."""
    place = _place(page.file.src_uri)
    if _is_source(place):
        return markdown
    return _LINK.sub(lambda found: _on_site(page.file.src_uri, place, found), markdown)


def _on_site(page: str, place: str, found: re.Match[str]) -> str:
    target = _resolved(place, found[1])
    if target in PAGES or target in HOME:
        target = {**PAGES, **HOME}[target]
    elif _is_source(target):
        target = _source_page(target)
    else:
        target = posixpath.relpath(target, DOCS)
    return posixpath.relpath(target, posixpath.dirname(page) or ".") + (found[2] or "")


def _links(place: str, markdown: str) -> set[str]:
    """Targets of a page's links, as paths of the repository."""
    return {_resolved(place, found[1]) for found in _LINK.finditer(markdown)}


def _place(page: str) -> str:
    """Where the repository has a page of the site."""
    for name, made in PAGES.items():
        if page == made:
            return name
    return page.removeprefix("source/").removesuffix(".md") if page.startswith("source/") else f"{DOCS}/{page}"


def _resolved(place: str, link: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), link))


def _is_source(path: str) -> bool:
    return not path.startswith(f"{DOCS}/") and path not in PAGES and path not in HOME


def _source_page(path: str) -> str:
    return f"source/{path}.md"


def _source_text(root: Path, target: str) -> str:
    """The page of a file, or of a folder with all of its files."""
    path = root / target
    if not path.resolve().is_relative_to(root.resolve()) or not path.exists():
        raise PluginError(f"a page links to {target}, which is not in the repository")
    paths = [path] if path.is_file() else sorted(each for each in path.rglob("*") if _is_shown(each))
    head = "---\nsearch:\n  exclude: true\nhide: [navigation]\n---\n\n"
    parts = [f"# `{target}`\n"]
    for each in paths:
        name = each.relative_to(root).as_posix()
        heading = [] if path.is_file() else [f"## `{name}`\n"]
        language = _LANGUAGES.get(each.suffix, "text")
        parts += [*heading, f"````{language}\n{each.read_text(encoding='utf-8')}````\n"]
    return head + "\n".join(parts)


def _is_shown(path: Path) -> bool:
    built = any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
    return path.is_file() and not built


def _title(path: Path) -> str:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    found = re.fullmatch(r"# 0*(\d+)\W+(.*)", first)
    if found is None:
        raise PluginError(f"decisions/{path.name} does not begin with `# NUMBER · TITLE`")
    return f"{found[1]} · {found[2]}"


def _root(config: MkDocsConfig) -> Path:
    return Path(config.docs_dir).parent
