"""Follows a sweep or one run until the end, and gives the exit code of a sweep."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from titanlab.launch import may_work
from titanlab.records import OutcomeKind, RunFolder, Status
from titanlab.sweep import listing
from titanlab.sweep.listing import Row
from titanlab.sweep.ranking import drift_lines
from titanlab.sweep.reconcile import ACTIVE
from titanlab.sweep.rows import look_at
from titanlab.sweep.sweep_folder import SweepFolder
from titanlab.system import aligned, counted, discard, harmless, sweep_argument
from titanlab.techniques.tracker.wandb import is_uploaded, offline_files
from titanlab.train import is_due

Look = Callable[[], list[dict[str, Any]]]

_COLOURS: Mapping[str, str] = {"good": "green", "busy": "cyan", "idle": "dim", "halted": "yellow", "bad": "red"}
# On a narrow terminal, columns are dropped in this order; then names of runs are shortened.
_DROPPED_FIRST = ("", "layout", "GiB", "MFU", "left")
_LEAST_NAME = 20
_HASH = 9  # Characters of the dash and the hash at the end of a run's name.
# Lines of the live view besides the rows of runs: headings, counts, prompt.
_FRAME_LINES = 6
_LIVE_CAUSES = 5
_FEW = 4
# Keep this text shorter than a line: after Ctrl-C, the terminal writes `^C` behind it.
_LEAVE = "Ctrl-C ends the watching; the runs go on"


class Screen:
    """The output on which a sweep is shown.

    Args:
        environ: environment with NO_COLOR, TERM, COLUMNS and LINES; None: this process's.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._environ = os.environ if environ is None else environ
        self._clock = clock

    @property
    def is_live(self) -> bool:
        """Whether the output is a terminal that can be redrawn."""
        return self._stream.isatty() and self._environ.get("TERM", "") not in ("", "dumb", "unknown")

    def show(self, sweep: SweepFolder, rows: Sequence[Row]) -> None:
        """Print the table as it is now."""
        name, lines, rows = harmless(sweep.title()), upload_lines(sweep, rows), _harmless(rows)
        if self.is_live:
            self._console().print(self._view(name, rows), *lines, sep="\n", markup=False, emoji=False)
        else:
            self._say("\n".join([listing.text(name, rows, now=self._clock()), *drift_lines(rows), *lines]))

    def follow(
        self, sweep: SweepFolder, look: Look, *, seconds: float = 2.0, sleep: Callable[[float], None] = time.sleep
    ) -> list[dict[str, Any]]:
        """Show a sweep until no run is active or waits, or until Ctrl-C, which stops no run. Returns the last rows."""
        rows = look()
        with self._drawn(harmless(sweep.title())) as draw:
            draw(_harmless(rows))
            # Suppress Ctrl-C only around the loop, so that the live view of `_drawn` is closed after it.
            with contextlib.suppress(KeyboardInterrupt):
                while not settled(rows):
                    sleep(seconds)
                    rows = look()
                    draw(_harmless(rows))
        self.show(sweep, rows)
        return rows

    @contextlib.contextmanager
    def _drawn(self, name: str) -> Iterator[Callable[[Sequence[Row]], None]]:
        """A function that shows changing rows: it redraws a terminal, and prints changes as lines elsewhere."""
        before: dict[str, str] = {}

        def tell(rows: Sequence[Row]) -> None:
            """Print a line for each run whose state has changed."""
            now = {row["run"]: listing.state_word(row) for row in listing.runs(rows)}
            changed = [run for run, word in now.items() if before.get(run) != word]
            before.update(now)
            for run in changed:
                self._say(f"{time.strftime('%H:%M:%S', time.localtime(self._clock()))}  {run}: {now[run]}")
            if changed:
                self._say(f"          {listing.state_counts(rows)}")

        if not self.is_live:
            yield tell
            return
        from rich.live import Live

        console = self._console()
        # transient: the live view is removed at the end, when the whole table is printed.
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda rows: live.update(self._view(name, rows, height=console.size.height), refresh=True)

    def _console(self) -> Any:
        # Imported here: `titanlab --help` does not need it.
        from rich.console import Console

        # Console finds NO_COLOR, COLUMNS and LINES in the environment.
        return Console(
            file=self._stream, force_terminal=True, highlight=False, legacy_windows=False, _environ=self._environ
        )

    def _view(self, name: str, rows: Sequence[Row], *, height: int | None = None) -> Any:
        """The table and the lines below it, no higher than `height` lines."""
        from rich.console import Group
        from rich.text import Text

        columns = self._console().size.width
        most = None if height is None else _LIVE_CAUSES
        beneath = [*listing.beneath(rows, most=most), *drift_lines(rows)]
        shown = listing.runs(rows)
        left_out = 0
        if height is not None:
            room = max(1, height - _FRAME_LINES - len(beneath))
            left_out = max(0, len(shown) - room)
            # If not all runs fit: active runs first, then failed, stopped, waiting and finished ones.
            urgency = {"busy": 0, "bad": 1, "halted": 2, "idle": 3, "good": 4}
            places = sorted(range(len(shown)), key=lambda place: (urgency[listing.state_tone(shown[place])], place))
            shown = [shown[place] for place in sorted(places[:room])]
        parts = [Text(name, style="bold")]
        if shown:
            parts += _table(shown, columns, self._clock())
        if left_out:
            parts.append(Text(f"… and {counted(left_out, 'run')} more", style="dim"))
        if height is None:
            folded = (textwrap.wrap(line, columns, subsequent_indent="    ") for line in beneath)
            return Group(*parts, *(Text(line) for lines in folded for line in lines))
        parts += [Text(line, overflow="ellipsis", no_wrap=True) for line in beneath]
        return Group(*parts, Text(_LEAVE, style="dim"))

    def _say(self, text: str) -> None:
        try:
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(text.encode(encoding, errors="replace").decode(encoding) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            discard(self._stream)  # The reader of the pipe has ended (`| head`).


def _harmless(rows: Sequence[Row]) -> list[Row]:
    """Rows whose texts cannot control the terminal."""
    return [{key: harmless(value) if isinstance(value, str) else value for key, value in row.items()} for row in rows]


def settled(rows: Sequence[Row]) -> bool:
    """Whether no run is active and none waits for a job."""
    return not any(row["state"] in (*ACTIVE, "queued") for row in rows)


def _table(rows: Sequence[Row], columns: int, now: float) -> list[Any]:
    """The lines of the table. If it is too wide, columns are dropped, and then names of runs are shortened."""
    from rich.text import Text

    lines = [dict(zip(listing.HEADINGS, listing.cells(row, now=now), strict=True)) for row in rows]

    def drawn() -> list[str]:
        return aligned(listing.HEADINGS, [list(line.values()) for line in lines], right=listing.FIGURES)

    longest = max(len(line["run"]) for line in lines)
    most = columns + max(0, longest - _LEAST_NAME)
    for dropped in _DROPPED_FIRST:
        if max(map(len, drawn())) > most:
            for line in lines:
                line[dropped] = ""
    width = max(_LEAST_NAME, longest + min(0, columns - max(map(len, drawn()))))
    for line in lines:
        if len(line["run"]) > width:
            # Cut the middle: the hash at the end distinguishes runs.
            line["run"] = f"{line['run'][: width - _HASH - 1]}…{line['run'][-_HASH:]}"
    heading, *others = drawn()
    texts = [Text(heading, style="bold"), *map(Text, others)]
    start = heading.index("state")
    for row, text in zip(rows, texts[1:], strict=True):
        text.stylize(_COLOURS[listing.state_tone(row)], start, start + len(listing.state_word(row)))
    for text in texts:
        text.truncate(columns, overflow="ellipsis")
    return texts


def follow(folder: SweepFolder) -> list[dict[str, Any]]:
    """Show a sweep until no run is active or waits, or until Ctrl-C, which does not stop runs. Returns its rows.

    If the sweep's supervisor is killed meanwhile, it is started again.
    """
    # Imported here: showing a sweep does not need it.
    from titanlab.sweep.submit import wake

    look = look_at(folder)

    def look_and_wake() -> list[dict[str, Any]]:
        wake(folder)
        return look()

    return Screen().follow(folder, look_and_wake)


def upload_lines(folder: SweepFolder, rows: Sequence[Row]) -> list[str]:
    """How to see a sweep in wandb, if no run is active and files of a run wait for an upload; else empty."""
    if not settled(rows):
        return []
    runs = [folder.run(row["run"]) for row in rows if row["state"] == "ended"]
    waiting = (file for run in runs for file in offline_files(run.path) if not is_uploaded(file))
    # The runs of a small sweep that has just ended may still be writing their files.
    if not any(waiting) and not any(map(is_due, runs[:_FEW])):
        return []
    name = sweep_argument(folder.path)
    return [f"in wandb: titanlab sync {name}, then titanlab workspace {name}"]


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """The exit code of the first run that is not done, or of Ctrl-C if that run has not ended; 0 if all are done."""
    for row in rows:
        if row["state"] == "dropped" or row["outcome"] == OutcomeKind.DONE.value:
            continue
        kind = OutcomeKind(row["outcome"]) if row["outcome"] else OutcomeKind.CANCELLED
        return int(kind.exit_code)
    return 0


# Seconds between two reads of the sweep's table and, with it, of the scheduler's queue.
_LOOK_SECONDS = 5.0
# Stop watching a run without a job after this silence: it may be on another host, whose processes cannot be seen.
_SILENT_SECONDS = 300.0
_AUTOMATIC = [kind.value for kind in OutcomeKind if kind.automatic]


class RunWatch:
    """Watches one run: its lock, its status, and its row in the sweep's table. Reading the table closes dead runs."""

    def __init__(self, run: RunFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._look = look_at(SweepFolder(run.path.parent.absolute()))
        self._clock = clock
        self._due = -float("inf")
        self._last: tuple[bool, str] = (True, "")

    def goes_on(self) -> tuple[bool, str]:
        """Whether the run goes on, and why it waits or does not go on; the reason may be empty."""
        if self._run.is_claimed():
            self._due = -float("inf")
            return True, ""
        status = self._run.known_status()
        # After an automatic end, such as a preemption, a job may put itself back into the queue.
        if status is not None and status.state == "ended" and status.outcome not in _AUTOMATIC:
            return False, f"ended: {status.outcome}"
        if self._clock() >= self._due:
            self._due = self._clock() + _LOOK_SECONDS
            self._last = self._by_row(status)
        return self._last

    def _by_row(self, status: Status | None) -> tuple[bool, str]:
        rows = (row for row in self._look() if row["run"] == self._run.path.name and row["state"] != "dropped")
        row = next(rows, None)
        if row is None:
            return False, "is not in its sweep any more"
        if row["state"] == "queued":
            return True, "waits in the queue" + (f": {row['queue_reason']}" if row["queue_reason"] else "")
        if row["state"] == "prepared":
            return False, "nobody has started it"
        if row["state"] not in ACTIVE:
            return False, f"{row['state']}: {row['outcome'] or row['cause'] or 'unknown'}"
        # `may_work` also finds a process of this host that was silent for long on a file system without locks.
        if row["job_id"] is not None or may_work(status, silent_seconds=_SILENT_SECONDS, here_seconds=_SILENT_SECONDS):
            return True, ""
        return False, "nobody works on it any more, and it left no result"
