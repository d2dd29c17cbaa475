"""titanlab: compose, run, prove and compare LLM training recipes on native PyTorch."""

__version__ = "0.1.0"
