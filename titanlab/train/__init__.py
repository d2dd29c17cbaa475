"""One training run, from a recipe to its outcome."""
