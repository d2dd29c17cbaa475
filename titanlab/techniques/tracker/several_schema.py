"""Configs of tracker=jsonl, the run's own rows alone, and of several at once: `tracker=[wandb,tensorboard]`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlab.errors import ConfigError
from titanlab.options import combines, option
from titanlab.techniques.tracker.contract import Tracker, TrackerConfig

if TYPE_CHECKING:
    from titanlab.costs.setting import Setting


@option("tracker", "jsonl")
@dataclass(frozen=True, kw_only=True)
class Jsonl(TrackerConfig):
    """Only the run's own metrics.jsonl."""

    kind: str = "jsonl"

    def implementation(self) -> Tracker:
        from titanlab.techniques.tracker.several import JsonlTracker

        return JsonlTracker()


@combines("tracker")
class Several(TrackerConfig):
    """Trackers that get the same rows; each has a field of its option's name.

    `options.combination` makes the dataclass for a list of options: for `[wandb,tensorboard]` it has the fields `kind`
    (`wandb+tensorboard`), `wandb` and `tensorboard`.
    """

    def parts(self) -> Mapping[str, TrackerConfig]:
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: config for name, config in values.items() if name != "kind"}

    def implementation(self) -> Tracker:
        from titanlab.techniques.tracker.several import SeveralTrackers

        return SeveralTrackers(self.parts())

    def check(self, setting: Setting) -> None:
        kinds: dict[str, str] = {}
        for name, config in self.parts().items():
            if config.kind in kinds:
                rule = f"has two trackers of kind {config.kind}: {kinds[config.kind]} and {name}"
                raise ConfigError("tracker", f"[{','.join(self.parts())}]", rule, "leave one of them out")
            kinds[config.kind] = name
            config.check(setting)

    def check_installed(self) -> None:
        for config in self.parts().values():
            config.check_installed()
