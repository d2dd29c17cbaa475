"""The order that a CSV file says, in the format of torch's schedules."""

from __future__ import annotations

from titanlab.errors import ConfigError
from titanlab.schedule.action import Action
from titanlab.schedule.action_file import KEY, read_actions
from titanlab.schedule.csv_schema import CsvSchedule
from titanlab.schedule.order import placement_of


def placement(config: CsvSchedule, *, ranks: int) -> list[int]:
    """Rank of each stage, as the file has them.

    Raises:
        ConfigError: the file is faulty, or is for another number of ranks.
    """
    return placement_of(_orders(config, ranks))


def check(config: CsvSchedule, *, ranks: int, microbatches: int) -> None:
    """Hold the file to what every schedule is, and to this pipeline.

    Raises:
        ConfigError: the file is faulty, or is for another number of ranks or microbatches.
    """
    actions(config, ranks=ranks, microbatches=microbatches)


def actions(config: CsvSchedule, *, ranks: int, microbatches: int) -> list[list[Action]]:
    """Actions by rank.

    Raises:
        ConfigError: as `check` does.
    """
    orders = _orders(config, ranks)
    has = 1 + max(action.microbatch for order in orders for action in order)
    if has != microbatches:
        rule = f"is for {has} microbatches a step, and a step has {microbatches}"
        more, fewer = has // microbatches, microbatches // has
        if microbatches * more == has:
            cure = f"try training.global_batch times {more}, or schedule=1f1b"
        elif has * fewer == microbatches:
            cure = f"try training.microbatch times {fewer}, or schedule=1f1b"
        else:
            cure = f"try schedule=1f1b, or a file for {microbatches}"
        raise ConfigError(KEY, config.file, rule, cure)
    return orders


def _orders(config: CsvSchedule, ranks: int) -> list[list[Action]]:
    orders = read_actions(config.file)
    if len(orders) != ranks:
        rule = f"has {len(orders)} lines, one a rank, and the pipeline has {ranks} ranks"
        raise ConfigError(KEY, config.file, rule, f"try parallelism.pipeline={len(orders)}, or schedule=1f1b")
    return orders
