"""The folder of a sweep, `runs/<sweep>/`: its runs, what was submitted of it, and the code that they run.

docs/run-folder.md has the schema of every file.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlab.errors import ConfigError
from titanlab.launch import submission
from titanlab.launch.submission import Submission
from titanlab.records.points_file import read_points
from titanlab.records.run_folder import RunFolder
from titanlab.system.atomic_file import finite, write_json, write_text

SCHEMA = 1
_HASH = re.compile(r"[0-9a-f]{4,8}")


@dataclass(frozen=True)
class SweepFolder:
    """One sweep on disk; cheap to make, reads files when asked."""

    path: Path

    @property
    def name(self) -> str:
        """The sweep's name."""
        return self.path.name

    @property
    def jobs(self) -> Path:
        """Batch files, and what the tasks of jobs print."""
        return submission.jobs_folder(self.path)

    @property
    def code(self) -> Path:
        """Snapshots of the code, one folder each."""
        return self.path / "code"

    @property
    def superseded(self) -> Path:
        """Folders of runs that were done anew."""
        return self.path / "superseded"

    # Reading

    def manifest(self) -> dict[str, Any]:
        """What sweep.json says; empty where runs were started one by one."""
        try:
            value = json.loads((self.path / "sweep.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def points(self) -> list[dict[str, Any]]:
        """The rows of points.jsonl: every point of the space, dropped ones too."""
        return read_points(self.path)

    def submissions(self) -> list[Submission]:
        """What was submitted, oldest first."""
        return submission.submissions(self.path)

    def runs(self) -> list[RunFolder]:
        """All runs, by name."""
        # A name with a leading dot is a folder in the making.
        found = (path.parent for path in self.path.glob("*/config.yaml"))
        return [RunFolder(path) for path in sorted(found) if not path.name.startswith(".")]

    def run(self, name: str) -> RunFolder:
        """The run in the folder of this name, whether or not it is there."""
        return RunFolder(self.path / name)

    def find(self, texts: Sequence[str]) -> list[RunFolder]:
        """The runs that a person names by folder, label, or first digits of the hash; all for no text.

        Raises:
            ConfigError: a text fits none, or several by their hash.
        """
        known = self.runs()
        found: dict[Path, RunFolder] = {} if texts else {run.path: run for run in known}
        for text in texts:
            wanted = Path(text).name
            fitting = [run for run in known if run.path.name == wanted] or [run for run in known if run.name == wanted]
            if not fitting and _HASH.fullmatch(wanted):
                fitting = [run for run in known if run.hash8.startswith(wanted)]
                if len(fitting) > 1:
                    rule = f"is the beginning of {len(fitting)} runs' hashes"
                    raise ConfigError("run", text, rule, f"try {fitting[0].path.name}")
            if not fitting:
                near = difflib.get_close_matches(wanted, [run.path.name for run in known], n=1, cutoff=0.0)
                cure = f"try {near[0]}" if near else "train one first"
                raise ConfigError("run", text, f"fits no run of sweep {self.name}", cure)
            found.update({run.path: run for run in fitting})
        return list(found.values())

    # Writing

    def write_manifest(self, manifest: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> None:
        """Replace sweep.json and points.jsonl."""
        text = "".join(json.dumps(finite(point), ensure_ascii=False) + "\n" for point in points)
        write_text(self.path / "points.jsonl", text)
        write_json(self.path / "sweep.json", {"schema": SCHEMA, **manifest})

    def claim(self) -> AbstractContextManager[None]:
        """Hold the sweep for this process, which submits, retries or cancels; waits for another one that does.

        Raises:
            ConfigError: it holds on for longer than that.
        """
        return submission.claim_sweep(self.path)


def jobs_of(sweep: SweepFolder, submitted: Sequence[Submission]) -> dict[str, tuple[Submission, int]]:
    """The latest submission of every run, and the run's index there.

    One that is older than the run's folder was of the folder before, which was put aside: the run is done anew.
    """
    latest = {run: (each, index) for each in submitted for index, run in enumerate(each.runs)}
    made = {run: _created(sweep.run(run)) for run in latest}
    return {run: job for run, job in latest.items() if job[0].created >= made[run]}


def readable(runs: Sequence[RunFolder], report: Callable[[str], None], *, named: bool) -> list[RunFolder]:
    """The runs whose files can be read; one that is damaged does not keep the others from what is done.

    Args:
        report: told of each that is left alone.
        named: a person has named them, and is refused where one cannot be read.

    Raises:
        ConfigError: one that was named cannot be read.
    """
    found = []
    for run in runs:
        try:
            run.check_files()
        except ConfigError as error:
            if named:
                raise
            report(f"{run.path.name} is left alone: {error}")
        else:
            found.append(run)
    return found


def _created(run: RunFolder) -> float:
    """When the folder was made; 0 where that cannot be read."""
    try:
        return run.created() or 0.0
    except ConfigError:
        return 0.0


def open_sweep(text: str, runs: Path | str = "runs") -> SweepFolder:
    """The sweep that a person names, by path or by name.

    Raises:
        ConfigError: there is none.
    """
    root = Path(runs).expanduser()
    for path in (root / text, Path(text).expanduser()):
        folder = SweepFolder(path.absolute())
        if text and path.is_dir() and (folder.manifest() or folder.runs()):
            return folder
    known = [path.name for path in sorted(root.glob("*")) if SweepFolder(path).manifest() or SweepFolder(path).runs()]
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.4) or known[-3:]
    cure = f"try {' or '.join(near)}" if near else "submit one first (titanlab sweep), or say where runs are (--runs)"
    raise ConfigError("sweep", text, f"is no sweep under {runs}", cure)
