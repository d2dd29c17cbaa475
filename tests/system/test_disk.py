"""A disk that takes nothing more: one line says so, and every end gets a record once there is room."""

import contextlib
import errno
import os
import resource
import time

import pytest

from tests import tiny
from titanlab.checkpoint.folders import step_folder
from titanlab.launch import attempt
from titanlab.launch.execute import _recorded
from titanlab.records import OutcomeKind, RunFolder, Status, classify, files, from_exception, run_folder
from titanlab.system import Console, disk_fault, refusal, tells_of_disk, write_json


def full(path=None):
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@pytest.fixture
def run(tmp_path):
    return tiny.begin(tiny.recipe(tmp_path))


@contextlib.contextmanager
def tiny_files(size=0):
    """No file of this process may be longer: with 0 every write of a byte fails, as on a full disk.

    Left before the test ends: pytest itself may be writing into a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full (/x): make room, then go on with titanlab resume or retry"),
        (errno.EDQUOT, "the disk quota is used up (/x): make room, or ask for a larger quota, then"),
        (errno.EROFS, "the file system is read-only (/x): have it made writable again, then"),
        (errno.EFBIG, "a file would be larger than the limit of this process or file system (/x): raise"),
        (errno.ENOTDIR, "a file stands where a folder was (/x): move it away, then"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(number, said):
    error = OSError(number, os.strerror(number), "/x")
    assert disk_fault(error).startswith(said)
    assert tells_of_disk(disk_fault(error))
    assert classify(error) is OutcomeKind.CRASH
    assert from_exception(error).cause == disk_fault(error)


def test_it_is_found_behind_other_errors():
    class Checkpoint(BaseException):
        """As torch's CheckpointException: the errors of ranks, with their stacks."""

        failures = {3: (RuntimeError("x: No space left on device"), [])}  # noqa: RUF012

    hidden = RuntimeError("unexpected pos 704 vs 598")
    hidden.__cause__ = full()
    assert disk_fault(hidden).startswith("the disk is full:")
    assert disk_fault(Checkpoint()).startswith("the disk is full:")


def test_what_refuses_a_checkpoint_is_found_by_lengthening_its_files(tmp_path):
    part = tmp_path / "checkpoints" / "step-00000002.part"
    part.mkdir(parents=True)
    (part / "__0_0.distcp").write_bytes(bytes(5000))
    assert refusal(part) is None
    with tiny_files(5000):
        error = refusal(part)
    assert (error.errno, error.filename) == (errno.EFBIG, str(tmp_path / "checkpoints"))


def test_a_file_that_cannot_be_replaced_is_what_it_was(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    before = (tmp_path / "a.json").read_bytes()
    with tiny_files(), pytest.raises(OSError, match="File too large"):
        write_json(tmp_path / "a.json", {"a": 2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a.json": before}


class Full:
    """A disk on which nothing can be written while the given paths are there."""

    def __init__(self, monkeypatch, *paths):
        self.paths = paths
        for module in (run_folder, files):
            monkeypatch.setattr(module, "write_json", self.write_json)

    def write_json(self, path, value, *, durable=False):
        if any(each.exists() for each in self.paths):
            raise full(str(path))
        write_json(path, value, durable=durable)


def test_an_end_that_a_full_disk_refuses_is_written_by_whoever_looks_next(run, monkeypatch, tmp_path):
    whole = step_folder(run.checkpoints, 2)
    whole.mkdir()
    run.write_status(Status(state="running", step=3, steps=9, attempt=1, pid=2**22 + 1, updated=time.time() - 60))
    Full(monkeypatch, tmp_path / "full")
    (tmp_path / "full").touch()
    with pytest.raises(OSError, match="No space left"):
        run.write_failure(from_exception(full(), rank=1))
    with pytest.raises(OSError, match="No space left"):
        attempt.conclude(run, 1, {0: 1})
    assert (run.result(), run.result(1), run.failures(1)) == (None, None, [])
    (tmp_path / "full").unlink()
    attempt.close_dead(run)
    assert (run.result().kind, run.result().step, run.result()) == (OutcomeKind.CRASH, 3, run.result(1))
    assert "the disk was full" in run.result().cause
    assert run.status().outcome == "crash"
    assert list(run.checkpoints.iterdir()) == [whole]


def test_a_checkpoint_that_is_not_whole_gives_way_to_the_record_of_the_end(run, monkeypatch):
    part = step_folder(run.checkpoints, 4).with_suffix(".part")
    part.mkdir()
    whole = step_folder(run.checkpoints, 2)
    whole.mkdir()
    Full(monkeypatch, part)
    assert attempt.conclude(run, 1, {0: 1}).kind is OutcomeKind.CRASH
    assert run.result().kind is OutcomeKind.CRASH
    assert list(run.checkpoints.iterdir()) == [whole]


def test_where_not_even_that_can_be_written_a_line_says_so(run, monkeypatch, capsys):
    Full(monkeypatch, run.path)
    with Console() as console:
        outcome = _recorded(run, 1, {}, console, terminal={0}, memory=None)
    assert (outcome.kind, outcome.kind.exit_code) == (OutcomeKind.CRASH, 1)
    assert run.result() is None
    said = capsys.readouterr().err
    assert said.startswith("error: the run has ended, and ")
    assert "cannot take a result.json: the disk is full" in said
    assert said.count("\n") == 1


def test_an_attempt_that_cannot_be_begun_leaves_all_as_it_was(run, monkeypatch):
    run.write_result(from_exception(LookupError("x")))
    before = (run.path / "status.json").read_text()
    Full(monkeypatch, run.path)
    with pytest.raises(OSError, match="No space left"):
        run.begin_attempt(run.config(), {})
    assert (run.attempts(), run.result().cause) == ([1], "LookupError: x")
    assert (run.path / "status.json").read_text() == before


def test_metrics_that_cannot_be_written_are_whole_rows_again_in_the_next_attempt(run):
    with run.open_metrics(1) as writer:
        writer.write("train", 1, {"loss": 1.0})
        size = (run.path / "metrics.jsonl").stat().st_size
        with tiny_files(size + 10), pytest.raises(OSError, match="File too large"):
            writer.write("train", 2, {"loss": 1.0})
    with RunFolder(run.path).open_metrics(2, resumed_step=1) as writer:
        writer.write("train", 2, {"loss": 2.0})
    assert [(row["step"], row["loss"]) for row in run.metrics("train")] == [(1, 1.0), (2, 2.0)]
