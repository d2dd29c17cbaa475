"""Starts the emulated store, and makes processes know its file system."""

import contextlib
import os
import threading
from pathlib import Path

import fsspec

from tests.object_store.emulated_store import NAME, EmulatedStore
from tests.object_store.server import StoreServer

FOLDER = "emu://bucket/checkpoints"


@contextlib.contextmanager
def running():
    """A server in a thread of this process, which this process knows."""
    server = StoreServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    before = os.environ.get(NAME)
    known(server.endpoint)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        if before is None:
            del os.environ[NAME]
        else:
            os.environ[NAME] = before


def known(endpoint):
    """Let this process use a server."""
    os.environ[NAME] = endpoint
    fsspec.register_implementation("emu", EmulatedStore, clobber=True)


def package(folder: Path) -> Path:
    """A folder for PYTHONPATH, with the file system as an installed package that says so by an entry point."""
    (folder / "emulated_store.py").write_text(Path(__file__).with_name("emulated_store.py").read_text())
    about = folder / "emulated_store-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-store\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nemu = emulated_store.EmulatedStore\n")
    return folder
