"""Saves a run's whole state, and loads it so that the run can resume."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
