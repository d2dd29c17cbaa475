"""Which parts of a model torch compiles."""
