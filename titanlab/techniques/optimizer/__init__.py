"""Optimizers, which turn gradients into steps, and schedules of the learning rate."""
