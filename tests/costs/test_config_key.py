"""Keys of configs, with which caches are asked."""

from __future__ import annotations

import dataclasses

from titanlab.costs import config_key
from titanlab.costs.config_key import key_of
from titanlab.costs.layout import Layout
from titanlab.parallelism.schema import Parallelism


def test_configs_with_the_same_text_have_one_key():
    one, same, other = Parallelism(tensor=2), Parallelism(tensor=2), Parallelism(tensor=4)
    assert key_of(one) is key_of(one) is key_of(same)
    assert key_of(other) is not key_of(one)
    assert key_of(other).value is other


def test_classes_of_one_name_have_keys_of_their_own():
    """Such as a user's model that is called Llama too."""

    def made():
        @dataclasses.dataclass(frozen=True)
        class Llama:
            layers: int = 2

        return Llama()

    one, other = made(), made()
    assert repr(one) == repr(other)
    assert key_of(one) is not key_of(other)
    assert key_of(one).value is one


def test_keys_that_were_let_go_are_made_again(monkeypatch):
    monkeypatch.setattr(config_key, "_MOST_KEYS", 4)
    for number in range(20):
        config = Parallelism(tensor=number + 1)
        assert key_of(config).text == repr(config)
        assert key_of(config).value == config
        assert len(config_key._BY_IDENTITY) <= 4


def test_a_layout_that_was_asked_for_is_not_that_of_changed_degrees():
    config = Parallelism(tensor=2, shard=4)
    assert (config.layout, config.layout.world) == (Layout(tensor=2, shard=4), 8)
    changed = dataclasses.replace(config, tensor=1)
    assert (changed.layout, changed.layout.world) == (Layout(shard=4), 4)
    assert repr(changed) == repr(Parallelism(shard=4))
