"""Orders in which the stages of a pipeline work on microbatches."""
