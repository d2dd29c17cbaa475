"""What ranks import before their first step. Ranks of one host that are forked share it (`titanlab.worker.fork`)."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType

from titanlab.recipe.recipe import Recipe
from titanlab.system.imports import import_quietly, kept_imports


def import_trainer() -> None:
    """Import the training loop, and what every recipe needs of torch before its first step."""
    with kept_imports(), _frames_know_their_module():
        importlib.import_module("titanlab.train.train")
        # Optimizers, DDP, FSDP2 and DTensor import it when they are first used.
        importlib.import_module("torch._dynamo")


def import_techniques(recipe: Recipe) -> None:
    """Import what a recipe's techniques need, before the fork and not in every rank."""
    # A failure here is a failure of every rank too, which records it.
    with kept_imports(), _frames_know_their_module(), contextlib.suppress(Exception):
        for config in (recipe.model, recipe.precision, recipe.ac, recipe.optimizer):
            config.implementation()
        if recipe.layout.pipeline > 1:
            importlib.import_module("titanlab.parallelism.pipeline")
        if recipe.precision.layer_class:
            # torchao alone takes seconds.
            import_quietly(recipe.precision.layer_class.rpartition(".")[0])


@contextlib.contextmanager
def _frames_know_their_module() -> Iterator[None]:
    """Find the module of a frame by its name inside the block.

    torch asks `inspect` for it and for the source line of every operator that it registers (`torch/library.py`), and
    `inspect` looks up the real path of each module that is imported: two fifths of the 43,000 file calls of a rank's
    imports. This can go when torch asks for neither.
    """
    searched = inspect.getmodule

    def module_of(object: object, _filename: str | None = None) -> ModuleType | None:  # noqa: A002
        if isinstance(object, FrameType):
            return sys.modules.get(object.f_globals.get("__name__", ""))
        return searched(object, _filename)

    inspect.getmodule = module_of
    try:
        yield
    finally:
        inspect.getmodule = searched
