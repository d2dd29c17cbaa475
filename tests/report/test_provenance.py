"""Where the runs of a report come from: code, versions, machines, moments, and the command line."""

import json
import math

import pytest

from tests.report.plain import facts_in, facts_of, run
from tests.sweep.made import begin, end
from titanlab.report.facts import command_line, moment, sources


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.0, "1970-01-01 00:00:00 UTC"),
        (1_800_000_000.9, "2027-01-15 08:00:00 UTC"),
        (1e300, ""),
        (math.inf, ""),
        (math.nan, ""),
    ],
)
def test_moments_are_in_utc(seconds, text):
    assert moment(seconds) == text


def env_of(run_folder, env):
    (run_folder.path / "attempts/1/env.json").write_text(json.dumps(env))


def test_runs_of_one_origin_are_together_and_the_most_frequent_first(made):
    for place, code in enumerate(["one", "two", "two"]):
        begin(made_run := made.run(f"r{place}", seed=place), code=code)
        end(made_run, ended=2000.0 + place)
    made.run("waits", seed=9)
    found = sources(facts_in(made.folder))
    assert [(source["code"], len(source["runs"])) for source in found] == [("two", 2), ("one", 1)]
    assert [name.partition("-")[0] for name in found[0]["runs"]] == ["r1", "r2"]
    # Those of all its runs: the first to begin, the last to end.
    assert (found[0]["began"], found[0]["ended"]) == ("1970-01-01 00:16:40 UTC", "1970-01-01 00:33:22 UTC")


def test_an_origin_says_all_that_is_known(made):
    begin(made_run := made.run("a"))
    env_of(
        made_run,
        {
            "time": 1000.0,
            "code": {
                "version": "0.9",
                "fingerprint": "f" * 64,
                "git": {"sha": "a" * 40, "branch": "main", "dirty": True},
            },
            "packages": {"torch": "2.11.0"},
            "python": {"version": "3.12.1"},
            "host": {"name": "n1", "cpu": "EPYC", "usable_cores": 64},
            "launcher": "slurm",
        },
    )
    (source,) = sources(facts_in(made.folder))
    assert (source["code"], source["commit"]) == ("f" * 12, "a" * 12 + " (main), with changes")
    assert (source["titanlab"], source["torch"], source["Python"]) == ("0.9", "2.11.0", "3.12.1")
    assert (source["device"], source["host"]) == ("cpu", "n1 (EPYC, 64 cores)")


@pytest.mark.parametrize(
    ("env", "commit", "host"),
    [
        ({"time": 1.0}, "", ""),
        ({"code": "text", "host": ["a"], "packages": 3}, "", ""),
        ({"code": {"git": {"branch": "main", "dirty": True}}, "host": {"usable_cores": 0}}, "", " (0 cores)"),
        ({"code": {"git": {"sha": "abc", "dirty": "yes"}}, "host": {"name": "n1"}}, "abc", "n1"),
        ({"code": {"git": {"sha": 7}}, "host": {"cpu": "EPYC"}}, "7", " (EPYC)"),
    ],
)
def test_an_origin_may_be_known_in_part_or_of_wrong_types(monkeypatch, env, commit, host):
    facts = facts_of(run("a", device=None, accelerator="cpu"))
    monkeypatch.setattr(type(facts), "env", lambda self, row: env)
    (source,) = sources(facts)
    assert (source["commit"], source["host"], source["device"]) == (commit, host, "cpu")
    assert (source["began"], source["ended"]) == ("", "")


def test_runs_that_never_began_have_no_origin(made):
    made.run("waits")
    assert sources(facts_in(made.folder)) == []
    assert sources(facts_of()) == []


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ({}, ""),
        ({"overrides": []}, ""),
        ({"overrides": "seed=1,2"}, ""),
        ({"overrides": ["seed=1,2", "model=debug"]}, "titanlab sweep seed=1,2 model=debug"),
        ({"overrides": [3, None]}, "titanlab sweep 3 None"),
    ],
)
def test_the_command_line_of_a_sweep(made, manifest, text):
    made.write()
    made.folder.write_manifest({"name": made.folder.name, **manifest}, [])
    assert command_line(facts_in(made.folder)) == text


def test_a_secret_of_the_command_line_is_hidden(made):
    made.write()
    made.folder.write_manifest({"overrides": ["tracker.key=hf_abcdefghijklmnop", "seed=1,2"]}, [])
    text = command_line(facts_in(made.folder))
    assert "hf_abcdefghijklmnop" not in text
    assert text.endswith(" seed=1,2")


def test_runs_that_were_started_one_by_one_have_no_command_line():
    assert command_line(facts_of(run("a"))) == ""
