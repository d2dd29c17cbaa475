"""A run's folder with checkpoints that no training has written."""

from __future__ import annotations

import torch
from torch import nn

from tests import tiny
from tests.checkpoint.one_process import ALONE
from titanlab.checkpoint import Position, Target, saving
from titanlab.checkpoint.folders import step_folder


def module(model, seed=0):
    """A module with a model's parameters under their names, and no forward."""
    generator = torch.Generator().manual_seed(seed)
    root = nn.Module()
    for name, shape in model.account().parameters.items():
        *path, leaf = name.split(".")
        owner = root
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner._modules[step]
        owner.register_parameter(leaf, nn.Parameter(torch.randn(shape, generator=generator)))
    return root


def save(run, model, *, step=1, seed=0, **position):
    """A checkpoint of a run. Returns its folder."""
    made = module(model, seed)
    optimizer = torch.optim.SGD(made.parameters())
    target = Target(folder=run.checkpoints, model=made, optimizer=optimizer, world=ALONE, keep=0)
    saving.SyncSaver(target).save(Position(step=step, **position))
    return step_folder(run.checkpoints, step)


def run_of(folder, **given):
    """A recipe, and its run, which has begun and has no checkpoint."""
    recipe = tiny.recipe(folder, **given)
    return recipe, tiny.begin(recipe)
