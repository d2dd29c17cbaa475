"""Checks, fingerprints and preparation of data, which many points share: each is done once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from titanlab.data import source
from titanlab.errors import ConfigError
from titanlab.recipe.recipe import Recipe
from titanlab.recipe.recipe_rules import check_data
from titanlab.records.identity import Identity, identify
from titanlab.sweep.study.prune import Unfit
from titanlab.sweep.study.space import same
from titanlab.weights.starting_weights import start_fingerprint


class DataOnce:
    """What is known of the data of a sweep's recipes."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}
        # Some data has been: then more rules on data can be checked, and what was told before is asked again.
        self._prepared = False

    def check(self, recipe: Recipe) -> None:
        """Hold a recipe to the rules on its data that can be checked at this time.

        Raises:
            ConfigError: it breaks one.
        """
        training = recipe.training
        asked = [training.seq_len, training.global_batch, recipe.layout.data, recipe.model.vocab_size]
        asked += [training.validation_sequences, training.validate_every]
        self._once(["check", self._prepared, _plain(recipe), asked], lambda: check_data(recipe))

    def prepare(self, recipe: Recipe, report: Callable[[str], None]) -> None:
        """Prepare a recipe's data, and hold the recipe to the rules on the data itself.

        Raises:
            Unfit: the data cannot be used, or not by this recipe.
        """
        try:
            self._once(["prepare", _plain(recipe)], lambda: source.prepare(recipe.data, report=report))
            self._prepared = True
            self.check(recipe)
        except ConfigError as error:
            raise Unfit("rule", error) from error

    def identify(self, recipe: Recipe) -> Identity:
        """The identity of a checked recipe."""
        data = self._once(["fingerprint", _plain(recipe)], lambda: source.fingerprint(recipe.data))
        weights = self._once(["weights", recipe.init_from], lambda: start_fingerprint(recipe))
        hardware = str(recipe.cluster.device)
        return identify(recipe, data=data, hardware=hardware, repeat=recipe.repeat, weights=weights)

    def _once(self, what: list[Any], act: Callable[[], Any]) -> Any:
        key = same(what)
        if key not in self._told:
            try:
                self._told[key] = act()
            except ConfigError as error:
                self._told[key] = error
        told = self._told[key]
        if isinstance(told, ConfigError):
            raise told
        return told


def _plain(recipe: Recipe) -> Any:
    return [type(recipe.data).__qualname__, dataclasses.asdict(recipe.data)]
