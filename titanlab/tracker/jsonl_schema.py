"""Config of tracker=jsonl."""

from __future__ import annotations

from dataclasses import dataclass

from titanlab.options import option


@option("tracker", "jsonl")
@dataclass(kw_only=True)
class Jsonl:
    """The run's own metrics.jsonl and nothing else."""

    kind: str = "jsonl"
