"""Records of single runs: `titanlab logs`, `titanlab diagnose`, `titanlab checkpoints`, `titanlab hosts`."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    part_of,
    rank_log,
    rank_logs,
    rank_rows,
    size_of,
    table_lines,
    timed,
    timed_from_end,
)
from titanlab.sweep import aligned
from titanlab.system import Console, data_size, duration, harmless, shown_path, user_path

_POLL_SECONDS = 0.5
_MOST_NAMED = 6


def logs_verb(args: Namespace) -> int:
    """Print the logs. Returns 0, also when Ctrl-C ends the following."""
    if args.tail is not None and args.tail < 0:
        raise ConfigError("--tail", args.tail, "must not be negative", "try 100")
    if args.follow and args.attempt is not None:
        rule = "an attempt that has ended prints no more"
        raise ConfigError("--attempt", args.attempt, rule, "leave out --attempt or --follow")
    try:
        pattern = None if args.grep is None else re.compile(args.grep.encode())
    except re.error as error:
        rule = f"is no regular expression ({error})"
        raise ConfigError("--grep", args.grep, rule, "put \\ before ( [ { * + ?") from None
    run = RunFolder(find_run(args.run, args.runs).path.absolute())
    run.chosen_attempt(args.attempt)
    logs = _chosen(run, args.rank, is_followed=args.follow)
    with LogOutput(width=len(str(max(logs, default=0))) if args.rank is None else None) as output:
        ends = {rank: _end(path, is_followed=args.follow) for rank, path in logs.items()}
        if not args.follow and not any(ends.values()):
            Console().note(_without_logs(run))
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            for line in _lines(run, logs, ends, args.attempt, args.tail, pattern):
                output.line(line)
            if args.follow:
                _follow(run, args.rank, ends, pattern, output)
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
    ranks = list(logs)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        named = f"{ranks[0]} to {ranks[-1]}"
    else:
        named = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    rule = f"the run has no log of this rank; it has those of {named}"
    raise ConfigError("--rank", rank, rule, f"try --rank {min(logs, key=lambda known: abs(known - rank))}")


def _end(path: Path, *, is_followed: bool) -> int:
    """The end of the part of a log to read now; an incomplete line follows when it is complete."""
    size = size_of(path)
    with contextlib.suppress(OSError):
        return complete_end(path, size) if is_followed and size else size
    return 0


def _lines(
    run: RunFolder,
    logs: Mapping[int, Path],
    ends: Mapping[int, int],
    attempt: int | None,
    tail: int | None,
    pattern: re.Pattern[bytes] | None,
) -> Iterable[Line]:
    by_rank = {
        rank: log_parts(run, rank, path) if attempt is None else [part_of(run, rank, path, attempt)]
        for rank, path in logs.items()
    }
    cut = {
        rank: [replace(part, end=min(part.end, ends[rank])) for part in of_rank] for rank, of_rank in by_rank.items()
    }
    if tail is None:
        return merged(_timed(of_rank, pattern) for of_rank in cut.values())
    lines = list(merged([_last(of_rank, tail, pattern) for of_rank in cut.values()]))
    return lines[len(lines) - min(tail, len(lines)) :]


def _timed(of_rank: Sequence[LogPart], pattern: re.Pattern[bytes] | None) -> Iterator[Line]:
    for part in of_rank:
        for line in timed(forward(part.path, part.start, part.end), part.rank, begin=part.begin, last=part.last):
            if pattern is None or pattern.search(line.text):
                yield line


def _last(of_rank: Sequence[LogPart], tail: int, pattern: re.Pattern[bytes] | None) -> list[Line]:
    if not of_rank:
        return []
    first, last = of_rank[0], of_rank[-1]
    found = backward(last.path, first.start, last.end)
    texts = (text for text in found if pattern is None or pattern.search(text))
    return timed_from_end(list(itertools.islice(texts, tail))[::-1], last.rank, last=last.last)


def _follow(
    run: RunFolder, rank: int | None, ends: Mapping[int, int], pattern: re.Pattern[bytes] | None, output: LogOutput
) -> None:
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
            if kept := [text for text in texts if pattern is None or pattern.search(text)]:
                new_lines.append(timed_from_end(kept, number, last=time.time()))
        for line in merged(new_lines):
            output.line(line)
        sys.stdout.buffer.flush()
        if not goes_on:
            output.note(f"{run.path.name} {why}")
            return
        if why and why != last_reason:
            output.note(f"{run.path.name} {why}")
        last_reason = why
        time.sleep(_POLL_SECONDS)


def _without_logs(run: RunFolder) -> str:
    name = run.path.name
    # The output of the tasks of the run's jobs, the latest job first.
    sweep, files = run.path.parent, list[Path]()
    for submission in reversed(submissions(sweep)):
        for index, submitted in enumerate(submission.runs):
            if submitted == name:
                found = jobs_folder(sweep).glob(f"{submission.job_id}_{index}_*_log.*")
                files += sorted(found, key=lambda path: (path.suffix != ".err", path.name))
    if printed := [path for path in files if size_of(path)]:
        shown = [shown_path(path) for path in printed[:_MOST_NAMED]]
        more = f" and {len(printed) - _MOST_NAMED} more" if len(printed) > _MOST_NAMED else ""
        return f"{name}: no rank has printed anything; its job has: {' '.join(shown)}{more}"
    status, result = run.known_status(), run.result()
    if result is not None:
        end = f"{result.kind.value}: {result.cause or result.kind.meaning}"
        return f"{name}: no rank has printed anything; it ended as {end}"
    from titanlab.sweep import RunWatch

    goes_on, why = RunWatch(run).goes_on()
    state = "unknown" if status is None else status.state
    return f"{name}: no rank has printed anything yet ({why or (state if goes_on else 'nobody has started it')})"


class LogOutput:
    """Standard output of `titanlab logs`: the bytes of the logs; on a terminal only harmless text.

    Args:
        width: columns for the rank's number before each line; None: lines have no number.
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
    with Console() as console:
        if attempt and has_hung(run, attempt):
            _show(run, attempt, console, as_json=args.json)
        elif args.json:
            result = run.result(attempt) if attempt else run.result()
            outcome = None if result is None else result.kind.value
            console.note(json_text({"run": run.path.name, "attempt": attempt, "hung": False, "outcome": outcome}))
        else:
            console.note(_without_hang(run, attempt))
    return 0


