"""`titanlab report SWEEP`: write a sweep's report as one HTML file, and its figures as files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.arguments import Arguments
from titanlab.errors import ConfigError
from titanlab.sweep.sweep_folder import SweepFolder, open_sweep
from titanlab.system.files import user_path
from titanlab.system.terminal import Console

_ENDINGS = (".html", ".htm")


def main(arguments: Sequence[str]) -> int:
    """Write the report, and print its answer and where it is."""
    parser = Arguments("report", "Write a sweep's report: one HTML file, which opens without a network.")
    parser.add_argument("sweep", help="the sweep's name, or its folder")
    parser.add_argument("--by", choices=("tps", "mfu", "memory"), default="tps", help="rank by it (default tps)")
    parser.add_argument(
        "--into", type=Path, help="an HTML file, or a folder (default: SWEEP.html in the sweep's folder)"
    )
    parser.add_argument("--figures", type=Path, help="a folder: also write each figure there, for papers")
    parser.add_argument("--format", choices=("png", "svg", "pdf"), help="of these figures (default png)")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    if args.format is not None and args.figures is None:
        raise ConfigError("--format", args.format, "is that of figures", "add --figures FOLDER")
    sweep = open_sweep(args.sweep, args.runs)
    # Imported here: the planner and the table take time to import, and `--help` needs neither.
    from titanlab.report.report import check_matplotlib, write_report
    from titanlab.sweep.rows import look_at

    check_matplotlib(sweep.name)
    into = _file(args.into, sweep)
    with Console() as console:
        figures = None if args.figures is None else user_path(args.figures)
        rows = look_at(sweep, console.warn)()
        written = write_report(sweep, rows, into=into, figures=figures, format=args.format or "png", by=args.by)
        lines = [written.sentence, *(f"figure: {os.path.relpath(path)}" for path in written.figures)]
        console.note("\n".join([*lines, f"report: {os.path.relpath(written.file)}"]))
    return 0


def _file(into: Path | None, sweep: SweepFolder) -> Path:
    """The HTML file that `--into` names: a name with the ending of a page is a file, any other one a folder."""
    name = f"{sweep.name}.html"
    if into is None:
        return sweep.path / name
    into = user_path(into)
    if into.suffix.lower() in _ENDINGS and not into.is_dir():
        return into
    if into.exists() and not into.is_dir():
        raise ConfigError("--into", into, "is a file, and its name has not the ending .html", f"try {into}.html")
    return into / name
