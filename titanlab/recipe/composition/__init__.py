"""Composes a recipe from the user's overrides with Hydra, and turns Hydra's errors into ConfigErrors."""
