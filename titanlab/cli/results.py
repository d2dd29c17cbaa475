"""A sweep's results: `titanlab collect` writes the table, `titanlab best` ranks, `titanlab report` writes a page."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from pathlib import Path

from titanlab.cli.arguments import json_text
from titanlab.errors import ConfigError
from titanlab.sweep import SweepFolder, open_sweep
from titanlab.system import Console, counted, user_path

_ENDINGS = (".html", ".htm")


def collect_verb(args: Namespace) -> int:
    sweep = open_sweep(args.sweep, args.runs)
    # Imported here, as below: the planner and the table take time to import, and `--help` needs neither.
    from titanlab.sweep import drift_lines, listing, look_at, write_table

    rows = look_at(sweep, Console().warn, estimates=True)()
    files = write_table(rows, sweep.name, user_path(args.into or sweep.path))
    lines = [f"{sweep.name}: {counted(len(listing.runs(rows)), 'run')}"]
    for section in (listing.comparison, drift_lines, listing.failures, listing.gaps, listing.dropped):
        lines += [f"  {line}" for line in section(rows)]
    lines += [f"table: {os.path.relpath(path)}" for path in files]
    with Console() as console:
        console.note("\n".join(lines))
    return 0


def best_verb(args: Namespace) -> int:
    from titanlab.sweep import COLUMN_OF, dropped, look_at, rank, ranking_lines

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
            console.note(json_text({"sweep": sweep.name, **ranking.to_mapping()}))
        else:
            answer, *lines = ranking_lines(ranking)
            console.note("\n".join([f"{sweep.name}: {answer}", *lines, *dropped(rows)]))
    return 0


def report_verb(args: Namespace) -> int:
    if args.format is not None and args.figures is None:
        raise ConfigError("--format", args.format, "is that of figures", "add --figures FOLDER")
    sweep = open_sweep(args.sweep, args.runs)
    from titanlab.report import check_matplotlib, write_report
    from titanlab.sweep import look_at

    check_matplotlib(sweep.name)
    into = _file(args.into, sweep)
    with Console() as console:
        figures = None if args.figures is None else user_path(args.figures)
        rows = look_at(sweep, console.warn)()
        written = write_report(sweep, rows, into=into, figures=figures, format=args.format or "png", by=args.by)
        lines = [written.sentence, *(f"figure: {os.path.relpath(path)}" for path in written.figures)]
        console.note("\n".join([*lines, f"report: {os.path.relpath(written.file)}"]))
    return 0


def _file(into: Path | None, sweep: SweepFolder) -> Path:
    """The HTML file that `--into` names: a name with the ending of a page is a file, any other one a folder."""
    name = f"{sweep.name}.html"
    if into is None:
        return sweep.path / name
    into = user_path(into)
    if into.suffix.lower() in _ENDINGS and not into.is_dir():
        return into
    if into.exists() and not into.is_dir():
        raise ConfigError("--into", into, "is a file, and its name has not the ending .html", f"try {into}.html")
    return into / name
