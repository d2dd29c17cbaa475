"""Labels, titles and sizes that all figures share."""

import pytest

from titanlab.report.figures.style import label_text, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("plain", "plain"),
        ("a\tb\nc", "a�b�c"),
        ("\x00\x1b[31m", "��[31m"),
        # Marks that turn the direction of writing, and those that have no width.
        ("a\u202eb\u2066c\u200b", "a�b�c�"),
        # What joins letters or parts of an emoji stays.
        ("न\u200dई \u200c", "न\u200dई \u200c"),
        ("日本 é 🚀", "日本 é 🚀"),
    ],
)
def test_characters_without_a_shape_are_replaced(text, shown):
    assert printable(text) == shown
    assert printable("a\nb\tc\ud800", kept="\n\t") == "a\nb\tc\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("", ""),
        ("  a \n b  ", "a b"),
        ("a" * 44, "a" * 44),
        ("a" * 45, "a" * 29 + "…" + "a" * 14),
        # No text is read as a formula.
        ("$x$ $", r"\$x\$ \$"),
        # The groups of keys go before letters do.
        ("dp_s2·tp2 · optimizer.schedule.warmup_steps 100", "dp_s2·tp2 · warmup_steps 100"),
        ("dp_s2 · optimizer.lr 0.1", "dp_s2 · optimizer.lr 0.1"),
    ],
)
def test_a_label_is_one_line_that_is_not_too_long(text, label):
    assert label_text(text) == label
