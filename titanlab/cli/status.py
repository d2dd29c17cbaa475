"""A sweep as a whole: `titanlab status` shows it, `titanlab cancel` ends it, `titanlab clean` removes remains."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlab.cli.arguments import json_text
from titanlab.errors import ConfigError
from titanlab.records import OutcomeKind, RunFolder
from titanlab.sweep import (
    CACHES,
    KINDS,
    Refused,
    Removable,
    Screen,
    Survey,
    SweepFolder,
    aligned,
    cached,
    failure_text,
    find_run_or_sweep,
    look_at,
    open_sweep,
    overview,
    overview_lines,
    remove_item,
    row_details,
)
from titanlab.system import Console, counted, data_size, shown_path, user_path


def status_verb(args: Namespace) -> int:
    if args.watch and (args.json or args.sweep is None or args.run is not None):
        raise ConfigError("--watch", True, "is for the table of one sweep", "give a sweep, and nothing else")
    if args.sweep is None:
        sweeps = overview(args.runs)
        if args.json:
            _print_json(sweeps)
        else:
            with Console() as console:
                console.note("\n".join(overview_lines(sweeps, args.runs, now=time.time())))
        return 0
    sweep = open_sweep(args.sweep, args.runs)
    look = look_at(sweep, Console().warn)
    if args.run is not None:
        return _show_runs(sweep.find([args.run]), look(), as_json=args.json)
    if args.json:
        _print_json(look())
    elif args.watch:
        Screen().follow(sweep.name, look)
    else:
        Screen().show(sweep.name, look())
    return 0


def _show_runs(named: Sequence[RunFolder], rows: Sequence[dict[str, Any]], *, as_json: bool) -> int:
    """Show the runs that the user named: one run, or several repeats with one label."""
    by_folder = {row["run"]: row for row in rows}
    for run in named:
        if by_folder[run.path.name]["state"] == "unreadable":
            # Raises a ConfigError that names the file, if one is damaged.
            run.check_files()
    if as_json:
        chosen = [(run, by_folder[run.path.name]) for run in named]
        _print_json([{**row, "traceback": (failure_text(run, row) or ("", None))[1]} for run, row in chosen])
        return 0
    with Console() as console:
        for run in named:
            row = by_folder[run.path.name]
            console.start(run.path.name, row_details(row))
            words = failure_text(run, row)
            if words is not None:
                source, text = words
                console.note(f"{source}:\n{text}")
    return 0


def _print_json(rows: Sequence[dict[str, Any]]) -> None:
    with Console() as console:
        console.note(json_text(rows))


def cancel_verb(args: Namespace) -> int:
    """Cancel runs: active runs save and end, waiting runs do not start. Returns 0, also if all have ended."""
    from titanlab.sweep import cancel

    folder = open_sweep(args.sweep, args.runs)
    with Console() as console:
        done = cancel(folder, console.note, names=args.run)
        parts = [
            f"{len(names)} {text}"
            for names, text in (
                (done.stopping, "running, which save and end"),
                (done.withdrawn, "waiting, which will not start"),
                (done.ended, "ended before"),
            )
            if names
        ]
        console.note(f"{folder.name}: {', '.join(parts) or 'no runs'}")
    return 0


_HEADINGS = ("what", "count", "size", "")
_LARGEST = 10


def clean_verb(args: Namespace) -> int:
    """Remove what the user agrees to. Returns 1 if something could not be removed, 130 after Ctrl-C."""
    kinds = list(dict.fromkeys(word.strip() for word in args.what.split(",") if word.strip()))
    kinds = list(KINDS) if args.what.strip() == "all" else kinds
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        rule = f"{unknown[0]} is no kind" if unknown else "names no kind"
        raise ConfigError("--what", args.what, rule, f"choose from {', '.join(KINDS)}, all")
    if args.name is not None and args.what.strip() != "all" and (shared := [kind for kind in kinds if kind in CACHES]):
        rule = f"{shared[0]} is of all runs, and {args.name} is named"
        raise ConfigError("--what", args.what, rule, "leave the run or the sweep out")
    if args.keep is not None and args.keep < 1:
        raise ConfigError("--keep", args.keep, "must be at least 1", "resume needs the newest checkpoint")
    sweeps, only, root = _chosen(args.name, user_path(args.runs).absolute())
    with Console() as console:
        survey = Survey(root=root, keep=args.keep, verifies=args.verify, is_remote=args.remote)
        survey.look(sweeps, only, console.warn)
        if args.name is None:
            # An active run may be reading prepared tokens, or compiling.
            survey.items += [item for item in cached() if not survey.busy or item.kind not in CACHES]
        items = [item for item in survey.items if item.kind in kinds]
        _show(console, survey, items, kinds, lists_all=args.dry_run)
        if not items or args.dry_run:
            return 0
        if not args.yes and not _agrees(items):
            console.note("nothing was removed")
            return 0
        return _remove(console, items)


def _chosen(name: str | None, root: Path) -> tuple[list[SweepFolder], RunFolder | None, Path]:
    if name is None:
        if os.path.lexists(root) and not root.is_dir():
            raise ConfigError("--runs", root, "is no folder", "name the folder of runs")
        folders = [SweepFolder(path) for path in sorted(root.glob("*")) if path.is_dir()]
        return [folder for folder in folders if folder.manifest() or folder.runs()], None, root
    run_or_sweep = find_run_or_sweep(name, root, key="name")
    if isinstance(run_or_sweep, SweepFolder):
        return [run_or_sweep], None, run_or_sweep.path.parent
    return [SweepFolder(run_or_sweep.path.parent)], run_or_sweep, run_or_sweep.path.parent.parent


def _show(
    console: Console, survey: Survey, items: Sequence[Removable], kinds: Sequence[str], *, lists_all: bool
) -> None:
    counts, sizes = Counter(item.kind for item in survey.items), Counter[str]()
    for item in survey.items:
        sizes[item.kind] += item.bytes
    rows = [[kind, str(counts[kind]), data_size(sizes[kind]), KINDS[kind]] for kind in kinds if counts[kind]]
    if rows:
        total = data_size(sum(item.bytes for item in items))
        console.note("\n".join(aligned(_HEADINGS, [*rows, ["", str(len(items)), total, ""]], right=_HEADINGS[1:3])))
    else:
        is_missing = not os.path.lexists(survey.root)
        console.note("nothing is to be removed" + (f": there is no folder {survey.root}" if is_missing else ""))
    largest = sorted(items, key=lambda item: -item.bytes)
    for item in largest if lists_all else largest[:_LARGEST]:
        console.note(f"  {data_size(item.bytes):>9}  {shown_path(item.path)}")
    if not lists_all and len(items) > _LARGEST:
        console.note(f"  … and {len(items) - _LARGEST} more, which --dry-run lists")
    others = [kind for kind in KINDS if kind not in kinds and counts[kind]]
    if others:
        sizes_of_others = ", ".join(f"{kind} {data_size(sizes[kind])}" for kind in others)
        console.note(f"not asked for: {sizes_of_others}; --what {','.join(others)}")
    for line in survey.notes:
        console.note(line)
    if survey.busy:
        names = ", ".join(survey.busy[:5]) + (" …" if len(survey.busy) > 5 else "")
        console.note(f"{counted(len(survey.busy), 'run')} at work or in a queue left alone: {names}")


def _agrees(items: Sequence[Removable]) -> bool:
    """Ask the user.

    Raises:
        ConfigError: there is no terminal to ask on.
    """
    if not sys.stdin.isatty():
        rule = "nobody can be asked, for standard input is no terminal; nothing was removed"
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
