"""The rules that configs of models with experts share. Torch-free."""

from __future__ import annotations

from titanlab.errors import ConfigError


def check_experts(count: int, active: int) -> None:
    """Check the numbers of experts.

    Raises:
        ConfigError: there are fewer than two, or a token would have fewer than two or more than there are.
    """
    if count < 2:
        rule = "must be at least 2: one expert is a dense feed-forward"
        raise ConfigError("model.experts", count, rule, "try 8, or a dense model")
    if active < 2:
        rule = "must be at least 2: the weight of a single expert is always 1, so that its router would learn nothing"
        raise ConfigError("model.active_experts", active, rule, "try 2")
    if active > count:
        rule = f"is more than the {count} experts"
        raise ConfigError("model.active_experts", active, rule, f"try {count}")
