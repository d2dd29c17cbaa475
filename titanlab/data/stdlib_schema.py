"""Config of data=stdlib."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.data.contract import DataSource
from titanlab.data.text_schema import Text
from titanlab.options import option


@option("data", "stdlib")
@dataclass(kw_only=True)
class Stdlib(Text):
    """The source of this Python's standard library: real text on every machine, without a network."""

    kind: str = "stdlib"
    # Some twenty modules: enough for a steady validation loss.
    validation_fraction: float = 0.05

    def implementation(self) -> DataSource:
        from titanlab.data.stdlib import StdlibSource

        return StdlibSource(self)
