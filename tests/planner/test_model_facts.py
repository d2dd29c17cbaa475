"""Keys of configs, with which the planner's caches are asked."""

from __future__ import annotations

import dataclasses

from titanlab.costs.config_key import key_of
from titanlab.costs.layout import Layout
from titanlab.parallelism.schema import Parallelism
from titanlab.planner import model_facts


def test_configs_with_the_same_text_have_one_key():
    one, same, other = Parallelism(tensor=2), Parallelism(tensor=2), Parallelism(tensor=4)
    assert key_of(one) is key_of(one) is key_of(same)
    assert key_of(other) is not key_of(one)
    assert key_of(other).value is other


def test_keys_that_were_let_go_are_made_again(monkeypatch):
    monkeypatch.setattr(model_facts, "_MOST_KEYS", 4)
    for number in range(20):
        config = Parallelism(tensor=number + 1)
        assert key_of(config).text == repr(config)
        assert key_of(config).value == config


def test_a_layout_that_was_asked_for_is_not_that_of_changed_degrees():
    config = Parallelism(tensor=2, shard=4)
    assert (config.layout, config.layout.world) == (Layout(tensor=2, shard=4), 8)
    changed = dataclasses.replace(config, tensor=1)
    assert (changed.layout, changed.layout.world) == (Layout(shard=4), 4)
    assert repr(changed) == repr(Parallelism(shard=4))
