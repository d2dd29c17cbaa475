"""Activation checkpointing: what a block's forward pass keeps for its backward, and what is computed again."""
