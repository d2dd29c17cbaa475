"""Reduced runs in forked ranks: what a failure says, where its log is, and that no rank is left behind."""

from __future__ import annotations

import signal

import pytest

from tests import tiny
from titanlab.errors import TitanlabError
from titanlab.prove import RunFailed, forked, prepare
from titanlab.prove.forked import Ended
from titanlab.records import Outcome, OutcomeKind, RunFolder


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (
            {"kind": OutcomeKind.CRASH, "cause": "ValueError: x", "rank": 11},
            "crash: ValueError: x; log: {}/rank-11.log",
        ),
        ({"kind": OutcomeKind.OOM}, f"oom: {OutcomeKind.OOM.meaning}; log: {{}}/rank-0.log"),
    ],
)
def test_a_failure_is_one_line_with_its_cause_and_the_log_of_its_rank(tmp_path, outcome, said):
    error = RunFailed(Ended(run=RunFolder(tmp_path), attempt=1, outcome=Outcome(**outcome), seconds=1.0))
    assert isinstance(error, TitanlabError)
    assert str(error) == said.format(tmp_path / "logs")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_after_an_error_or_ctrl_c_every_rank_is_killed(tmp_path, monkeypatch, error):
    def interrupted(started, *rest, **named):
        raise error

    killed = []
    monkeypatch.setattr(forked, "fork_children", lambda *given: {})
    monkeypatch.setattr(forked, "wait_for", interrupted)
    monkeypatch.setattr(forked.RankProcesses, "end", lambda self, number, *, seconds: killed.append(number))
    with pytest.raises(error):
        forked.train_in_ranks(tiny.recipe(tmp_path))
    assert killed == [signal.SIGKILL]


def test_ranks_inherit_no_other_rank_and_compute_with_one_thread(monkeypatch):
    """With more threads sums are rounded in another order, and with a rank's variables they would join its ranks."""
    imported, frozen = [], []
    monkeypatch.setattr(forked, "import_trainer", lambda: imported.append(dict(forked.os.environ)))
    monkeypatch.setattr(forked.importlib, "import_module", lambda name: None)
    monkeypatch.setattr(forked.gc, "freeze", lambda: frozen.append(True))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    for name in forked._ENVIRONMENT:
        monkeypatch.setenv(name, "8")
    prepare()
    (environment,) = imported
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & environment.keys()
    # Before torch is imported, which reads them then.
    assert (environment["OMP_NUM_THREADS"], environment["CUDA_VISIBLE_DEVICES"]) == ("1", "")
    assert frozen == [True]
