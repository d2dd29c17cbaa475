"""The root of the configuration, the rules that cross groups, the pipeline split, composition by Hydra."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
