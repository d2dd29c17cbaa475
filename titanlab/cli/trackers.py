"""A run in wandb or TensorBoard: `titanlab sync` uploads and rebuilds, `titanlab workspace` makes wandb's pages."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from titanlab.errors import ConfigError, TitanlabError
from titanlab.records import RunFolder
from titanlab.report import wandb_workspace
from titanlab.sweep import SweepFolder, find_run_or_sweep, look_at, open_sweep, readable
from titanlab.system import Console, counted
from titanlab.techniques.tracker import wandb
from titanlab.techniques.tracker.trackers_schema import TensorBoard, Wandb
from titanlab.techniques.tracker.wandb import has_key
from titanlab.train import configs_of, has_repeated_steps, has_tracker, is_due, tracker_gap, waiting_files

_WRITING_SECONDS = 20.0


def sync_verb(args: Namespace) -> int:
    """Rebuild, upload, and print what was done. Returns 0 if nothing remains to upload."""
    runs: dict[RunFolder, bool] = {}  # Run → whether --rebuild is given, and the run is named or incomplete.
    for text in args.runs_and_sweeps:
        found = find_run_or_sweep(text, args.runs)
        for run in [found] if isinstance(found, RunFolder) else found.runs():
            runs[run] = runs.get(run, False) or (args.rebuild and (run is found or _is_lacking(run)))
    with Console() as console:
        for run, is_rebuilt in runs.items():
            if is_rebuilt:
                _rebuild(run, console)
            elif is_due(run):
                _tried(run, console, may_be_writing=True)
        if args.tracker is not None:
            config = Wandb() if args.tracker == Wandb.kind else TensorBoard()
            config.check_installed()
            for run in [run for run in runs if not has_tracker(run, args.tracker)]:
                if run.result() is None or not run.metrics():
                    what = f"has not ended, or has no rows; nothing is written for {args.tracker}"
                    console.note(f"{run.path.name}: {what}")
                else:
                    _rebuild(run, console, config)
        for run in [run for run in runs if not args.rebuild and _is_lacking(run)]:
            console.note(f"{run.path.name}: {tracker_gap(run)}")
        if not any(map(waiting_files, runs)):
            console.note("there is nothing to upload")
            without = sum(not has_tracker(run, Wandb.kind) for run in runs)
            if args.tracker is None and without:
                command = f"titanlab sync --tracker wandb {' '.join(args.runs_and_sweeps)}"
                what = f"{counted(without, 'run')} without files of wandb"
                console.note(f"{what}; write them from metrics.jsonl: {command}")
            return 0
        lack = wandb.lack()
        if lack is not None and (args.rebuild or args.tracker is not None):
            # Not an error: the user asked for the files, which are written.
            console.note(f"not uploaded: {lack}")
            return 0
        if lack is not None:
            raise lack
        merged = []
        for run in runs:
            is_repeated = has_repeated_steps(run)
            if is_repeated:
                what = "several attempts logged the same steps; their files are merged into one"
                console.note(f"{run.path.name}: {what}")
            # Rebuild files with repeated steps before the upload: wandb would keep the older rows.
            if not is_repeated or _tried(run, console):
                merged.append(run)
        waiting = [files for run in merged if (files := waiting_files(run))]
        console.note(f"uploading {counted(sum(map(len, waiting)), 'file')} of wandb's")
        wandb.upload(waiting)
    return 0 if len(merged) == len(runs) else 1


def _tried(run: RunFolder, console: Console, *, may_be_writing: bool = False) -> bool:
    """Rebuild a run's tracker files. Returns False if this fails: the caller then uploads only the other runs."""
    try:
        if may_be_writing:
            # A run that has just ended may be writing its files itself: wait for that.
            with run.claim(patience_seconds=_WRITING_SECONDS):
                if not is_due(run):
                    return True
        _rebuild(run, console)
    except TitanlabError as error:
        console.warn(f"{run.path.name} is not uploaded: {error}")
        return False
    return True


def _rebuild(run: RunFolder, console: Console, config: Wandb | TensorBoard | None = None) -> None:
    # Imported here: it needs Hydra, and `titanlab workspace` does not.
    from titanlab.train import rebuild

    for made in rebuild(run, config):
        console.note(f"{run.path.name}: {made.kind} has all {counted(made.rows, 'row')}: {made.folder}")


def _is_lacking(run: RunFolder) -> bool:
    return "--rebuild" in (tracker_gap(run) or "")


def workspace_verb(args: Namespace) -> int:
    sweep = open_sweep(args.sweep, args.runs)
    wandb_workspace.check_installed()
    with Console() as console:
        rows = look_at(sweep, console.warn)()
        tracker = _wandb_config(sweep, console)
        if not tracker and not any(has_tracker(run, Wandb.kind) for run in sweep.runs()):
            command = f"titanlab sync --tracker wandb {sweep.name}"
            console.warn(f"wandb has no run of {sweep.name}; {command} writes its files from metrics.jsonl")
        view = wandb_workspace.view_of(sweep.name, rows, tracker=tracker, project=args.project, entity=args.entity)
        if args.json or not has_key(os.environ):
            if not args.json:
                have = "WANDB_API_KEY or `wandb login` has one"
                console.warn(f"no API key of wandb was found, so nothing is saved; {have}")
            sys.stdout.write(wandb_workspace.json_text(view) + "\n")
            return 0
        if (lack := wandb.lack()) is not None:
            raise lack
        for address in wandb_workspace.save(view):
            console.note(address)
    return 0


def _wandb_config(sweep: SweepFolder, console: Console) -> Mapping[str, Any]:
    """The config of wandb in one of the sweep's runs; empty if no run has one."""
    for run in readable(sweep.runs(), console.warn, named=False):
        try:
            configs = configs_of(run)
        except ConfigError as error:
            console.warn(f"{run.path.name} is left alone: {error}")
            continue
        for config in configs:
            if config.get("kind") == Wandb.kind:
                return config
    return {}
