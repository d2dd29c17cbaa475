"""What `titanlab plan` learns of a machine: from runs, or by measuring it."""
