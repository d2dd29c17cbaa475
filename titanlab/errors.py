"""Errors that users can cause; each message says what to do."""

from __future__ import annotations


class TitanlabError(Exception):
    """An error whose message is shown to the user without a traceback."""

    exit_code = 1


class ConfigError(TitanlabError):
    """A user's value breaks a rule; shown as one line, `key=value: rule; cure`, before anything starts; exit code 2."""

    exit_code = 2

    def __init__(self, key: str, value: object, rule: str, cure: str) -> None:
        self.key = key
        self.value = value
        self.rule = rule
        self.cure = cure
        super().__init__(f"{key}={_shown(value)}: {rule}; {cure}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return (type(self), (self.key, self.value, self.rule, self.cure))

    @property
    def problem(self) -> str:
        """The value and the rule that it breaks, without the cure."""
        return f"{self.key}={_shown(self.value)}: {self.rule}"


class DamagedPosition(ConfigError):
    """The position in a checkpoint has a value that no run saves; the run then resumes from the previous checkpoint."""


def _shown(value: object) -> str:
    """The value as text for an override, in one line of bounded length."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(str(list(value) if isinstance(value, tuple) else value).split())
    return text if len(text) <= 120 else text[:117] + "..."
