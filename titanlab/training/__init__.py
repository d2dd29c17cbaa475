"""One run: from a recipe to a finished training."""
