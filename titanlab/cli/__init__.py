"""The command line: each module has the functions of one or a few verbs."""

from titanlab.cli.verbs import main

__all__ = ["main"]
