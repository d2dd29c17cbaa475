"""`titanlab sweep …`: plan many runs, submit the missing ones, and return."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence

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


def sweep_verb(args: Namespace) -> int:
    """Returns 0 after submission; with --wait the exit code of the first run that failed."""
    for first, second, rule in (
        ("dry_run", "wait", "submits nothing to wait for (--wait)"),
        ("prune", "keep", "excludes --keep"),
        ("json", "wait", "prints no table, and --wait shows one"),
    ):
        if getattr(args, first) and getattr(args, second):
            raise ConfigError(f"--{first.replace('_', '-')}", "true", rule, "leave one out")
    flags = read_flags(args.rest)
    if flags.answer:
        answer(flags)
        return 0
    if not flags.overrides:
        cure = "try +sweeps=quickstart_layouts, or several values of a key; `titanlab sweep --help` lists the sweeps"
        raise ConfigError("arguments", " ".join(args.rest), "do not say what to sweep", cure)
    return run_study(**vars(args))


def run_study(
    rest: Sequence[str],
    *,
    dry_run: bool = False,
    wait: bool = False,
    force: bool = False,
    json: bool = False,
    prune: bool = False,
    keep: bool = False,
    whole: bool = False,
    loader: Loader | None = None,
) -> int:
    """Plan and submit a study; with `wait`, follow its runs to their end.

    Args:
        rest: the command line without the verb's own flags, which are passed as the other parameters.
        whole: a point that cannot run is an error; otherwise it is dropped.
        loader: has composed the command line, which describes one recipe; None: nothing is composed yet.
    """
    if joined(os.environ) is not None:
        rule = "was started as one of several processes, and a sweep is submitted once"
        raise ConfigError("arguments", " ".join(rest), rule, "start it without torchrun or srun")
    with Console() as console:
        # With --json, standard output has only JSON, because programs read it.
        report = (lambda text: None) if json else console.note
        # A single recipe, which `train` submits, keeps its own profiler.
        study = plan_study(rest, whole=whole, loader=loader, measured=loader is None)
        if not keep and not whole:
            study = fitting(study, strictly=prune)
        if dry_run:
            silence = silence_of(study)
            decisions = decide(study, force=force, answered=silence is None)
            if json:
                values = plan_values(study, decisions) | ({} if silence is None else {"problem": silence})
                console.note(json_text(values))
                return 0
            lines = plan_lines(study, decisions, answered=silence is None)
            if silence is not None:
                cure = "this plan was not compared with the scheduler's jobs, and submitting needs its answer"
                lines.append(f"{silence}; {cure}")
            console.note("\n".join([*lines, "nothing was submitted (--dry-run)"]))
            return 0
        # Preparing data takes long, so the launcher and the folder are checked first.
        check_study(study)
        study = with_data(study, report, whole=whole)
        submitted = submit(study, report, force=force)
        _report(study, submitted, console, as_json=json)
    if not wait:
        return 0
    own = {decision.run for decision in submitted.decisions}
    # The sweep may also have runs of earlier submissions, which do not count here.
    return exit_code([row for row in follow(submitted.folder) if row["run"] in own])


def _report(study: Study, submitted: Submitted, console: Console, *, as_json: bool) -> None:
    if as_json:
        new = submitted.submissions
        jobs = [{"job": each.job_id, "shape": each.shape.to_mapping(), "runs": list(each.runs)} for each in new]
        console.note(json_text({**plan_values(study, submitted.decisions), "jobs": jobs}))
        return
    lines = plan_lines(study, submitted.decisions)
    count = sum(len(new.runs) for new in submitted.submissions)
    names = ", ".join(str(new.job_id) for new in submitted.submissions)
    lines.append(f"submitted {count}: {names}" if count else "submitted 0: nothing is missing")
    lines.append(f"next: titanlab status {sweep_argument(folder_of(study).path)} --watch")
    console.note("\n".join(lines))
