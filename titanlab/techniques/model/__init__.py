"""Models: what they compute, their schemas, and their accounts."""
