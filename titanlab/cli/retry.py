"""`titanlab retry SWEEP [RUN …]`: submit runs again that have ended."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.cli.arguments import Arguments
from titanlab.errors import ConfigError
from titanlab.sweep.retry import FAILED, Retried, retry
from titanlab.sweep.sweep_folder import SweepFolder, open_sweep
from titanlab.system.terminal import Console
from titanlab.system.text import sweep_argument


def main(arguments: Sequence[str]) -> int:
    """Submit runs again, and print which. Returns 0, also if there is nothing to submit."""
    parser = Arguments("retry", "Put ended runs of a sweep back into the queue; they go on from their checkpoints.")
    parser.add_argument("sweep", help="the sweep's name, or its folder")
    parser.add_argument(
        "runs_and_keys",
        nargs="*",
        metavar="RUN | launch.KEY=VALUE",
        default=[],
        help="runs by folder, label or first digits of the hash (default: all); keys of launch, and cluster.nodes and "
        "cluster.per_node, for the new jobs",
    )
    parser.add_argument("--outcome", default="", help="those that have ended so: hang,node_fail")
    parser.add_argument("--all-failed", action="store_true", help="those that have ended otherwise than done")
    parser.add_argument("--stale", action="store_true", help="those that other code has made, which start anew")
    parser.add_argument("--dry-run", action="store_true", help="say which they are, and submit nothing")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    if args.outcome and args.all_failed:
        raise ConfigError("--outcome", args.outcome, "is one of those of --all-failed", "leave one of the two out")
    outcomes = [word.strip() for word in args.outcome.split(",") if word.strip()]
    folder = open_sweep(args.sweep, args.runs)
    with Console() as console:
        done = retry(
            folder,
            console.note,
            outcomes=FAILED if args.all_failed else outcomes,
            stale=args.stale,
            names=[text for text in args.runs_and_keys if "=" not in text],
            overrides=[text for text in args.runs_and_keys if "=" in text],
            dry_run=args.dry_run,
        )
        _report(console, folder, done, dry_run=args.dry_run)
    return 0


def _report(console: Console, folder: SweepFolder, done: Retried, *, dry_run: bool) -> None:
    if dry_run:
        for chosen in done.chosen:
            outcome = chosen.outcome or "never started"
            console.note(f"{chosen.run.path.name}: {outcome}{', anew' if chosen.anew else ''}")
    count = len(done.chosen)
    named = sweep_argument(folder.path)
    runs = "1 run" if count == 1 else f"{count} runs"
    if not count:
        console.note(f"nothing of {folder.name} is to be done again; titanlab status {named} shows its runs")
    elif dry_run:
        console.note(f"{runs} would be submitted")
    else:
        console.note(f"{runs} submitted; titanlab status {named} --watch follows them")
