"""The errors a person can cause, each of which says what to do about it."""

from __future__ import annotations


class TitanlabError(Exception):
    """An error with a message made for people; shown without a traceback."""

    exit_code = 1


class ConfigError(TitanlabError):
    """A value that a person gave breaks a rule.

    Shown as one line, `key=value: rule; cure`, with exit code 2, before anything starts.
    """

    exit_code = 2

    def __init__(self, key: str, value: object, rule: str, cure: str) -> None:
        self.key = key
        self.value = value
        self.rule = rule
        self.cure = cure
        super().__init__(f"{key}={_shown(value)}: {rule}; {cure}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return (type(self), (self.key, self.value, self.rule, self.cure))


def _shown(value: object) -> str:
    """The value as it is typed in an override, on one line and of bounded length."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = " ".join(str(value).split())
    return text if len(text) <= 120 else text[:117] + "..."
