"""Shows records of single runs: `titanlab logs`, `titanlab diagnose`, `titanlab checkpoints`, `titanlab hosts`."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from titanlab.checkpoint import checkpoints_of, list_checkpoints
from titanlab.cli.arguments import json_text
from titanlab.distributed import has_hung, hung_attempt
from titanlab.errors import ConfigError
from titanlab.launch import bad_hosts, clear_bad_hosts, host_names, jobs_folder, submissions
from titanlab.records import (
    Growing,
    Line,
    LogPart,
    RunFolder,
    backward,
    complete_end,
    find_run,
    forward,
    log_parts,
    merged,
    named,
    part_of,
    rank_log,
    rank_logs,
    size_of,
    timed,
    timed_from_end,
)
from titanlab.system import Console, aligned, data_size, duration, harmless, shown_path, user_path

_POLL_SECONDS = 0.5
_MOST_NAMED = 6


Fits = Callable[[bytes], object]


def logs_verb(args: Namespace) -> int:
    """Print the logs. Returns 0, also when Ctrl-C ends --follow."""
    if args.tail is not None and args.tail < 0:
        raise ConfigError("--tail", args.tail, "must not be negative", "try 100")
    if args.follow and args.attempt is not None:
        rule = "an attempt that has ended prints no more"
        raise ConfigError("--attempt", args.attempt, rule, "leave out --attempt or --follow")
    try:
        # The empty pattern matches every line.
        fits = re.compile((args.grep or "").encode()).search
    except re.error as error:
        rule = f"is not a regular expression ({error})"
        raise ConfigError("--grep", args.grep, rule, "put \\ before ( [ { * + ?") from None
    run = RunFolder(find_run(args.run, args.runs).path.absolute())
    run.chosen_attempt(args.attempt)
    logs = _chosen(run, args.rank, is_followed=args.follow)
    ends = {rank: size_of(path) for rank, path in logs.items()}
    if args.follow:
        # Leave out an incomplete last line: --follow prints it when it is complete.
        ends = {rank: complete_end(logs[rank], end) if end else 0 for rank, end in ends.items()}
    if not args.follow and not any(ends.values()):
        Console().note(_without_logs(run))
        return 0
    with LogOutput(width=len(str(max(logs, default=0))) if args.rank is None else None) as output:
        with contextlib.suppress(KeyboardInterrupt):
            for line in _lines(run, logs, ends, args, fits):
                output.line(line)
            if args.follow:
                _follow(run, args.rank, ends, fits, output)
    return 0


def _chosen(run: RunFolder, rank: int | None, *, is_followed: bool) -> dict[int, Path]:
    logs = rank_logs(run)
    if rank is None:
        return logs
    world: Any = run.config().get("world")
    if rank in logs or (is_followed and isinstance(world, int) and 0 <= rank < world):
        return {rank: rank_log(run, rank)}
    if not logs:
        return {}
    rule = f"the run has no log of this rank; it has those of {named(list(logs))}"
    raise ConfigError("--rank", rank, rule, f"try --rank {min(logs, key=lambda known: abs(known - rank))}")


def _lines(
    run: RunFolder, logs: Mapping[int, Path], ends: Mapping[int, int], args: Namespace, fits: Fits
) -> Iterable[Line]:
    """The lines up to `ends` that match the pattern, ordered by time; `args` may ask for one attempt, or a tail."""
    of_ranks = []
    for rank, path in logs.items():
        parts = log_parts(run, rank, path) if args.attempt is None else [part_of(run, rank, path, args.attempt)]
        of_ranks.append([replace(part, end=min(part.end, ends[rank])) for part in parts])
    if args.tail is None:

        def lines_of(parts: Sequence[LogPart]) -> Iterator[Line]:
            for part in parts:
                texts = forward(part.path, part.start, part.end)
                lines = timed(texts, part.rank, begin=part.begin, last=part.last)
                yield from (line for line in lines if fits(line.text))

        return merged(map(lines_of, of_ranks))
    last = []
    for parts in filter(None, of_ranks):
        found = backward(parts[-1].path, parts[0].start, parts[-1].end)
        texts = list(itertools.islice(filter(fits, found), args.tail))[::-1]
        last.append(timed_from_end(texts, parts[-1].rank, last=parts[-1].last))
    lines = list(merged(last))
    return lines[len(lines) - min(args.tail, len(lines)) :]


def _follow(run: RunFolder, rank: int | None, ends: Mapping[int, int], fits: Fits, output: LogOutput) -> None:
    # Imported here, as below: the other verbs of this file need no table of a sweep.
    from titanlab.sweep import RunWatch

    growing = {number: Growing(rank_log(run, number), position) for number, position in ends.items()}
    watch, attempt, last_reason = RunWatch(run), run.newest_attempt(), ""
    while True:
        # Ask before reading: the read then includes all that an ended run has printed.
        goes_on, why = watch.goes_on()
        if rank is None:
            for number, path in rank_logs(run).items():
                growing.setdefault(number, Growing(path))
        output.widen(len(str(max(growing, default=0))))
        newest = run.newest_attempt()
        if newest != attempt:
            attempt = newest
            if newest > 1:
                output.note(f"attempt {newest} begins")
        new_lines: list[list[Line]] = []
        for number, log in growing.items():
            texts = log.read(last=not goes_on)
            if log.changed:
                output.note(f"{log.path.name} was replaced or cut short; it is read from its beginning")
            new_lines.append(timed_from_end(list(filter(fits, texts)), number, last=time.time()))
        for line in merged(new_lines):
            output.line(line)
        sys.stdout.buffer.flush()
        if not goes_on or (why and why != last_reason):
            output.note(f"{run.path.name} {why}")
        if not goes_on:
            return
        last_reason = why
        time.sleep(_POLL_SECONDS)


def _without_logs(run: RunFolder) -> str:
    nothing = f"{run.path.name}: no rank has printed anything"
    # Look for files with the output of the run's jobs, the latest job first.
    sweep, files = run.path.parent, list[Path]()
    for submission in reversed(submissions(sweep)):
        if run.path.name in submission.runs:
            index = submission.runs.index(run.path.name)
            found = jobs_folder(sweep).glob(f"{submission.job_id}_{index}_*_log.*")
            files += sorted(found, key=lambda path: (path.suffix != ".err", path.name))
    if printed := [shown_path(path) for path in files if size_of(path)]:
        more = f" and {len(printed) - _MOST_NAMED} more" if len(printed) > _MOST_NAMED else ""
        return f"{nothing}; its job has: {' '.join(printed[:_MOST_NAMED])}{more}"
    status, result = run.known_status(), run.result()
    if result is not None:
        return f"{nothing}; it ended as {result.kind.value}: {result.cause or result.kind.meaning}"
    from titanlab.sweep import RunWatch

    goes_on, why = RunWatch(run).goes_on()
    state = "unknown" if status is None else status.state
    return f"{nothing} yet ({why or (state if goes_on else 'nobody has started it')})"


class LogOutput:
    """Standard output of `titanlab logs`: the bytes of the logs; on a terminal only harmless text.

    `width`: columns for the rank's number before each line; None: lines have no number.
    """

    def __init__(self, *, width: int | None) -> None:
        self._width = width
        self._is_terminal = sys.stdout.isatty()

    def widen(self, width: int) -> None:
        """Make room for the number of a higher rank, if lines have numbers."""
        if self._width is not None:
            self._width = max(self._width, width)

    def line(self, line: Line) -> None:
        """Write a line, now or with later ones; OSError: the disk is full, or the reader of the pipe has ended."""
        head = b"" if self._width is None else f"[rank {line.rank:>{self._width}}] ".encode()
        text = harmless(line.text.decode(errors="replace")).encode(errors="replace") if self._is_terminal else line.text
        sys.stdout.buffer.write(head + text + b"\n")

    def note(self, text: str) -> None:
        """Write a note on standard error, so that standard output has only lines of the logs."""
        sys.stdout.buffer.flush()
        Console(sys.stderr).note(text)

    def __enter__(self) -> LogOutput:
        sys.stdout.flush()
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.buffer.flush()


def diagnose_verb(args: Namespace) -> int:
    run = find_run(args.run, args.runs)
    attempt = run.chosen_attempt(args.attempt)
    result = run.result(attempt) if attempt else run.result()
    values: dict[str, Any] = {"run": run.path.name, "attempt": attempt, "hung": False}
    values["outcome"] = None if result is None else result.kind.value
    with Console() as console:
        if not attempt or not has_hung(run, attempt):
            console.note(json_text(values) if args.json else _without_hang(run, attempt))
            return 0
        hung = hung_attempt(run, attempt)
        diagnosis = hung.diagnosis
        if args.json:
            values |= {"hung": True, "cause": None if result is None else result.cause, "verdict": diagnosis.verdict}
            values |= {"ranks": diagnosis.ranks, "pending": diagnosis.pending, "damaged": hung.damaged}
            values |= {"rows": hung.rows}
            console.note(json_text(values))
            return 0
        for line in hung.damaged:
            console.warn(line)
        title = f"{run.path.name}, attempt {attempt}: {diagnosis.verdict}"
        console.note("\n".join([title, "", *_rank_table(hung.rows)]))
    return 0


_RANK_HEADINGS = ("rank", "state", "phase", "last collective", "waits for", "called in")
_STACK_LINES = 8


def _rank_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each rank, and below these lines the ranks' stacks; equal stacks are shown once."""
    cells = []
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in rows:
        last = "" if row["last"] is None else f"{row['last']}: {'done' if row['is_done'] else 'pending'}"
        if row["seconds"] is not None:
            last += f" {'in' if row['is_done'] else 'for'} {row['seconds']:.3g} s"
        waits_for = ", ".join(map(str, row["waits_for"]))
        cells.append([str(row["rank"]), row["state"], row["phase"] or "", last, waits_for, row["called_in"] or ""])
        places[tuple(row["stack"][:_STACK_LINES])].append(row["rank"])
    # Drop the column `called in` if it is empty: torch's recorder was not asked, or did not answer in time.
    count = len(_RANK_HEADINGS) - (not any(row["called_in"] for row in rows))
    lines = aligned(_RANK_HEADINGS[:count], [row[:count] for row in cells])
    for stack, ranks in places.items():
        if stack:
            lines += ["", f"{named(ranks)}, innermost call first:", *(f"  {place}" for place in stack)]
    return lines


