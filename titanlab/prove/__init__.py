"""Checks that two recipes train the same, that recipes can run, and that a step stores and sends what it declares."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
