"""One GPU session, in calls of a few minutes that go on where the last one stopped.

    benchmarks/gpu_session.sh --list                the rows, and how long they are expected to take
    benchmarks/gpu_session.sh                       for 520 seconds; then again, until nothing is left
    benchmarks/gpu_session.sh --only ladder,float8/rowwise
    benchmarks/gpu_session.sh --rehearse            every row on a CPU, with tiny shapes

Each row is a process of its own, which is ended when its time is over. Rows that fail or are ended are data: they are
kept with the reason, and run again only by --again. docs/my-gpu-box.md says how to bring the results home.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from gpu_session.children import ROOT, SessionError, end_all, end_orphans, folder_of_its_own
from gpu_session.facts import NEEDED, packages

# A row is begun if it would take no longer than this share of what is left.
_SAFETY = 0.85
# Seconds at the end of a call for its table.
_LAST = 5.0


def main(given: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if rows are left; 2 if the session cannot begin or go on."""
    begun = time.monotonic()
    args = _arguments(given)
    try:
        return _session(args, end=begun + args.seconds - args.spent)
    except (SessionError, OSError) as error:
        print(f"gpu_session: {' '.join(str(error).split())}")
        return 2


def _session(args: argparse.Namespace, *, end: float) -> int:
    """One call, which ends at a time of `time.monotonic`."""
    missing = [NEEDED[name] for name, version in packages().items() if name in NEEDED and version is None]
    if missing:
        names = ", ".join(missing)
        raise SessionError(f"not installed: {names}; carry their wheels and name the folder as WHEELS")
    # Imported when these are there.
    from gpu_session.measure import facts_of_this_machine
    from gpu_session.rows import chosen, rows
    from gpu_session.sizes import GPU, REHEARSAL

    sizes = REHEARSAL if args.rehearse else GPU
    try:
        listed = chosen(rows(sizes), args.only)
    except ValueError as error:
        raise SessionError(str(error)) from error
    if args.list:
        print(_listing(listed, packages()))
        return 0
    if args.rehearse:
        # A machine with a GPU rehearses on its CPU; tiny products are fastest on one core.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, _ended)
    signal.signal(signal.SIGINT, _ended)
    if orphans := end_orphans():
        print(f"ended {orphans} processes of a session that was killed")
    facts = facts_of_this_machine()
    if facts.device == "cpu" and not args.rehearse:
        raise SessionError("torch sees no GPU here; --rehearse runs every row on the CPU, with tiny shapes")
    sizes = sizes.fitted(facts)
    return _Session(args, sizes, facts, end).run(rows(sizes), chosen(rows(sizes), args.only))