def _without_hang(run: RunFolder, attempt: int) -> str:
    result = run.result(attempt) if attempt else run.result()
    if result is None:
        state = run.status()
        stopped = run.stopped(attempt) if attempt else None
        text = f"did not hang; it has not ended{'' if state is None else f' ({state.state})'}"
        text = f"has not ended; {stopped}" if stopped else text
    else:
        text = f"did not hang; it ended as {result.kind.value}: {result.cause or result.kind.meaning}"
    earlier = [number for number in run.attempts() if number != attempt and has_hung(run, number)]
    more = f"; attempt {earlier[-1]} hung, see --attempt {earlier[-1]}" if earlier else ""
    return f"{run.path.name}, attempt {attempt}, {text}{more}"


def _show(run: RunFolder, attempt: int, console: Console, *, as_json: bool) -> None:
    hung = hung_attempt(run, attempt)
    diagnosis = hung.diagnosis
    rows = rank_rows(
        diagnosis, hung.records, {**hung.others, **dict.fromkeys(hung.damaged, "damaged")}, world=hung.world
    )
    result = run.result(attempt)
    if as_json:
        values = {
            "run": run.path.name,
            "attempt": attempt,
            "hung": True,
            "outcome": None if result is None else result.kind.value,
            "cause": None if result is None else result.cause,
            "verdict": diagnosis.verdict,
            "ranks": diagnosis.ranks,
            "pending": diagnosis.pending,
            "damaged": list(hung.damaged.values()),
            "rows": rows,
        }
        console.note(json_text(values))
        return
    for line in hung.damaged.values():
        console.warn(line)
    console.note("\n".join([f"{run.path.name}, attempt {attempt}: {diagnosis.verdict}", "", *table_lines(rows)]))


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
            cells = [
                (
                    str(row.step),
                    data_size(row.bytes),
                    f"{duration(max(time.time() - row.saved, 0.0))} ago",
                    f"{row.state}, verified" if row.verified else row.state,
                    (row.problem or "").removeprefix("is damaged: "),
                )
                for row in rows
            ]
            console.note("\n".join(aligned(_CHECKPOINT_HEADINGS, cells, right=_CHECKPOINT_HEADINGS[:3])))
    return 1 if any(row.problem is not None for row in rows) else 0


_HOST_HEADINGS = ("host", "when", "outcome", "run", "cause")


def hosts_verb(args: Namespace) -> int:
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
            console.note("\n".join(aligned(_HOST_HEADINGS, cells, right=())))
    return 0
