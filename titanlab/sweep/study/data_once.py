"""Checks, fingerprints and prepares data that many points share, once for each data."""

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
from titanlab.sweep.study.space import canonical_text
from titanlab.train.starting_weights import start_fingerprint

# Keys of files and folders: what is wrong with them here may be right where the runs are.
_PLACES = ("data.files", "data.folder", "data.path", "data.tokenizer", "init_from", "checkpoint.load_from")


class DataOnce:
    """Remembers results for the data of a sweep's recipes.

    Args:
        elsewhere: data and starting weights need not be on this host.
    """

    def __init__(self, *, elsewhere: bool = False) -> None:
        self._elsewhere = elsewhere
        self._results: dict[str, Any] = {}
        # Once data is prepared, more rules can be checked: results of `check` from before are not used again.
        self._prepared: set[str] = set()

    def check(self, recipe: Recipe) -> None:
        """Check the rules on a recipe's data that can be checked at this time.

        Raises:
            ConfigError: it breaks a rule.
        """
        training = recipe.training
        inputs = [training.seq_len, training.global_batch, recipe.layout.data, recipe.model.vocab_size]
        inputs += [training.validation_sequences, training.validate_every]
        try:
            is_prepared = canonical_text(_plain(recipe)) in self._prepared
            self._once(["check", is_prepared, _plain(recipe), inputs], lambda: check_data(recipe))
        except ConfigError as error:
            if not (self._elsewhere and error.key in _PLACES):
                raise

    def prepare(self, recipe: Recipe, report: Callable[[str], None]) -> None:
        """Prepare a recipe's data, and check the rules that need the prepared data.

        Raises:
            Unfit: the data cannot be used, or this recipe cannot use it.
        """
        try:
            self._once(["prepare", _plain(recipe)], lambda: source.prepare(recipe.data, report=report))
            self._prepared.add(canonical_text(_plain(recipe)))
            self.check(recipe)
        except ConfigError as error:
            raise Unfit("rule", error) from error

    def identify(self, recipe: Recipe) -> Identity:
        """The identity of a checked recipe."""
        data = self._here(["fingerprint", _plain(recipe)], lambda: source.fingerprint(recipe.data))
        weights = self._here(["weights", recipe.init_from], lambda: start_fingerprint(recipe))
        hardware = str(recipe.cluster.device)
        return identify(recipe, data=data, hardware=hardware, repeat=recipe.repeat, weights=weights)

    def _here(self, inputs: list[Any], act: Callable[[], Any]) -> Any:
        """The result; `elsewhere` instead if the files are not here and need not be."""
        try:
            return self._once(inputs, act)
        except ConfigError as error:
            if not (self._elsewhere and error.key in _PLACES):
                raise
            return "elsewhere"

    def _once(self, inputs: list[Any], act: Callable[[], Any]) -> Any:
        key = canonical_text(inputs)
        if key not in self._results:
            try:
                self._results[key] = act()
            except ConfigError as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, ConfigError):
            raise result
        return result


def _plain(recipe: Recipe) -> Any:
    return [type(recipe.data).__qualname__, dataclasses.asdict(recipe.data)]
