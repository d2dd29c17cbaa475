"""One step of a recipe's real assembly on tensors without data, compared with what the planner declares."""
