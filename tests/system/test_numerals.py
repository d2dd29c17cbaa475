"""Numbers as people read them."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from titanlab.system import counted, duration, grouped, short, short_span, significant, trimmed
from titanlab.system.text import rate


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (grouped(8030261248), "8,030,261,248"),
        (grouped(18432.4), "18,432"),
        (grouped(float("nan")), "nan"),
        (counted(1, "run"), "1 run"),
        (counted(1234, "run"), "1,234 runs"),
        (counted(0, "process", "processes"), "0 processes"),
        (trimmed(0.5), "0.5"),
        (trimmed(12.0), "12"),
        (trimmed(1800), "1800"),
        (trimmed(999.96), "1000"),
        (trimmed(0.001), "0.001"),
        (trimmed(2.5e-9), "2.50e-09"),
        (trimmed(0), "0"),
        (trimmed(float("inf")), "inf"),
        (short(0), "0"),
        (short(512), "512"),
        (short(999), "999"),
        (short(1000), "1.00K"),
        (short(16_777_216), "16.8M"),
        (short(999_999), "1.00M"),
        (short(8_030_261_248), "8.03B"),
        (short(405_853_388_800), "406B"),
        (short(2.6e12), "2.60T"),
        (short(-1500), "-1.50K"),
        (short(12.345), "12.3"),
        (short(5e21), "5000E"),
        (short(float("inf")), "inf"),
        (significant(0.012345), "0.0123"),
        (significant(123.456), "123"),
        (significant(99.96), "100"),
        (significant(12345), "12300"),
        (significant(0), "0"),
        (significant(1e-6), "0.00000100"),
        (significant(1e-9), "1.00e-09"),
        (significant(1.234e30), "1.23e+30"),
        (significant(9_999_999), "1.00e+07"),
        (significant(1.797e308), "1.80e+308"),
        (significant(float("nan")), "nan"),
        (duration(0), "0:00"),
        (duration(7.4), "0:07"),
        (duration(59.6), "1:00"),
        (duration(3599.6), "1:00:00"),
        (duration(3723), "1:02:03"),
        (duration(3 * 86400 + 4 * 3600 + 5 * 60 + 6), "3d 4:05:06"),
        (duration(-1), "0:00"),
        (duration(float("inf")), "?"),
        (short_span(0), "0 µs"),
        (short_span(0.000812), "812 µs"),
        (short_span(0.0123), "12.3 ms"),
        (short_span(0.9996), "1.00 s"),
        (short_span(0.0009996), "1.00 ms"),
        (short_span(83.2), "83.2 s"),
        (short_span(float("nan")), "?"),
        (rate(3e-4), "3.00e-04"),
        (rate(0.0), "0"),
    ],
)
def test_forms(shown, expected):
    assert shown == expected


@given(st.floats(1e-12, 1e15))
def test_significant_digits_keep_the_value(value):
    assert float(significant(value, 4)) == pytest.approx(value, rel=5.1e-4)


@given(st.floats(1, 1e17))
def test_a_short_count_is_short_and_near(value):
    text = short(value)
    assert len(text) <= 5
    factor = 1000 ** "KMBTP".find(text[-1]) * 1000 if text[-1].isalpha() else 1
    assert float(text.rstrip("KMBTP")) * factor == pytest.approx(value, rel=5.1e-3)
