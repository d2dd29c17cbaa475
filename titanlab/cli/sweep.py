"""`titanlab sweep …`: plan many runs, submit the missing ones, and return."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import dataclass

from titanlab.cli.arguments import json_text
from titanlab.cli.compose import answer
from titanlab.errors import ConfigError
from titanlab.launch import joined
from titanlab.recipe import Loader, read_flags
from titanlab.sweep import (
    Study,
    Submitted,
    check_study,
    decide,
    exit_code,
    fitting,
    folder_of,
    follow,
    plan_lines,
    plan_study,
    plan_values,
    silence_of,
    with_data,
)
from titanlab.sweep.submit import submit
from titanlab.system import Console, sweep_argument


@dataclass(frozen=True, kw_only=True)
class SweepArguments:
    """The verb's own flags, and the rest of the command line.

    Attributes:
        whole: a point that cannot run is an error; otherwise it is dropped.
    """

    rest: tuple[str, ...]
    dry_run: bool = False
    wait: bool = False
    force: bool = False
    json: bool = False
    prune: bool = False
    keep: bool = False
    whole: bool = False


def sweep_verb(args: Namespace) -> int:
    """Returns 0 after submission; with --wait the exit code of the first run that failed."""
    for first, second, rule in (
        ("dry_run", "wait", "submits nothing to wait for (--wait)"),
        ("prune", "keep", "excludes --keep"),
        ("json", "wait", "has no table, which --wait shows"),
    ):
        if getattr(args, first) and getattr(args, second):
            raise ConfigError(f"--{first.replace('_', '-')}", "true", rule, "leave one out")
    flags = read_flags(args.rest)
    if flags.answer:
        answer(flags)
        return 0
    if not flags.overrides:
        cure = "try +sweeps=quickstart_layouts, or several values of a key; `titanlab sweep --help` lists the sweeps"
        raise ConfigError("arguments", " ".join(args.rest), "say nothing of what to sweep", cure)
    return run_study(SweepArguments(**{**vars(args), "rest": tuple(args.rest)}))


def run_study(args: SweepArguments, loader: Loader | None = None) -> int:
    """Plan and submit a study; with `wait`, follow its runs to their end.

    Args:
        loader: has composed the command line, which describes one recipe; None: nothing is composed yet.
    """
    if joined(os.environ) is not None:
        rule = "was started as one of several processes, and a sweep is submitted once"
        raise ConfigError("arguments", " ".join(args.rest), rule, "start it without torchrun or srun")
    with Console() as console:
        # With --json, standard output has only JSON, because programs read it.
        report = (lambda text: None) if args.json else console.note
        study = plan_study(args.rest, whole=args.whole, loader=loader)
        if not args.keep and not args.whole:
            study = fitting(study, strictly=args.prune)
        if args.dry_run:
            _show(study, args, console)
            return 0
        # Preparing data takes long, so the launcher and the folder are checked first.
        check_study(study)
        study = with_data(study, report, whole=args.whole)
        submitted = submit(study, report, force=args.force)
        _report(study, submitted, args, console)
    if not args.wait:
        return 0
    own = {decision.run_name for decision in submitted.decisions}
    # The sweep may also have runs of earlier submissions, which do not count here.
    return exit_code([row for row in follow(submitted.folder) if row["run"] in own])


def _show(study: Study, args: SweepArguments, console: Console) -> None:
    silence = silence_of(study)
    decisions = decide(study, force=args.force, answered=silence is None)
    if args.json:
        values = plan_values(study, decisions) | ({} if silence is None else {"problem": silence})
        console.note(json_text(values))
        return
    lines = plan_lines(study, decisions, answered=silence is None)
    if silence is not None:
        lines.append(f"{silence}; nothing of this plan was held against it, and to submit it has to answer")
    console.note("\n".join([*lines, "nothing was submitted (--dry-run)"]))


def _report(study: Study, submitted: Submitted, args: SweepArguments, console: Console) -> None:
    if args.json:
        made = [
            {"job": new.job_id, "shape": new.shape.to_mapping(), "runs": list(new.runs)}
            for new in submitted.submissions
        ]
        values = {**plan_values(study, submitted.decisions), "jobs": made}
        console.note(json_text(values))
        return
    lines = plan_lines(study, submitted.decisions)
    count = sum(len(new.runs) for new in submitted.submissions)
    jobs = ", ".join(str(new.job_id) for new in submitted.submissions)
    lines.append(f"submitted {count}: {jobs}" if count else "submitted 0: nothing is missing")
    lines.append(f"next: titanlab status {sweep_argument(folder_of(study).path)} --watch")
    console.note("\n".join(lines))
