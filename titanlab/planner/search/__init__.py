"""The space of recipes of a world, the search for the fastest that fit, and the plan as text."""
