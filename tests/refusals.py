"""What a refusal says."""

import pytest

from titanlab.errors import ConfigError


def refusal(action, *given, **named):
    """The one line with which `action(*given, **named)` is refused."""
    with pytest.raises(ConfigError) as caught:
        action(*given, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)
