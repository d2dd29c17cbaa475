"""`titanlab sweep …`: plan many runs, submit the missing ones, and return."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from titanlab.cli.compose import answer
from titanlab.errors import ConfigError
from titanlab.launch.launchers import joined
from titanlab.recipe.compose import Loader, conf_folder
from titanlab.recipe.flags import read_flags
from titanlab.sweep.plan import Study, plan_study, with_data
from titanlab.sweep.submit import (
    Submitted,
    check_study,
    decide,
    fitting,
    folder_of,
    plan_lines,
    plan_values,
    silence_of,
    submit,
)
from titanlab.sweep.watch import exit_code, follow
from titanlab.system.files import finite
from titanlab.system.terminal import Console
from titanlab.system.text import sweep_argument

_HELP = """\
titanlab sweep: plan many runs, submit what is missing of them, and return

usage: titanlab sweep [+sweeps=NAME] [KEY=VALUE,VALUE …] [KEY=VALUE …] [FLAG …]

  titanlab sweep +sweeps=quickstart_layouts               a sweep's file, on this host
  titanlab sweep +sweeps=quickstart_layouts --dry-run     what it would submit, what it drops, and why
  titanlab sweep parallelism=ddp,fsdp world=2 seed=0,1    four points: every value with every other
  titanlab sweep +sweeps=ac_memory launch=slurm           jobs of Slurm, each with the nodes of its layout

  -n, --dry-run   plan and say what would be submitted; nothing is written
  --wait          follow the runs to their end; the exit code is then that of the first that failed
  --prune         leave out all whose estimate exceeds a device's memory (titanlab plan), not only those that exceed
                  it by more than the error of estimates
  --keep          leave out nothing because of its estimate
  --force         do those again that have ended; their folders go to superseded/
  --json          the plan as JSON
  -h, --help      this page
  --cfg job, --info, --config-dir …: Hydra's own flags, as in `titanlab train --help`

Submitting again submits what is missing. Points that cannot be run are dropped, each with its reason; a mistake of the
sweep's own is one line, and nothing is submitted. How to write a sweep: docs/sweeps.md.

sweeps: {sweeps}
then: titanlab status SWEEP --watch, titanlab cancel SWEEP, titanlab retry SWEEP --all-failed, titanlab collect SWEEP"""
_FLAGS = {"-n": "dry_run", "--dry-run": "dry_run", "--wait": "wait", "--force": "force", "--json": "as_json",
          "--prune": "prune", "--keep": "keep"}  # fmt: skip


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
    as_json: bool = False
    prune: bool = False
    keep: bool = False
    whole: bool = False


def sweep_verb(arguments: Sequence[str]) -> int:
    """Returns 0 after submission; with --wait the exit code of the first run that failed."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sweeps = sorted(path.stem for path in (conf_folder() / "sweeps").glob("*.yaml"))
        print(_HELP.format(sweeps=", ".join(sweeps)))
        return 0
    args = _parse(arguments)
    flags = read_flags(args.rest)
    if not flags.starts:
        answer(flags)
        return 0
    if not flags.overrides:
        cure = "try +sweeps=quickstart_layouts, or several values of a key; `titanlab sweep --help` lists the sweeps"
        raise ConfigError("arguments", " ".join(args.rest), "say nothing of what to sweep", cure)
    return run_study(args)


def run_study(args: SweepArguments, loader: Loader | None = None) -> int:
    """Plan and submit a study; with `wait`, follow its runs to their end.

    Args:
        loader: has composed the command line, which describes one recipe; None: nothing is composed yet.
    """
    if joined(os.environ) is not None:
        rule = "was started as one of several processes, and a sweep is submitted once"
        raise ConfigError("arguments", " ".join(args.rest), rule, "start it without torchrun or srun")
    with Console() as console:
        # With --json, standard output has nothing but JSON, because programs read it.
        report = (lambda text: None) if args.as_json else console.note
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


def _parse(arguments: Sequence[str]) -> SweepArguments:
    own = {_FLAGS[argument]: True for argument in arguments if argument in _FLAGS}
    if "dry_run" in own and "wait" in own:
        raise ConfigError("arguments", " ".join(arguments), "--dry-run submits nothing to wait for", "leave one out")
    if "prune" in own and "keep" in own:
        raise ConfigError("arguments", " ".join(arguments), "--prune and --keep exclude each other", "leave one out")
    if "as_json" in own and "wait" in own:
        raise ConfigError("arguments", " ".join(arguments), "--wait shows a table, and --json none", "leave one out")
    return SweepArguments(rest=tuple(argument for argument in arguments if argument not in _FLAGS), **own)


def _show(study: Study, args: SweepArguments, console: Console) -> None:
    silence = silence_of(study)
    decisions = decide(study, force=args.force, answered=silence is None)
    if args.as_json:
        values = plan_values(study, decisions) | ({} if silence is None else {"problem": silence})
        console.note(json.dumps(finite(values), indent=2, ensure_ascii=False))
        return
    lines = plan_lines(study, decisions, answered=silence is None)
    if silence is not None:
        lines.append(f"{silence}; nothing of this plan was held against it, and to submit it has to answer")
    console.note("\n".join([*lines, "nothing was submitted (--dry-run)"]))


def _report(study: Study, submitted: Submitted, args: SweepArguments, console: Console) -> None:
    if args.as_json:
        made = [
            {"job": new.job_id, "shape": new.shape.to_mapping(), "runs": list(new.runs)}
            for new in submitted.submissions
        ]
        values = {**plan_values(study, submitted.decisions), "jobs": made}
        console.note(json.dumps(finite(values), indent=2, ensure_ascii=False))
        return
    lines = plan_lines(study, submitted.decisions)
    count = sum(len(new.runs) for new in submitted.submissions)
    jobs = ", ".join(str(new.job_id) for new in submitted.submissions)
    lines.append(f"submitted {count}: {jobs}" if count else "submitted 0: nothing is missing")
    lines.append(f"next: titanlab status {sweep_argument(folder_of(study).path)} --watch")
    console.note("\n".join(lines))
