"""Checks of a machine before anything is trained on it: software, devices, Slurm, storage, limits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
