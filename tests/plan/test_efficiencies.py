"""Efficiencies: limits of each, changes by name, and the file that the fit writes."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from titanlab.errors import ConfigError
from titanlab.plan.machine import (
    DEFAULTS,
    LIMITS,
    Efficiencies,
    allocator_excess,
    changed,
    file_text,
    fitted,
)


def test_each_efficiency_has_limits_and_a_default_within_them():
    assert set(LIMITS) == set(DEFAULTS) == {field.name for field in dataclasses.fields(Efficiencies)}
    assert all(least <= DEFAULTS[name] <= most for name, (least, most) in LIMITS.items())


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_allowed_and_what_is_beyond_is_refused(name):
    least, most = LIMITS[name]
    for value in (least, most):
        assert getattr(Efficiencies(**{name: value}), name) == value
    for value in (least - 1e-3, most + 1e-3, math.nan, math.inf, "0.5", None, True, [0.5], 10**400):
        with pytest.raises(ConfigError) as caught:
            Efficiencies(**{name: value})
        assert str(caught.value).startswith(f"cluster.efficiencies.{name}=")
        assert f"must lie between {least:g} and {most:g}; try {DEFAULTS[name]:g}, or leave it out" in str(caught.value)


def test_values_are_changed_by_name():
    base = Efficiencies(link=0.5)
    assert changed(base, {}) == base
    assert changed(base, {"product": 0.25}) == Efficiencies(link=0.5, product=0.25)
    with pytest.raises(ConfigError, match=r"^cluster\.efficiencies\.produkt=1: is no efficiency; there are product, "):
        changed(base, {"produkt": 1})


def test_the_file_has_four_digits_and_what_is_read_is_what_was_written():
    found = Efficiencies(product=0.123456, stragglers=0.0, launch_seconds=1.23456e-6, latency=999.96)
    content = json.loads(file_text(found, {"runs": 3}))
    assert content.pop("runs") == 3
    assert content["efficiencies"]["product"] == 0.1235
    assert content["efficiencies"]["launch_seconds"] == pytest.approx(1.235e-6)
    assert content["efficiencies"]["latency"] == 1000.0
    read = changed(Efficiencies(), content["efficiencies"])
    assert json.loads(file_text(read, {})) == content


def test_the_published_fit_is_within_the_limits():
    assert fitted() == changed(fitted(), {})
    assert 1.0 <= allocator_excess() < 1.5
