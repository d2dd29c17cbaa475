"""data=stdlib: the source of the Python standard library as a corpus."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from titanlab.data.corpus.text_files import Corpus
from titanlab.data.prepared import PreparedText
from titanlab.data.stdlib_schema import Stdlib
from titanlab.errors import ConfigError

# Installed packages, folders that only some systems have, and tables of characters, which are no use as training text.
_LEFT_OUT = {
    "__pycache__",
    "__phello__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# These files contain paths of the machine that built this Python.
_BUILT = ("_sysconfigdata", "_sysconfig_vars")


class StdlibSource(PreparedText[Stdlib]):
    """The standard library of this Python."""

    def find_corpus(self) -> Corpus:
        folder = Path(sysconfig.get_path("stdlib"))
        files = source_files(folder)
        if not files:
            rule = f"this Python came without the source of its library ({folder})"
            raise ConfigError("data", "stdlib", rule, "try data=files")
        return Corpus(files=files, key="data", strict=False)


def source_files(folder: Path) -> tuple[Path, ...]:
    """Python files of a standard library, sorted by their path in it."""
    sources: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT and not name.startswith("config-"))
        sources += [Path(place, file) for file in files if file.endswith(".py") and not file.startswith(_BUILT)]
    return tuple(sorted(sources, key=lambda file: file.relative_to(folder).parts))
