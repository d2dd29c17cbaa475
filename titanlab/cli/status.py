"""A sweep as a whole: `titanlab status` shows it, `titanlab cancel` ends it, `titanlab clean` removes remains.

Its results: `titanlab collect` writes the table, `titanlab best` ranks, `titanlab report` writes a page.
"""

from __future__ import annotations

import math
import os
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import Any

from titanlab.cli.arguments import json_text
from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind, RunFolder
from titanlab.sweep import (
    KINDS,
    Refused,
    Removable,
    Screen,
    Survey,
    SweepFolder,
    failure_text,
    find_run_or_sweep,
    look_at,
    open_sweep,
    overview,
    overview_lines,
    remove_item,
    row_details,
    upload_lines,
)
from titanlab.system import Console, aligned, counted, data_size, shown_path, user_path


def status_verb(args: Namespace) -> int:
    if args.watch and (args.json or args.sweep is None or args.run is not None):
        raise ConfigError("--watch", True, "is for the table of one sweep", "give a sweep, and nothing else")
    if args.sweep is None:
        sweeps = overview(args.runs)
        text = json_text(sweeps) if args.json else "\n".join(overview_lines(sweeps, args.runs, now=time.time()))
        Console().note(text)
        return 0
    sweep = open_sweep(args.sweep, args.runs)
    look = look_at(sweep, Console().warn)
    if args.run is not None:
        return _show_runs(sweep.find([args.run]), look(), as_json=args.json)
    if args.json:
        Console().note(json_text(look()))
    elif args.watch:
        Screen().follow(sweep, look)
    else:
        Screen().show(sweep, look())
    return 0


