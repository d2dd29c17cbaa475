"""`titanlab doctor` checks this machine; `titanlab repro RUN` restores a run's code, config and environment."""

from __future__ import annotations

import os
import shlex
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import titanlab
from titanlab.cli.arguments import json_text
from titanlab.cli.compose import compose_one
from titanlab.distributed import this_host
from titanlab.doctor import checks, run_checks
from titanlab.errors import ConfigError
from titanlab.launch import LaunchConfig, launch_of
from titanlab.recipe import check_unedited, read_flags
from titanlab.records import RunFolder, collect, find_run
from titanlab.sweep import (
    NAME,
    RecordedCode,
    composable,
    config_differences,
    differences,
    pip_line,
    recorded_code,
    repository_of,
    restore,
    write_config,
)
from titanlab.system import FAIL, OK, WARN, Console, aligned, harmless, shown_path, user_path

_COLOURS = {OK: "\x1b[32m", WARN: "\x1b[33m", FAIL: "\x1b[31m"}
_NAME_WIDTH = 18


def doctor_verb(args: Namespace) -> int:
    """Print a line for each finding. Returns 1 if one of them is `fail`."""
    launch = _launch(args.overrides, args.config_dir)
    begin, rows, section = time.monotonic(), list[dict[str, Any]](), ""
    with Console() as console:
        is_coloured = console.is_live and not os.environ.get("NO_COLOR") and sys.stdout.isatty()
        for check, findings in run_checks(checks(Path(args.runs), launch)):
            for finding in findings:
                rows.append({"section": check.section, **asdict(finding)})
                if args.json:
                    continue
                if check.section != section:
                    section = check.section
                    console.note(section)
                state = f"{finding.state:<4}"
                if is_coloured:
                    state = f"{_COLOURS[finding.state]}{state}\x1b[0m"
                lines = [f"  {state}  {harmless(finding.name):<{_NAME_WIDTH}}  {harmless(finding.text)}"]
                if finding.hint:
                    lines.append(f"        {'':<{_NAME_WIDTH}}  → {harmless(finding.hint)}")
                console.note("\n".join(lines), coloured=True)
        found = Counter(row["state"] for row in rows)
        counts = {state: found[state] for state in (OK, WARN, FAIL)}
        if args.json:
            console.note(json_text({"findings": rows, "counts": counts}))
        else:
            shown = ", ".join(f"{count} {state}" for state, count in counts.items())
            console.note(f"{shown}, in {time.monotonic() - begin:.0f} s")
    return 1 if counts[FAIL] else 0


def _launch(overrides: Sequence[str], config_dir: str | None) -> LaunchConfig | None:
    """The launcher that the user names, with its settings; None: the user names none."""
    if not overrides:
        return None
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        if "=" not in override or key.partition(".")[0] != "launch":
            raise ConfigError("overrides", override, "is not a key of launch", "try launch=slurm launch.partition=gpu")
    folder = [] if config_dir is None else ["--config-dir", config_dir]
    composed = compose_one(read_flags([*folder, *overrides]))
    if composed is None:
        raise ConfigError("overrides", " ".join(overrides), "has several values", "give one value for each key")
    return launch_of(composed[1])


_FOLDER = "repro"
_SAME = {
    True: "its Python files are those of the run",
    False: "its Python files are NOT those of the run",
    None: "the run has recorded no fingerprint of its code",
}


def repro_verb(args: Namespace) -> int:
    """Restore a run into a folder, and print the command that repeats it. Returns 1 if the code is not the run's."""
    run = RunFolder(find_run(args.run, args.runs).path.absolute())
    check_unedited(run)
    attempt = run.chosen_attempt(args.attempt)
    code = recorded_code(run, attempt)
    into = Path(os.path.abspath(user_path(args.into or Path(f"repro-{run.path.name}"))))
    text = composable(run.config(attempt) if attempt else run.config())
    with Console() as console:
        if args.dry_run:
            _show_differences(console, run, code)
            return 0
        if os.path.lexists(into) and (not into.is_dir() or into.is_symlink() or any(into.iterdir())):
            raise ConfigError("--into", into, "exists already", "give a new folder")
        try:
            if not into.exists():
                # Test whether the folder can be made; leave none behind if the code cannot be restored.
                into.mkdir(parents=True)
                into.rmdir()
        except OSError as error:
            raise ConfigError("--into", into, f"cannot be made ({error.strerror})", "give another folder") from error
        repository = repository_of(args.repo or Path(titanlab.__file__).parent)
        restored = restore(code, repository, into, run=run.path.name)
        write_config(into / _FOLDER, text)
        branch = f", branch {code.branch}" if code.branch else ""
        console.note(f"code: {shown_path(into)} from {restored.source}{branch}; {_SAME[restored.is_same]}")
        for line in restored.notes:
            console.warn(line)
        _show_differences(console, run, code)
        console.note(f"next: cd {shlex.quote(shown_path(into))}")
        console.note(f"      python -m titanlab train --config-dir {_FOLDER} --config-name {NAME}")
        return 1 if restored.is_same is False else 0


def _show_differences(console: Console, run: RunFolder, code: RecordedCode) -> None:
    def show(rows: Sequence[Sequence[str]], same: str, heading: str) -> None:
        cells = [[harmless(cell) for cell in row] for row in rows]
        lines = [heading, *(f"  {line}" for line in aligned(("", "then", "now"), cells))]
        console.note("\n".join(lines) if rows else same)

    host = this_host()
    devices = {"accelerator": host.accelerator, "name": host.device, "count": host.count}
    now = collect(devices=devices, launcher="", arguments=[]).record
    show(differences(code.env, now), "environment: as it was", "environment, where it differs:")
    if (line := pip_line(code.env, now)) is not None:
        console.note(f"packages as they were: {line}")
    changes = config_differences(run, code.env)
    if isinstance(changes, str):
        console.note(f"config: cannot be compared with its recipe of now: {changes}")
    else:
        heading = "config, where its recipe composes to something else now:"
        show(changes, "config: the same recipe composes to it now", heading)
