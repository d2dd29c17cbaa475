"""What stands in a block of a page and is not executed at reduced size, each with its reason: this is the one list of it.

All other commands are executed: those that train by tests/docs/test_executed.py, all others by tests/docs/test_commands.py,
which also types those that are listed here and checks them as before a start.
"""

from __future__ import annotations

import re

from tests.docs.pages import Block

# Commands, by a pattern of their text. The first that fits counts.
COMMANDS: tuple[tuple[str, str], ...] = (
    (r"make test$", "it is what runs this test"),
    (r"make quickstart TORCH_INSTALL_ARGS", "a placeholder: the reader puts an address in; the target is executed"),
    (
        r"make quickstart$",
        "four minutes: tests/test_quickstart.py trains it, tests/notebooks runs a short form of its sweep",
    ),
    (r"make environment$", "it installs packages; .ci/run begins with it"),
    (r"\. \.venv/bin/activate$", "it changes the reader's shell, and nothing else"),
    (r".*jupyter lab ", "it opens a browser; tests/notebooks executes each notebook"),
    (r"jupytext --sync", "it would write to the repository; tests/notebooks compares both files"),
    (r"launch/dev-slurm|eval \"\$\(launch/dev-slurm|sacct$", "they start a Slurm; tests/slurm does so"),
    (r"python -m venv ~/torch-2.11|~/torch-2.11/", "they install an older torch"),
    (r"python benchmarks/gpu_attention", "it needs a GPU; tests/benchmarks rehearses it on a CPU"),
