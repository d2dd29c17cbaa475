"""A GPT for titanlab, from outside: a model, a way of checkpointing, a precision."""
