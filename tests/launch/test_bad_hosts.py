"""Hosts that are remembered, shown, left out of later jobs, and cleared."""

from dataclasses import replace

import pytest

from tests import tiny
from titanlab.cli import main
from titanlab.launch import bad_hosts, clear_bad_hosts, host_names
from titanlab.launch.evidence import note_bad_host, suspect
from titanlab.launch.launchers_schema import Slurm
from titanlab.launch.slurm import batch
from titanlab.records import Outcome, OutcomeKind

NODES = ("n1", "n2", "n3")
KILLED = Outcome(kind=OutcomeKind.CRASH, rank=5, exit_code=-11, cause="segmentation fault")


@pytest.mark.parametrize(
    ("outcome", "nodes", "host"),
    [
        (KILLED, NODES, "n3"),
        (replace(KILLED, rank=0), NODES, "n1"),
        (replace(KILLED, rank=None), NODES, None),
        (replace(KILLED, rank=None), ("n1",), "n1"),
        (replace(KILLED, rank=9), NODES, None),
        (replace(KILLED, kind=OutcomeKind.HANG, rank=2, exit_code=None), NODES, "n2"),
        (replace(KILLED, kind=OutcomeKind.NODE_FAIL, exit_code=None), NODES, "n3"),
        (replace(KILLED, traceback="Traceback"), NODES, None),
        (replace(KILLED, exit_code=1), NODES, None),
        *((replace(KILLED, kind=kind), NODES, None) for kind in (OutcomeKind.OOM, OutcomeKind.NAN, OutcomeKind.DATA)),
        (Outcome(kind=OutcomeKind.DONE), ("n1",), None),
    ],
)
def test_only_what_a_host_may_have_caused_counts(outcome, nodes, host):
    assert suspect(outcome, nodes, ranks_per_node=2) == host


@pytest.fixture
def run(tmp_path):
    run = tiny.begin(tiny.recipe(tmp_path / "runs"))
    note_bad_host(run, KILLED, "n3")
    note_bad_host(run, replace(KILLED, kind=OutcomeKind.HANG, attempt=2), "n1")
    note_bad_host(run, KILLED, "n3")
    return run


def test_hosts_are_remembered_and_cleared(run):
    runs = run.path.parent.parent
    assert host_names(bad_hosts(runs)) == ["n3", "n1"]
    assert [(bad.host, bad.kind, bad.attempt) for bad in bad_hosts(runs)][1] == ("n1", "hang", 2)
    assert clear_bad_hosts(runs, "n3") == 2
    assert host_names(bad_hosts(runs)) == ["n1"]
    assert clear_bad_hosts(runs) == 1
    assert bad_hosts(runs) == bad_hosts(runs / "none") == []


def test_a_later_job_of_the_run_leaves_them_out_and_others_do_not(run):
    sweep, name = run.path.parent, run.path.name
    assert batch._bad(Slurm(), sweep, ["other", name]) == ["n3", "n1"]
    # One rank that somebody kills must not take a host from everybody.
    assert batch._bad(Slurm(), sweep, ["other"]) == []
    assert batch._bad(Slurm(nodelist="n3"), sweep, [name]) == []
    clear_bad_hosts(sweep.parent)
    assert batch._bad(Slurm(), sweep, [name]) == []


def test_names_that_are_flags_and_damaged_lines_are_skipped(run):
    runs = run.path.parent.parent
    note_bad_host(run, KILLED, "--wrap=touch x")
    with (runs / "hosts.jsonl").open("ab") as file:
        file.write(b'{"host": "n9,--x", "run": "r", "attempt": 1, "kind": "hang", "cause": "c", "time": 1}\n')
        file.write(b"[]\n\xc3\xa4\n" + b"[" * 200_000 + b'\n{"host": "n9"}\n')
    assert host_names(bad_hosts(runs)) == ["n3", "n1"]


def test_the_verb_lists_and_clears(run, capsys):
    where = ["--runs", str(run.path.parent.parent)]
    assert main(["hosts", *where]) == 0
    out = capsys.readouterr().out
    assert "segmentation fault" in out
    assert out.count("n3") == 2
    assert main(["hosts", "--clear", "n7", *where]) == 2
    assert capsys.readouterr().err == "error: --clear=n7: is not on the list; it has: n3, n1; see `titanlab hosts`\n"
    assert main(["hosts", "--clear", "n3", *where]) == 0
    assert main(["hosts", "--all", *where]) == 0
    assert capsys.readouterr().out.splitlines() == ["cleared: n3", "cleared: n1"]
    assert main(["hosts", *where]) == 0
    assert "no run under" in capsys.readouterr().out


def test_a_cause_with_a_separator_of_unicode_is_one_line(run):
    runs = run.path.parent.parent
    note_bad_host(run, replace(KILLED, cause="a\u2028b\x85c"), "n5")
    assert bad_hosts(runs)[-1].cause == "a\u2028b\x85c"
