"""Sweeps: a space of recipes, its folder, and its submissions."""
