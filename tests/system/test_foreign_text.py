"""Text of other programs cannot control the terminal that shows it."""

import pytest

from titanlab.system import harmless


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain text, 100 %", "plain text, 100 %"),
        ("a\ttab stays", "a\ttab stays"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[H", "^[[2J^[[H"),
        ("\x1b]0;title\x07", "^[]0;title^G"),
        ("50%\r100%\r", "50%^M100%"),
        ("\x9b31m", "\\u009b31m"),
        ("a\u202eb", "a\\u202eb"),
        ("über · 語", "über · 語"),
        ("\udcff", "\\udcff"),
    ],
)
def test_control_characters_are_shown_and_do_nothing(line, shown):
    assert harmless(line) == shown