def _without_hang(run: RunFolder, attempt: int) -> str:
    result = run.result(attempt) if attempt else run.result()
    if result is not None:
        text = f"did not hang; it ended as {result.kind.value}: {result.cause or result.kind.meaning}"
    elif attempt and (stopped := run.stopped(attempt)):
        text = f"has not ended; {stopped}"
    else:
        state = run.status()
        text = f"did not hang; it has not ended{'' if state is None else f' ({state.state})'}"
    earlier = [number for number in run.attempts() if number != attempt and has_hung(run, number)]
    more = f"; attempt {earlier[-1]} hung, see --attempt {earlier[-1]}" if earlier else ""
    return f"{run.path.name}, attempt {attempt}, {text}{more}"


def _ago(moment: float) -> str:
    return f"{duration(max(time.time() - moment, 0.0))} ago"


_CHECKPOINT_HEADINGS = ("step", "size", "saved", "state", "")


def checkpoints_verb(args: Namespace) -> int:
    """Print a line for each checkpoint. Returns 1 if one was found damaged."""
    run = find_run(args.run, args.runs)
    rows = list_checkpoints(checkpoints_of(run), verifies=args.verify)
    with Console() as console:
        if args.json:
            console.note(json.dumps([asdict(row) for row in rows]))
        elif not rows:
            console.note(f"{shown_path(run.path)} has no checkpoints")
        else:
            cells = []
            for row in rows:
                state = f"{row.state}, verified" if row.verified else row.state
                problem = (row.problem or "").removeprefix("is damaged: ")
                cells.append((str(row.step), data_size(row.bytes), _ago(row.saved), state, problem))
            console.note("\n".join(aligned(_CHECKPOINT_HEADINGS, cells, right=_CHECKPOINT_HEADINGS[:3])))
    return 1 if any(row.problem is not None for row in rows) else 0


_HOST_HEADINGS = ("host", "when", "outcome", "run", "cause")


def hosts_verb(args: Namespace) -> int:
    if args.clear is not None and args.all:
        raise ConfigError("--clear", args.clear, "cannot stand beside --all", "give one of the two")
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
            cells = [[bad.host, _ago(bad.time), bad.kind, bad.run, bad.cause] for bad in known]
            console.note("\n".join(aligned(_HOST_HEADINGS, cells, right=())))
    return 0
