"""Number formats in which a model computes, reduces gradients and keeps its parameters."""
