"""`titanlab cancel SWEEP [RUN …]`: end a sweep's jobs."""

from __future__ import annotations

from collections.abc import Sequence

from titanlab.cli.arguments import Arguments
from titanlab.sweep.enqueue import cancel
from titanlab.sweep.sweep_folder import open_sweep
from titanlab.system.terminal import Console


def main(arguments: Sequence[str]) -> int:
    """Cancel runs: active runs save and end, waiting runs do not start. Returns 0, also if all have ended."""
    parser = Arguments("cancel", "Cancel runs of a sweep: those that run save and end, those that wait do not start.")
    parser.add_argument("sweep", help="the sweep's name, or its folder")
    parser.add_argument("run", nargs="*", help="runs by folder, label or first digits of the hash (default: all)")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
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
