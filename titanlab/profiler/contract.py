"""The contract of a profiler: its config, and the object that a rank calls after each step. Torch-free."""

from __future__ import annotations

from dataclasses import Field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from titanlab.costs.setting import Setting


class ProfilerConfig(Protocol):
    """A config of the group `profiler`: a dataclass that inherits from this class."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    kind: str

    def implementation(self) -> Profiler:
        """A profiler that has not been started."""
        ...

    def check(self, setting: Setting) -> None:
        """Check rules that need more of the recipe than the profiler's fields; by default there are none.

        Raises:
            ConfigError: the first rule that is broken.
        """
        return


class Profiler(Protocol):
    """Profiles one rank. A profiler must not change what the run computes."""

    def start(self, traces: Path, *, rank: int, attempt: int, on_gpu: bool) -> None:
        """Called once, before the first step.

        Args:
            traces: the folder for files.
        """
        ...

    def after_step(self, step: int) -> None:
        """Called by every rank after each step."""
        ...

    def close(self) -> None:
        """Called once, also after an error."""
        ...
