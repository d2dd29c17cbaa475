"""Config of data=stdlib."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.data.contract import DataSource
from titanlab.data.text_schema import Text
from titanlab.options import option


@option("data", "stdlib")
@dataclass(kw_only=True)
class Stdlib(Text):
    """The source of the Python standard library that runs this: real text on every machine, offline."""

    kind: str = "stdlib"
    validation_fraction: float = 0.05

    def implementation(self) -> DataSource:
        from titanlab.data.stdlib import StdlibSource

        return StdlibSource(self)
