"""Turns text or tokens into batches of token ids, in an order that no layout changes. Never imports torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
