"""How a model is distributed over processes: one file per axis."""
