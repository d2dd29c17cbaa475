"""How a model is spread over processes: one file an axis."""
