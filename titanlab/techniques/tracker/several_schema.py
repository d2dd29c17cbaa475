"""tracker=jsonl, the run's own rows alone, and several at once: `tracker=[wandb,tensorboard]`. Both need no package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.errors import ConfigError
from titanlab.options import combines, option
from titanlab.techniques.tracker.contract import TrackedRun, Tracker, TrackerConfig, Warn, file_of

if TYPE_CHECKING:
    from titanlab.costs.setting import Setting


@option("tracker", "jsonl")
@dataclass(frozen=True, kw_only=True)
class Jsonl(TrackerConfig):
    """Only the run's own metrics.jsonl."""

    kind: str = "jsonl"

    def implementation(self) -> Tracker:
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


class JsonlTracker(Tracker):
    """Does nothing: the run writes metrics.jsonl and result.json itself."""

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        """Nothing to open."""

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """The row is in metrics.jsonl already."""

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        """The summary is in result.json already."""


class SeveralTrackers(Tracker):
    """Passes everything on to each tracker; an error of one never reaches the others.

    Args:
        configs: config of each tracker, by the name of its option.
    """

    _warn: Warn

    def __init__(self, configs: Mapping[str, TrackerConfig]) -> None:
        self._trackers: dict[str, tuple[Tracker, str]] = {}
        for name, config in configs.items():
            self._trackers[name] = config.implementation(), file_of(config.kind)

    def start(self, run: TrackedRun, *, warn: Warn) -> None:
        self._warn = warn
        self._call(lambda tracker, file: tracker.start(replace(run, record_file=file), warn=warn))

    def log(self, step: int, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        self._call(lambda tracker, _: tracker.log(step, metrics, time=time))

    def finish(self, summary: Mapping[str, Any], *, exit_code: int = 0) -> None:
        self._call(lambda tracker, _: tracker.finish(summary, exit_code=exit_code))

    def kept_files(self, run: Path) -> frozenset[Path]:
        return frozenset(path for tracker, _ in self._trackers.values() for path in tracker.kept_files(run))

    def put_aside(self, run: Path, paths: Iterable[Path], *, keep: bool) -> None:
        paths = set(paths)
        for tracker, _ in self._trackers.values():
            tracker.put_aside(run, paths & tracker.kept_files(run), keep=keep)

    def _call(self, action: Callable[[Tracker, str], None]) -> None:
        for name, (tracker, file) in list(self._trackers.items()):
            try:
                action(tracker, file)
            # A tracker of another package may raise anything; the run and the other trackers go on.
            except Exception as error:
                del self._trackers[name]
                self._warn(f"{name} stopped ({type(error).__name__}: {error}); metrics.jsonl goes on")
