"""Config of schedule=csv."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titanlab.errors import ConfigError
from titanlab.options import option


@option("schedule", "csv")
@dataclass(kw_only=True)
class CsvSchedule:
    """The order that a file says.

    Attributes:
        file: one line a rank, one cell an action: `0F0` is stage 0, forward, microbatch 0; B is a backward pass, I and
            W its halves (gradient of the input, gradient of the weights).
    """

    kind: str = "csv"
    file: str = ""

    def __post_init__(self) -> None:
        if not self.file.strip():
            cure = "write one with `titanlab schedule 1f1b --csv my.csv`: schedule.file=my.csv"
            raise ConfigError("schedule.file", self.file, "names no file", cure)
        # Ranks need not start in the same folder.
        self.file = str(Path(self.file).expanduser().absolute())
