"""What the tests of savers save, and the sums of what they have saved."""

from __future__ import annotations

import hashlib
import threading

import torch
from torch import nn

from titanlab.checkpoint import Position, store
from titanlab.distributed import World

ALONE = World(rank=0, world=1, local_rank=0, device=torch.device("cpu"))


def trained(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    return model, optimizer


class Gate:
    """Lets a save write when it is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.writes = []
        real = store.write

        def write(*given):
            self.opened.wait(120)
            self.writes.append(threading.current_thread().name)
            return real(*given)

        monkeypatch.setattr(store, "write", write)


def sums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def saved_by(saver, step=1):
    saver.save(Position(step=step))
    saver.wait()
