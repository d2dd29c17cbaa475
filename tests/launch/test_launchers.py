"""The launchers that are installed."""

from dataclasses import dataclass

import pytest

from titanlab.errors import ConfigError
from titanlab.launch import LaunchConfig, default_config, launchers


@dataclass(kw_only=True)
class Demanding(LaunchConfig):
    kind: str = "demanding"
    queue: str

    def implementation(self):
        raise AssertionError("is not made")


def test_a_launcher_whose_config_lacks_a_default_is_one_line(monkeypatch):
    """Each rank asks every launcher whether that has started it."""
    monkeypatch.setattr(launchers, "schema_of", lambda group, kind: Demanding)
    with pytest.raises(
        ConfigError, match=r"^launch=demanding: cannot be made without settings \(.*'queue'\); its fields"
    ):
        default_config("demanding")
