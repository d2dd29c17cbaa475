"""What the tests of savers save, and the sums of what they have saved."""

from __future__ import annotations

import hashlib
import threading

from tests.checkpoint.one_process import trained as of_size
from titanlab.checkpoint import Position, saving


def trained(seed=0):
    return of_size(seed, size=300)


class Gate:
    """Lets a save write when it is opened."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.writes = []
        real = saving.write

        def write(*given):
            self.opened.wait(120)
            self.writes.append(threading.current_thread().name)
            return real(*given)

        monkeypatch.setattr(saving, "write", write)


def sums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def saved_by(saver, step=1):
    saver.save(Position(step=step))
    saver.wait()
