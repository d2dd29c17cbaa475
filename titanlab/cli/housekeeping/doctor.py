"""`titanlab doctor`: check this machine, and say of each thing whether it works, and what to do if it does not."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from titanlab.cli.arguments import Arguments
from titanlab.cli.compose import compose_one
from titanlab.doctor.checkup import checks, run_checks
from titanlab.errors import ConfigError
from titanlab.launch.contract import LaunchConfig, launch_of
from titanlab.recipe.composition.flags import read_flags
from titanlab.system.terminal import Console
from titanlab.system.text import FAIL, OK, WARN, Finding, harmless

_COLOURS = {OK: "\x1b[32m", WARN: "\x1b[33m", FAIL: "\x1b[31m"}
_OFF = "\x1b[0m"
_NAME_WIDTH = 18


def main(arguments: Sequence[str]) -> int:
    """Print a line for each finding. Returns 1 if one of them is `fail`."""
    parser = Arguments("doctor", "Check this machine; nothing is trained, and no job is submitted.")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="key=value of launch, such as launch=slurm launch.partition=gpu"
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    parser.add_argument("--config-dir", metavar="FOLDER", help="with your site's launch/NAME.yaml")
    args = parser.parse_args(arguments)
    launch = _launch(args.overrides, args.config_dir)
    begin, rows = time.monotonic(), list[dict[str, Any]]()
    with Console() as console:
        section = ""
        for check, findings in run_checks(checks(Path(args.runs), launch)):
            for finding in findings:
                rows.append({"section": check.section, **asdict(finding)})
                if args.json:
                    continue
                if check.section != section:
                    section = check.section
                    console.note(section)
                console.note("\n".join(_lines(finding, is_coloured=_is_coloured(console, os.environ))), coloured=True)
        counts = Counter(row["state"] for row in rows)
        if args.json:
            values = {"findings": rows, "counts": {state: counts[state] for state in (OK, WARN, FAIL)}}
            console.note(json.dumps(values, indent=2, ensure_ascii=False))
        else:
            shown = ", ".join(f"{counts[state]} {state}" for state in (OK, WARN, FAIL))
            console.note(f"{shown}, in {time.monotonic() - begin:.0f} s")
    return 1 if counts[FAIL] else 0


def _launch(overrides: Sequence[str], config_dir: str | None) -> LaunchConfig | None:
    """The launcher that the user names, with its settings; None: the user names none."""
    if not overrides:
        return None
    for override in overrides:
        key = override.partition("=")[0].lstrip("+")
        if "=" not in override or key.partition(".")[0] != "launch":
            raise ConfigError("overrides", override, "is no key of launch", "try launch=slurm launch.partition=gpu")
    folder = [] if config_dir is None else ["--config-dir", config_dir]
    composed = compose_one(read_flags([*folder, *overrides]))
    if composed is None:
        raise ConfigError("overrides", " ".join(overrides), "has several values", "give one value for each key")
    return launch_of(composed[1])


def _lines(finding: Finding, *, is_coloured: bool) -> list[str]:
    state = f"{_COLOURS[finding.state]}{finding.state:<4}{_OFF}" if is_coloured else f"{finding.state:<4}"
    lines = [f"  {state}  {harmless(finding.name):<{_NAME_WIDTH}}  {harmless(finding.text)}"]
    if finding.hint:
        lines.append(f"        {'':<{_NAME_WIDTH}}  → {harmless(finding.hint)}")
    return lines


def _is_coloured(console: Console, environ: Mapping[str, str]) -> bool:
    return console.is_live and not environ.get("NO_COLOR") and sys.stdout.isatty()
