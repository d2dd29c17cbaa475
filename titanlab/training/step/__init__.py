"""What a step computes with."""