def _show_runs(named: Sequence[RunFolder], rows: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    """Show the runs that the user named: one run, or several repeats with one label."""
    by_folder = {row["run"]: row for row in rows}
    chosen = [(run, by_folder[run.path.name], failure_text(run, by_folder[run.path.name])) for run in named]
    for run, row, _ in chosen:
        if row["state"] == "unreadable":
            # Raises a ConfigError that names the file, if one is damaged.
            run.check_files()
    with Console() as console:
        if as_json:
            console.note(json_text([{**row, "traceback": (words or ("", None))[1]} for _, row, words in chosen]))
            return 0
        for run, row, words in chosen:
            console.start(run.path.name, row_details(row))
            if words is not None:
                source, text = words
                console.note(f"{source}:\n{text}")
    return 0


def cancel_verb(args: Namespace) -> int:
    """Cancel runs: active runs save and end, waiting runs do not start. Returns 0, also if all have ended."""
    from titanlab.sweep import cancel

    folder = open_sweep(args.sweep, args.runs)
    with Console() as console:
        done = cancel(folder, console.note, names=args.run)
        texts = {
            "running, which save and end": done.stopping,
            "waiting, which will not start": done.withdrawn,
            "ended before": done.ended,
        }
        parts = [f"{len(names)} {text}" for text, names in texts.items() if names]
        console.note(f"{folder.name}: {', '.join(parts) or 'no runs'}")
    return 0


def collect_verb(args: Namespace) -> int:
    sweep = open_sweep(args.sweep, args.runs)
    # Imported here, as below: the planner and the table take time to import.
    from titanlab.sweep import drift_lines, listing, write_table

    rows = look_at(sweep, Console().warn, estimates=True)()
    files = write_table(rows, sweep.name, user_path(args.into or sweep.path))
    lines = [f"{sweep.name}: {counted(len(listing.runs(rows)), 'run')}"]
    lines += [f"  notes: {notes}"] if (notes := sweep.notes()) else []
    for section in (listing.comparison, drift_lines, listing.failures, listing.gaps, listing.dropped):
        lines += [f"  {line}" for line in section(rows)]
    lines += upload_lines(sweep, rows)
    lines += [f"table: {os.path.relpath(path)}" for path in files]
    Console().note("\n".join(lines))
    return 0


def best_verb(args: Namespace) -> int:
    from titanlab.sweep import COLUMN_OF, dropped, rank, ranking_lines

    if args.by not in COLUMN_OF:
        raise ConfigError("--by", args.by, "runs cannot be ranked by it", f"known: {', '.join(COLUMN_OF)}")
    limit = args.max_memory
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise ConfigError("--max-memory", limit, "must be a number of GiB above 0", "try --max-memory 76")
    sweep = open_sweep(args.sweep, args.runs)
    rows = look_at(sweep, Console().warn)()
    ranking = rank(rows, by=args.by, max_memory_gib=limit)
    if args.json:
        Console().note(json_text({"sweep": sweep.name, **ranking.to_mapping()}))
    else:
        answer, *lines = ranking_lines(ranking)
        Console().note("\n".join([f"{sweep.name}: {answer}", *lines, *dropped(rows)]))
    return 0


def report_verb(args: Namespace) -> int:
    if args.format is not None and args.figures is None:
        raise ConfigError("--format", args.format, "is the format of figures", "add --figures FOLDER")
    sweep = open_sweep(args.sweep, args.runs)
    from titanlab.report import check_matplotlib, write_report

    check_matplotlib(sweep.name)
    # A path that ends in .html or .htm is a file; any other path is a folder.
    into = sweep.path if args.into is None else user_path(args.into)
    if into.suffix.lower() not in (".html", ".htm") or into.is_dir():
        if into.exists() and not into.is_dir():
            raise ConfigError("--into", into, "must end in .html", f"try {into}.html")
        into /= f"{sweep.name}.html"
    with Console() as console:
        figures = None if args.figures is None else user_path(args.figures)
        rows = look_at(sweep, console.warn)()
        written = write_report(sweep, rows, into=into, figures=figures, format=args.format or "png", by=args.by)
        lines = [written.sentence, *(f"figure: {os.path.relpath(path)}" for path in written.figures)]
        console.note("\n".join([*lines, f"report: {os.path.relpath(written.file)}"]))
    return 0


_LARGEST = 10


def clean_verb(args: Namespace) -> int:
    """Remove what the user agrees to. Returns 1 if something could not be removed, 130 after Ctrl-C."""
    takes_all = args.what.strip() == "all"
    words = [word.strip() for word in args.what.split(",") if word.strip()]
    kinds = list(KINDS) if takes_all else list(dict.fromkeys(words))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        rule = f"{unknown[0]} is not a kind" if unknown else "names no kind"
        raise ConfigError("--what", args.what, rule, f"choose from {', '.join(KINDS)}, all")
    if args.keep is not None and args.keep < 1:
        raise ConfigError("--keep", args.keep, "must be at least 1", "resume needs the newest checkpoint")
    root, only = user_path(args.runs).absolute(), None
    if args.name is None:
        if os.path.lexists(root) and not root.is_dir():
            raise ConfigError("--runs", root, "is not a folder", "name the folder of runs")
        folders = [SweepFolder(path) for path in sorted(root.glob("*")) if path.is_dir()]
        sweeps = [folder for folder in folders if folder.manifest() or folder.runs()]
    else:
        found = find_run_or_sweep(args.name, root, key="name")
        only = found if isinstance(found, RunFolder) else None
        sweeps = [SweepFolder(found.path.parent) if isinstance(found, RunFolder) else found]
        root = sweeps[0].path.parent
    with Console() as console:
        survey = Survey(root=root, keep=args.keep, verifies=args.verify)
        survey.look(sweeps, only, console.warn)
        items = [item for item in survey.items if item.kind in kinds]
        _show(console, survey, items, kinds, lists_all=args.dry_run)
        if not items or args.dry_run:
            return 0
        if not args.yes and not _agrees(items):
            console.note("nothing was removed")
            return 0
        return _remove(console, items)


def _show(
    console: Console, survey: Survey, items: Sequence[Removable], kinds: Sequence[str], *, lists_all: bool
) -> None:
    counts, sizes = Counter(item.kind for item in survey.items), Counter[str]()
    for item in survey.items:
        sizes[item.kind] += item.bytes
    rows = [[kind, str(counts[kind]), data_size(sizes[kind]), KINDS[kind]] for kind in kinds if counts[kind]]
    if rows:
        headings, total = ("what", "count", "size", ""), data_size(sum(item.bytes for item in items))
        lines = aligned(headings, [*rows, ["", str(len(items)), total, ""]], right=headings[1:3])
    else:
        is_missing = not os.path.lexists(survey.root)
        lines = ["there is nothing to remove" + (f": there is no folder {survey.root}" if is_missing else "")]
    largest = sorted(items, key=lambda item: -item.bytes)
    shown = largest if lists_all else largest[:_LARGEST]
    lines += [f"  {data_size(item.bytes):>9}  {shown_path(item.path)}" for item in shown]
    if len(items) > len(shown):
        lines.append(f"  … and {len(items) - len(shown)} more, which --dry-run lists")
    others = [kind for kind in KINDS if kind not in kinds and counts[kind]]
    if others:
        sizes_of_others = ", ".join(f"{kind} {data_size(sizes[kind])}" for kind in others)
        lines.append(f"not asked for: {sizes_of_others}; --what {','.join(others)}")
    lines += survey.notes
    if survey.busy:
        names = ", ".join(survey.busy[:5]) + (" …" if len(survey.busy) > 5 else "")
        lines.append(f"{counted(len(survey.busy), 'run')} at work or in a queue, left alone: {names}")
    console.note("\n".join(lines))


def _agrees(items: Sequence[Removable]) -> bool:
    """Ask the user whether to remove the items.

    Raises:
        ConfigError: there is no terminal to ask on.
    """
    if not sys.stdin.isatty():
        rule = "standard input is not a terminal, so nobody can answer; nothing was removed"
        raise ConfigError("--yes", False, rule, "give --yes, or --dry-run to look only")
    size = data_size(sum(item.bytes for item in items))
    sys.stdout.write(f"remove {counted(len(items), 'item')}, {size}? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _remove(console: Console, items: Sequence[Removable]) -> int:
    freed, removed, code = 0, 0, 0
    for item in items:
        try:
            remove_item(item)
        except Refused as refused:
            console.warn(f"{item.path} is left alone: {refused}")
            code = 1
        except KeyboardInterrupt:
            console.error("interrupted; what is left can be removed by the same command")
            code = OutcomeKind.CANCELLED.exit_code
            break
        else:
            freed, removed = freed + item.bytes, removed + 1
    console.note(f"removed {counted(removed, 'item')}, {data_size(freed)}")
    return code
