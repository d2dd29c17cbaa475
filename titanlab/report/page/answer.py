"""The answer of a sweep: who is the best and by how much, and the interval of each recipe's speed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from titanlab.report.page.facts import Facts
from titanlab.sweep.comparison import Entry, Group
from titanlab.sweep.ranking import Ranking, rank
from titanlab.system.text import counted, significant


@dataclass(frozen=True)
class Answer:
    """What the runs say.

    Attributes:
        ranking: of the recipes, by what the reader asked for.
        speeds: the same by tokens per second.
    """

    ranking: Ranking
    speeds: Ranking

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        return self.ranking.sentence

    @property
    def best(self) -> Group | None:
        """The recipe with the best figure; if none is ranked, one that has a run that is done. None: no run is done."""
        first = self.ranking.first or next((entry for entry in self.ranking.entries if _is_done(entry)), None)
        return first.group if first else None

    @cached_property
    def bands(self) -> Mapping[str, tuple[float, float]]:
        """The interval of 95 % of a recipe's tokens per second, by its label."""
        return {
            entry.label: (entry.low, entry.high)
            for entry in self.speeds.ranked
            if entry.low is not None and entry.high is not None and math.isfinite(entry.high)
        }

    @property
    def band_text(self) -> str:
        """What the intervals rest on."""
        noise, degrees = significant(self.speeds.noise_percent or 0, 2), self.speeds.degrees
        return (
            f"The line with ends is the interval of 95 % around a recipe's mean, from a noise of {noise} % "
            f"between runs of one recipe, pooled over all that have repeats ({counted(degrees, 'degree')} of freedom)."
        )


def answer_of(facts: Facts, *, by: str) -> Answer:
    """Rank the recipes of a sweep by `tps`, `mfu` or `memory`."""
    ranking = rank(facts.rows, by=by)
    return Answer(ranking, ranking if by == "tps" else rank(facts.rows, by="tps"))


def _is_done(entry: Entry) -> bool:
    return any(row["outcome"] == "done" for row in entry.group.rows)