def _ended(number: int, _: object) -> None:
    """An end from outside: rows that are over are on the disk, and nothing stays on the GPU."""
    end_all()
    os._exit(128 + number)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_session.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the rows and leave")
    parser.add_argument("--only", type=_names, default=[], metavar="NAME,…", help="pieces or rows; * fits any text")
    parser.add_argument("--seconds", type=float, default=520.0, help="of this call (default 520)")
    parser.add_argument("--spent", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder of the results (default $OUT, else benchmarks/results/…)")
    parser.add_argument("--from", dest="earlier", type=Path, action="append", default=[], help="earlier rows")
    parser.add_argument("--again", action="store_true", help="also the rows that failed or were late")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--at-once", type=int, default=1, help="rows beside each other, for a rehearsal")
    args = parser.parse_args(given)
    if args.at_once > 1 and not args.rehearse:
        parser.error("--at-once: rows on a GPU would slow each other down")
    for path in args.earlier:
        if not path.exists():
            parser.error(f"--from {path}: there is no such file or folder")
    if args.out is None:
        given_out = os.environ.get("OUT")
        home = ROOT / ".cache" if args.rehearse else ROOT / "benchmarks" / "results"
        args.out = Path(given_out) if given_out else home / "gpu_session"
    return args


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _listing(rows: Sequence[Any], installed: Mapping[str, str | None]) -> str:
    """The rows with their seconds and the packages that they lack, and the sums."""
    lines = []
    for row in rows:
        lacking = f"  ({reason})" if (reason := row.without(installed)) else ""
        lines.append(f"{row.name:32} {row.expected:4} s, {row.limit:3} s at most  {row.what}{lacking}")
    total = sum(row.expected for row in rows)
    return "\n".join([*lines, f"{len(rows)} rows, {total} s expected: {total / 60:.1f} minutes"])


class _Session:
    """One call."""

    def __init__(self, args: argparse.Namespace, sizes: Any, facts: Any, end: float) -> None:
        from gpu_session.record import Record, code, commit

        self._args, self._sizes, self._facts = args, sizes, facts
        self._end = end
        self._record = Record(args.out, facts, code=code(), commit=commit())
        for path in args.earlier:
            print(self._record.take(path))
        self._lock = Lock()

    def run(self, order: Sequence[Any], wanted: Sequence[Any]) -> int:
        """Run what is not there yet, and write the table. Returns 1 if rows are left."""
        print(f"{self._facts.device}, torch {self._facts.torch}: {len(wanted)} rows, results in {self._args.out}")
        if self._facts.gpus > 1:
            print(f"uses GPU 0 of {self._facts.gpus}")
        todo = [row for row in wanted if not self._record.done(row)]
        if self._args.again:
            # Those that have waited longest first, so that every one has its turn after some calls.
            ended = {row: at for row in wanted if row not in todo and (at := self._record.ended_badly(row)) is not None}
            todo += sorted(ended, key=lambda row: ended[row])
        if self._args.at_once == 1:
            left = [row for row in todo if not self._one(row)]
        else:
            with ThreadPoolExecutor(max_workers=self._args.at_once) as pool:
                left = [row for row, ran in zip(todo, pool.map(self._one, todo), strict=True) if not ran]
        self._write(order)
        if left:
            seconds = sum(row.expected for row in left)
            print(f"left for the next call: {len(left)} rows, {seconds} s expected: {', '.join(r.name for r in left)}")
        return 1 if left else 0

    def _one(self, row: Any) -> bool:
        """Run a row if it fits into this call; whether it is done."""
        from gpu_session.measure import CUT, LATE, measured

        left = self._end - time.monotonic() - _LAST
        if row.lacking(self._facts) is None and row.expected > _SAFETY * left:
            return False
        own = row.limit * self._sizes.patience
        limit = min(own, left)
        with folder_of_its_own() as folder:
            outcome = measured(row, self._sizes, self._facts, limit=limit, folder=folder)
        if outcome["status"] == LATE and limit < own:
            # It was the call's end, not the row's limit: the next call runs it again.
            outcome.update(status=CUT, reason=f"the call ended after {limit:.0f} s of it")
        with self._lock:
            self._record.keep(outcome)
            print(_summary(outcome), flush=True)
        return bool(outcome["status"] != CUT)

    def _write(self, order: Sequence[Any]) -> None:
        from gpu_session.record import TABLE
        from gpu_session.table import page

        text = page(order, self._record.rows(order), self._facts, self._sizes)
        (self._args.out / TABLE).write_text(text, encoding="utf-8")
        print(f"\n{text}\nwritten: {self._args.out / TABLE}")


def _summary(outcome: dict[str, Any]) -> str:
    """A row, as soon as it is over."""
    figures = outcome.get("figures", {})
    parts = [f"{outcome['row']:32} {outcome['status']:8} {outcome.get('wall_seconds', 0.0):6.1f} s"]
    if "tokens_per_second" in figures:
        parts.append(f"{figures['tokens_per_second']:,.0f} tokens/s")
    if figures.get("mfu_percent") is not None:
        parts.append(f"MFU {figures['mfu_percent']:.1f} %")
    if "reason" in outcome:
        parts.append(str(outcome["reason"]))
    return "  ".join(parts)


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        # Python would leave with 1, which says that rows are left.
        traceback.print_exc()
        code = 2
    sys.exit(code)
