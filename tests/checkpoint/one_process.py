"""One process that writes checkpoints, without a run and without a training."""

from __future__ import annotations

import torch
from torch import nn

from titanlab.checkpoint import Position, Target, saving
from titanlab.checkpoint.folders import step_folder
from titanlab.distributed import World

ALONE = World(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


def trained(seed=0, size=3):
    """A model and its optimizer after one step."""
    torch.manual_seed(seed)
    model = nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, size)).sum().backward()
    optimizer.step()
    return model, optimizer


def saved(folder, step=1, *, made=None, keep=0, only_model=None, **given):
    """Save a checkpoint of a small model. Returns its folder."""
    model, optimizer = made or trained()
    target = Target(folder=folder, model=model, optimizer=optimizer, world=ALONE, keep=keep, **given)
    saving.SyncSaver(target).save_last(Position(step=step), only_model)
    return step_folder(folder, step)
