"""checkpoint=off and checkpoint=sync."""

from __future__ import annotations

from titanlab.checkpoint import store
from titanlab.checkpoint.contract import OnlyModel, Saver, Target
from titanlab.checkpoint.position import Position
from titanlab.checkpoint.savers.saving import Plans


class NoSaver(Saver):
    """Saves nothing."""

    saved_step = 0
    is_done = False

    def save(self, position: Position) -> None:
        """Nothing."""

    def wait(self) -> None:
        """There is nothing to wait for."""

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        """Nothing."""

    def before_update(self) -> None:
        """Nothing is copied."""


class SyncSaver(Saver):
    """`save` returns when the checkpoint is on the disk."""

    is_done = False

    def __init__(self, target: Target, plans: Plans | None = None) -> None:
        self._target = target
        self._plans = plans or Plans()
        self.saved_step = 0

    def save(self, position: Position) -> None:
        """Write and publish."""
        self.save_last(position)

    def save_last(self, position: Position, only_model: OnlyModel | None = None) -> None:
        """Write and publish."""
        target = self._target
        store.save(
            target.folder,
            position,
            model=target.model,
            optimizer=target.optimizer,
            world=target.world,
            keep=target.keep,
            keep_every=target.keep_every,
            plans=self._plans,
            recipe=target.recipe,
            warn=target.warn,
            saved=target.saved,
            only_model=only_model,
        )
        self.saved_step = position.step

    def wait(self) -> None:
        """`save` has waited."""

    def before_update(self) -> None:
        """Nothing is copied."""
