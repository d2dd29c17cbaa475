"""From values that a person gives to a recipe: what Hydra is told, and what it says translated."""
