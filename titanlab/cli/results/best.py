"""`titanlab best SWEEP`: which recipe is the best, by how much, and whether that is more than noise."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from titanlab.cli.arguments import Arguments
from titanlab.errors import ConfigError
from titanlab.sweep.comparison import COLUMN_OF
from titanlab.sweep.listing import dropped
from titanlab.sweep.ranking import rank, ranking_lines
from titanlab.sweep.rows import look_at
from titanlab.sweep.sweep_folder import open_sweep
from titanlab.system.files import finite
from titanlab.system.terminal import Console


def main(arguments: Sequence[str]) -> int:
    """Print the answer in one sentence, the ranked recipes, and those that are left out."""
    parser = Arguments("best", "Rank the recipes of a sweep; nobody is named the winner of a gap that may be noise.")
    parser.add_argument("sweep", help="the sweep's name, or its folder")
    parser.add_argument(
        "--by",
        default="tps",
        help="tps: tokens per second of one device (default); mfu; memory: the least peak of a rank",
    )
    parser.add_argument("--max-memory", type=float, metavar="GIB", help="leave out recipes that need more, such as 76")
    parser.add_argument("--json", action="store_true", help="the ranking as JSON; docs/comparing.md has the keys")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    if args.by not in COLUMN_OF:
        raise ConfigError("--by", args.by, "is no figure to rank by", f"known: {', '.join(COLUMN_OF)}")
    limit = args.max_memory
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise ConfigError("--max-memory", limit, "must be a number of GiB above 0", "try --max-memory 76")
    sweep = open_sweep(args.sweep, args.runs)
    rows = look_at(sweep, Console().warn)()
    ranking = rank(rows, by=args.by, max_memory_gib=limit)
    with Console() as console:
        if args.json:
            console.note(
                json.dumps(finite({"sweep": sweep.name, **ranking.to_mapping()}), indent=2, ensure_ascii=False)
            )
        else:
            console.note("\n".join([f"{sweep.name}: {ranking.sentence}", *ranking_lines(ranking)[1:], *dropped(rows)]))
    return 0
