"""`titanlab hosts`: hosts on which runs have failed, and how they are forgotten."""

from __future__ import annotations

import pytest

from tests.sweep.made import Made
from titanlab.cli import main
from titanlab.launch import bad_hosts, host_names
from titanlab.launch.evidence import note_bad_host
from titanlab.records import Outcome, OutcomeKind


@pytest.fixture
def says(here, capsys):
    """Failures on n1 (twice) and n2; what `hosts` says."""
    run = Made(here / "runs").run("one")
    for attempt, host in enumerate(("n1", "n2", "n1"), 1):
        note_bad_host(run, Outcome(kind=OutcomeKind.HANG, attempt=attempt, cause="rank 3 is silent"), host)

    def call(*arguments):
        code = main(["hosts", *arguments])
        return code, *capsys.readouterr(), host_names(bad_hosts(here / "runs"))

    return call


def test_each_failure_is_a_line(says):
    code, out, err, _ = says()
    assert (code, err) == (0, "")
    heading, *rows = out.splitlines()
    assert heading.split() == ["host", "when", "outcome", "run", "cause"]
    assert [row.split()[0] for row in rows] == ["n1", "n2", "n1"]
    assert all("hang" in row and row.endswith("rank 3 is silent") for row in rows)


def test_one_host_or_all_are_forgotten(says):
    unknown = "error: --clear=n7: is not on the list; it has: n1, n2; see `titanlab hosts`\n"
    assert says("--clear", "n7") == (2, "", unknown, ["n1", "n2"])
    assert says("--clear", "n1") == (0, "cleared: n1\n", "", ["n2"])
    assert says("--all") == (0, "cleared: n2\n", "", [])
    assert says("--all") == (0, "cleared: nothing\n", "", [])
    assert says()[1] == "no run under runs has failed because of its host\n"
