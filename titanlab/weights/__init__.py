"""Weights without a run: folders of safetensors in our names, and where else a model's tensors may come from."""
