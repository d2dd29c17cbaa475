"""What a reader can take from the pages and type: commands, in their order, and words in code style."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from titanlab.cli import verbs

ROOT = Path(__file__).parents[2]
_OF_DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
DECISIONS = [page for page in _OF_DOCS if page.startswith("docs/decisions/")]
PAGES = ["README.md", "CONTRIBUTING.md", *(page for page in _OF_DOCS if page not in DECISIONS)]
CONFIGS = sorted(
    str(path.relative_to(ROOT)) for folder in ("conf", "sweeps", "launch") for path in (ROOT / folder).rglob("*.yaml")
)
VERBS = " ".join(verbs.VERBS)
TITANLAB = rf"titanlab (?:{VERBS.replace(' ', '|')})\b"
# A line of a block that begins with one of these is a command.
PROGRAM = re.compile(
    r"(?:\w+=\S+ )*(?:titanlab(?= [a-z-])|make|mkdir|\.(?= \.venv)|python|pip|jupyter|jupytext|torchrun|sacct|eval|[a-z]+=\"|(?:~|\.|launch)/\S+)(?=[ \"\w]|$)"
)
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        line: number of its line in the file.
        text: as it is typed.
        shown: what the page says that it prints; None where it says nothing.
    """

    line: int
    text: str
    shown: str | None = None


@dataclass(frozen=True)
class Block:
    """A fenced block: the number of its first line, its language, and what it has."""

    line: int
    language: str
    text: str

    def commands(self) -> list[Command]:
        """Its commands: every line that begins with a program, or in a block with prompts what follows a prompt.

        Lines of a printed text that are commands of titanlab count too: readers are meant to copy them.
        """
        if self.language:
            return []
        lines = self.text.splitlines()
        prompted = any(line.startswith("$ ") for line in lines)
        if not prompted and not any(PROGRAM.match(line) for line in lines[:1]):
            return []
        found: list[Command] = []
        for number, line in enumerate(lines, self.line):
            if line.startswith("$ ") or (not prompted and PROGRAM.match(line)):
                found.append(Command(number, line.removeprefix("$ ")))
            elif prompted and line:
                last = found.pop()
                found.append(Command(last.line, last.text, f"{last.shown or ''}{line}\n"))
                if re.match(TITANLAB, line):
                    found.append(Command(number, line))
            elif prompted and found[-1].shown is not None:
                last = found.pop()
                found.append(Command(last.line, last.text, f"{last.shown}\n"))
        return found


def read(page: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    text = read(page)
    return [Block(text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in _FENCE.finditer(text)]


def spans(page: str) -> list[tuple[int, str]]:
    """Words in code style outside of blocks, with their lines; a line's end in one is a space."""
    # Blocks leave their lines behind, so that numbers of lines stay.
    text = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), read(page))
    return [(text.count("\n", 0, found.start()) + 1, " ".join(found[1].split())) for found in _CODE.finditer(text)]


def commands(page: str) -> list[Command]:
    """All commands of a page, those of blocks and those inside of sentences, in their order."""
    found = [command for block in blocks(page) for command in block.commands()]
    found += [Command(line, text) for line, text in spans(page) if PROGRAM.match(text) and " " in text]
    return sorted(found, key=lambda command: command.line)


def commands_of_comments(config: str) -> list[Command]:
    """Commands in the comments of a YAML: lines of their own, and those in code style inside of sentences."""
    lines = read(config).splitlines()
    found = [
        # A remark may follow, some spaces apart.
        Command(number, re.split(r" {3,}", line.lstrip("# "))[0])
        for number, line in enumerate(lines, 1)
        if re.match(rf"# *{TITANLAB}", line)
    ]
    comments = re.sub(r"\n# ?", " ", "\n".join(line if line.startswith("#") else "" for line in lines))
    found += [Command(0, " ".join(text.split())) for text in _CODE.findall(comments) if re.match(TITANLAB, text)]
    return found


def commands_of_help(text: str) -> list[Command]:
    """Examples in what `--help` prints: lines of their own, and what stands behind a colon or a comma."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(rf"  +{TITANLAB}(?! --help)", line):
            # A remark follows, some spaces apart.
            found.append(Command(number, re.split(r" {2,}", line.strip())[0]))
        else:
            found += [
                Command(number, each.rstrip("."))
                for each in re.findall(rf"[:,`(] ?({TITANLAB}[^,:`)]*)", line)
                if not line.startswith(("usage:", "titanlab "))
            ]
    return found
