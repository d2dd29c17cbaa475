"""The command line: one module a verb."""

from titanlab.cli.verbs import main

__all__ = ["main"]
