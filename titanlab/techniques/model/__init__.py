"""Models: their modules, their configs, and what they declare about parameters and costs."""
