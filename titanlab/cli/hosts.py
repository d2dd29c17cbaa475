"""`titanlab hosts`: hosts on which a run failed, which later jobs of that run leave out."""

from __future__ import annotations

import time
from collections.abc import Sequence

from titanlab.cli.arguments import Arguments
from titanlab.errors import ConfigError
from titanlab.launch.evidence import bad_hosts, clear_bad_hosts, host_names
from titanlab.sweep.listing import aligned
from titanlab.system.files import user_path
from titanlab.system.terminal import Console
from titanlab.system.text import duration

_HEADINGS = ("host", "when", "outcome", "run", "cause")


def main(arguments: Sequence[str]) -> int:
    """Print a line for each failure, or forget some."""
    parser = Arguments("hosts", "List hosts on which a run failed; later jobs of that run leave them out.")
    parser.add_argument("--clear", metavar="HOST", help="forget the failures on this host")
    parser.add_argument("--all", action="store_true", help="forget the failures on all hosts")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    if args.clear is not None and args.all:
        raise ConfigError("--clear", args.clear, "is one host, and --all is given", "leave one of the two out")
    runs = user_path(args.runs)
    known = bad_hosts(runs)
    with Console() as console:
        if args.clear is not None and args.clear not in host_names(known):
            shown = ", ".join(host_names(known)) or "none"
            raise ConfigError("--clear", args.clear, f"is not on the list; it has: {shown}", "see `titanlab hosts`")
        if args.clear is not None or args.all:
            cleared = host_names([bad for bad in known if args.clear in (None, bad.host)])
            clear_bad_hosts(runs, args.clear)
            console.note(f"cleared: {', '.join(cleared) or 'nothing'}")
        elif not known:
            console.note(f"no run under {args.runs} has failed because of its host")
        else:
            now = time.time()
            cells = [
                [bad.host, f"{duration(max(now - bad.time, 0.0))} ago", bad.kind, bad.run, bad.cause] for bad in known
            ]
            console.note("\n".join(aligned(_HEADINGS, cells, right=())))
    return 0
