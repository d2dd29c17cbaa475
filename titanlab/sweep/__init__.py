"""Sweeps: a space of recipes, its folder, and what is submitted of it."""
