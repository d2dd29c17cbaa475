"""What turns gradients into steps, and the schedule of its learning rate."""
