"""What ranks import before their first step. Ranks of one host that are forked share it (`titanlab.worker.fork`)."""

from __future__ import annotations

import contextlib
import importlib

from titanlab.recipe.recipe import Recipe
from titanlab.system.kept_imports import kept_imports
from titanlab.system.quiet_import import import_quietly


def import_trainer() -> None:
    """Import the training loop, and what every recipe needs of torch before its first step."""
    with kept_imports():
        importlib.import_module("titanlab.training.train")
        # Optimizers, DDP, FSDP2 and DTensor import it when they are first used.
        importlib.import_module("torch._dynamo")


def import_techniques(recipe: Recipe) -> None:
    """Import what a recipe's techniques need, before the fork and not in every rank."""
    # A failure here is a failure of every rank too, which records it.
    with kept_imports(), contextlib.suppress(Exception):
        for config in (recipe.model, recipe.precision, recipe.ac, recipe.optimizer):
            config.implementation()
        if recipe.layout.pipeline > 1:
            importlib.import_module("titanlab.parallelism.pipeline")
        if recipe.precision.layer_class:
            # torchao alone takes seconds.
            import_quietly(recipe.precision.layer_class.rpartition(".")[0])
