"""schedule=csv: the actions in a CSV file, in the format of torch's schedules."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.schedule.action import Action
from titanlab.schedule.action_file import KEY, read_actions
from titanlab.schedule.contract import PipelineSchedule
from titanlab.schedule.order import placement_of
from titanlab.system.files import user_path
from titanlab.system.text import counted


@option("schedule", "csv")
@dataclass(kw_only=True)
class CsvSchedule(PipelineSchedule):
    """The actions in a file.

    Attributes:
        file: one line per rank, one cell per action: `0F0` is stage 0, forward, microbatch 0; B is a backward pass; I
            and W are its halves (gradient of the input, gradient of the weights).
    """

    kind: str = "csv"
    file: str = ""

    def __post_init__(self) -> None:
        if not self.file.strip():
            cure = "write one with `titanlab schedule 1f1b --csv my.csv`: schedule.file=my.csv"
            raise ConfigError(KEY, self.file, "names no file", cure)
        # Ranks need not start in the same folder.
        self.file = str(user_path(self.file).absolute())

    def fixed_size(self) -> tuple[int, int]:
        """The numbers of lines, and of microbatches in them."""
        orders = read_actions(self.file)
        return len(orders), _microbatches(orders)

    def stage_count(self, *, ranks: int) -> int:
        """At least one stage for each rank; the exact number needs the file."""
        return ranks

    def placement(self, *, ranks: int) -> list[int]:
        """Rank of each stage in the file.

        Raises:
            ConfigError: the file breaks a rule, or is for another number of ranks.
        """
        return placement_of(self._orders(ranks))

    def check_pipeline(self, *, ranks: int, microbatches: int) -> None:
        """Check that the file obeys the rules of schedules and fits this pipeline.

        Raises:
            ConfigError: the file breaks a rule, or is for another number of ranks or microbatches.
        """
        self.actions(ranks=ranks, microbatches=microbatches)

    def actions(self, *, ranks: int, microbatches: int) -> list[list[Action]]:
        """Actions by rank.

        Raises:
            ConfigError: as `check_pipeline` does.
        """
        orders = self._orders(ranks)
        expected = _microbatches(orders)
        if expected != microbatches:
            rule = f"is for {counted(expected, 'microbatch', 'microbatches')} a step, and a step has {microbatches}"
            more, fewer = expected // microbatches, microbatches // expected
            if microbatches * more == expected:
                cure = f"try training.global_batch times {more}, or schedule=1f1b"
            elif expected * fewer == microbatches:
                cure = f"try training.microbatch times {fewer}, or schedule=1f1b"
            else:
                cure = f"try schedule=1f1b, or a file for {microbatches}"
            raise ConfigError(KEY, self.file, rule, cure)
        return orders

    def _orders(self, ranks: int) -> list[list[Action]]:
        orders = read_actions(self.file)
        if len(orders) != ranks:
            rule = f"has {len(orders)} lines, one a rank, and the pipeline has {ranks} ranks"
            raise ConfigError(KEY, self.file, rule, f"try parallelism.pipeline={len(orders)}, or schedule=1f1b")
        return orders


def _microbatches(orders: list[list[Action]]) -> int:
    return 1 + max(action.microbatch for order in orders for action in order)
