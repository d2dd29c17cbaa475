"""Configs of trackers, and tracker=jsonl and several trackers at once, which need no package. Torch-free."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlab.errors import ConfigError
from titanlab.options import combines, option
from titanlab.techniques.tracker.contract import TrackedRun, Tracker, TrackerConfig, Warn, file_of

if TYPE_CHECKING:
    from titanlab.costs import Setting


@option("tracker", "tensorboard")
@dataclass(frozen=True, kw_only=True)
class TensorBoard(TrackerConfig):
    """Event files in the run's folder, for `tensorboard --logdir runs`.

    Attributes:
        flush_seconds: seconds between writes of rows to disk.
    """

    kind: str = "tensorboard"
    flush_seconds: int = field(default=10, metadata={"least": 1})

    def implementation(self) -> Tracker:
        from titanlab.techniques.tracker.tensorboard import TensorBoardTracker

        return TensorBoardTracker(self)

    def check_installed(self) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            cure = "pip install tensorboard, or try tracker=jsonl"
            raise ConfigError("tracker", "tensorboard", "the package is not installed", cure)

    def for_rebuild(self, rows: int) -> TensorBoard:
        return self


_NAME = re.compile(r"[^/\\#?%:]{1,128}")


@option("tracker", "wandb")
@dataclass(frozen=True, kw_only=True)
class Wandb(TrackerConfig):
    """Weights & Biases, in a separate process.

    Attributes:
        mode: `online`, `offline` (files for `wandb sync`), `at_end` (such files, written from metrics.jsonl when the
            run has ended), `off`, or `auto`: the value of WANDB_MODE, or online if it is not set. Without an API key,
            online becomes offline.
        project: null: WANDB_PROJECT, or titanlab.
        entity: user or team; null: the account's default.
        group: null: the sweep's name, so that a dashboard compares its recipes.
        tags: added to those of model, hardware and precision.
        finish_seconds: how long the end of a run may wait for uploads; rows that are not uploaded stay on disk.
        queue_rows: rows that can wait while wandb starts or the network is slow; further rows are left out.
    """

    kind: str = "wandb"
    mode: str = field(default="auto", metadata={"choices": ("auto", "online", "offline", "at_end", "off")})
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    finish_seconds: float = field(default=10.0, metadata={"least": 0})
    queue_rows: int = field(default=10_000, metadata={"least": 1})

    def __post_init__(self) -> None:
        for name in ("project", "entity", "group"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                rule = r"must be 1 to 128 characters without / \ # ? % :"
                raise ConfigError(f"tracker.{name}", value, rule, f"try tracker.{name}=titanlab")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ConfigError("tracker.tags", tag, "a tag has 1 to 64 characters", "shorten it")

    def implementation(self) -> Tracker:
        from titanlab.techniques.tracker.wandb import WandbTracker

        return WandbTracker(self)

    @property
    def is_written_at_end(self) -> bool:
        return self.mode == "at_end"

    def check_installed(self) -> None:
        # With `at_end` the run itself does not need wandb; a line at its end says if the package is missing.
        if self.mode not in ("off", "at_end") and importlib.util.find_spec("wandb") is None:
            cure = "pip install wandb, or try tracker=jsonl"
            raise ConfigError("tracker", "wandb", "the package is not installed", cure)

    def for_rebuild(self, rows: int) -> Wandb:
        # wandb takes about 5,000 rows a second, so this time limit is generous.
        return replace(self, mode="offline", queue_rows=rows + 1, finish_seconds=120 + rows / 100)


def choice_for_sweeps(environ: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """The tracker of a sweep that names none, and lines for the user that explain a choice which may surprise."""
    mode = environ.get("WANDB_MODE")
    if mode == "disabled":
        return "jsonl", ()
    if importlib.util.find_spec("wandb") is None:
        return "jsonl", ("wandb is not installed, so its files are not written; metrics.jsonl has everything",)
    return "wandb" if mode == "online" else "wandb_at_end", ()


@option("tracker", "jsonl")
@dataclass(frozen=True, kw_only=True)
class Jsonl(TrackerConfig):
    """Only the run's own metrics.jsonl."""

    kind: str = "jsonl"

    def implementation(self) -> Tracker:
        return JsonlTracker()


@combines("tracker")
class Several(TrackerConfig):
    """Several trackers that get the same rows; the config of each is in the field named after its option.

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
    """Passes every call on to each tracker; an error of one never reaches the others.

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
