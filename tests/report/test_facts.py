"""What a report is made of: checked rows, the answer, differences of configs, provenance; files may be damaged."""

import json
import math

import pytest

from tests.report.plain import facts_in, facts_of, run
from tests.sweep.made import begin, end, train
from tests.sweep.table.plain import row
from titanlab.report.facts import (
    checked,
    command_line,
    differences,
    moment,
    representative,
    sources,
)


@pytest.mark.parametrize(
    ("column", "value", "kept"),
    [
        ("oversubscribed", True, True),
        ("oversubscribed", 1, None),
        ("step", 3, 3),
        ("step", True, None),
        ("tokens_per_second", 2.5, 2.5),
        ("tokens_per_second", math.nan, None),
        ("tokens_per_second", math.inf, None),
        ("tokens_per_second", "fast", None),
        ("cause", "no", "no"),
        ("cause", 3, None),
        ("cause", None, None),
        # Columns of swept keys are text.
        ("point.lr", "0.5", "0.5"),
        ("point.lr", {"a": 1}, None),
    ],
)
def test_a_value_of_another_type_counts_as_missing(column, value, kept):
    (found,) = checked([{column: value}])
    assert found == {column: kept}
    assert type(found[column]) is type(kept)


def test_runs_are_all_but_dropped_points_and_done_ones_have_ended():
    facts = facts_of(row(), row(state="dropped"), row(outcome="oom"), row(state="queued", outcome="done"))
    assert [each["run"] for each in facts.runs] == ["r0", "r2", "r3"]
    assert [each["run"] for each in facts.done] == ["r0"]


def test_the_fastest_recipe_is_first_and_what_says_nothing_is_last():
    facts = facts_of(
        row("slow", 10.0),
        row("unmeasured", None),
        row("crowded", 900.0, oversubscribed=True),
        row("fast", 30.0),
        row("fast", 10.0),
        row("failed", 99.0, outcome="oom"),
    )
    assert [group.layout for group in facts.groups] == ["fast", "slow", "unmeasured", "failed", "crowded"]
    assert [(group.layout, each["run"]) for group, each in facts.shown][:2] == [("fast", "r3"), ("slow", "r0")]


def test_the_number_of_recipes_that_are_looked_at_is_limited():
    facts = facts_of(*(row(f"l{place}") for place in range(30)))
    assert (len(facts.groups), len(facts.shown)) == (30, 24)


def test_a_run_that_is_done_stands_for_its_recipe():
    (group,) = facts_of(run("a", outcome="oom"), run("b"), run("c")).groups
    assert representative(group)["run"] == "b"
    (group,) = facts_of(run("a", outcome="oom"), run("b", outcome="nan")).groups
    assert representative(group)["run"] == "a"


def test_files_are_those_of_the_latest_attempt(made):
    made_run = made.run("a", shard=2)
    begin(made_run)
    train(made_run, step=2)
    end(made_run, "crash")
    begin(made_run, seed=5)
    train(made_run, step=3)
    facts = facts_in(made.folder)
    (found,) = facts.runs
    assert found["attempt"] == 2
    assert facts.config(found)["seed"] == 5
    # An attempt of which no folder is left.
    assert facts.config({**found, "attempt": 9})["seed"] == 0
    assert facts.config({**found, "attempt": None})["seed"] == 0
    assert facts.env(found)["launcher"] == "local"
    assert [each["step"] for each in facts.metrics(found, "train")][-3:] == [1, 2, 3]
    assert facts.metrics(found, "breakdown") == []
    (gone,) = facts_of(run("gone")).runs
    assert (facts.config(gone), facts.env(gone), facts.metrics(gone, "train")) == (None, {}, [])


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_config_is_none(made, text):
    begin(made_run := made.run("a"))
    facts = facts_in(made.folder)
    (found,) = facts.runs
    (made_run.path / "attempts/1/config.yaml").write_text(text)
    assert facts.config(found) is None


def repeated(speeds, recipe="dp_s2", **given):
    return [run(f"{recipe}-{place}", recipe, speed, repeat=place, **given) for place, speed in enumerate(speeds)]


def test_the_best_is_that_of_the_figure_and_bands_are_of_the_speed():
    rows = [*repeated([1000.0, 1010.0], memory_gib=3.0), *repeated([500.0, 505.0], "tp_2", memory_gib=1.0)]
    by_speed, by_memory = (facts_of(*rows, by=name) for name in ("tps", "memory"))
    assert [answer.best.label for answer in (by_speed, by_memory)] == ["dp_s2", "tp_2"]
    assert by_speed.ranking is by_speed.speeds
    assert by_memory.bands == by_speed.bands
    assert set(by_speed.bands) == {"dp_s2", "tp_2"}
    centres = {entry.label: entry.centre for entry in by_speed.speeds.ranked}
    for label, (low, high) in by_speed.bands.items():
        assert low < centres[label] < high
    # The table, the figures and the ranking have one figure for a recipe.
    assert centres["dp_s2"] == pytest.approx((1000 * 1010) ** 0.5)
    assert by_speed.best.typical("tokens_per_second") == pytest.approx(centres["dp_s2"])


def test_a_recipe_without_the_figure_stands_in_if_one_of_its_runs_is_done():
    answer = facts_of()
    assert (answer.best, answer.bands) == (None, {})
    # Without repeats there is no interval.
    assert facts_of(run("a"), run("b", "tp_2", 500.0)).bands == {}
    failed = row("tp_2", None, run="f", name="f", outcome="oom")
    assert facts_of(failed, by="mfu").best is None
    answer = facts_of(failed, run("a", mfu_percent=None), by="mfu")
    assert answer.best is not None
    assert answer.best.label == "dp_s2"


@pytest.mark.parametrize(("speeds", "noise"), [([1000.0, 1000.0], "0 %"), ([100.0, 400.0], "98 %"), ([1.0, 9.0], "%")])
def test_the_noise_is_a_number_that_people_write(speeds, noise):
    text = facts_of(*repeated(speeds)).band_text
    assert noise in text
    assert "e+" not in text
    assert "(1 degrees of freedom)" not in text


def test_texts_are_short_and_without_secrets(two):
    facts = facts_in(two.folder)
    single, fsdp = sorted(facts.rows, key=lambda row: row["name"], reverse=True)
    (path,) = (two.folder.path / fsdp["run"] / "attempts").rglob("config.yaml")
    text = path.read_text().replace("init_from: null", f"init_from: {'x' * 201}")
    path.write_text(text.replace("load_from: null", "load_from: api_key=abcdefgh12345678"))
    (items,) = (items for group, items in differences(facts, single) if group.rows[0]["name"] == "fsdp")
    values = {key: value for key, _, value in items}
    assert values["init_from"] == "x" * 200 + "…"
    assert "abcdefgh12345678" not in values["checkpoint.load_from"]


@pytest.fixture
def two(made):
    for name, keys in (("single", {}), ("fsdp", {"shard": 2, "seq_len": 64})):
        run = made.run(name, **keys)
        begin(run)
        end(run)
    return made


def test_each_recipe_is_compared_with_the_reference(two):
    facts = facts_in(two.folder)
    reference = next(row for row in facts.rows if row["name"] == "single")
    found = {group.rows[0]["name"]: items for group, items in differences(facts, reference)}
    assert found["single"] == []
    keys = {key: values for key, *values in found["fsdp"]}
    assert keys["training.seq_len"] == ["32", "64"]
    assert keys["parallelism.shard"] == ["1", "2"]


def test_a_config_that_cannot_be_read_is_none_and_hides_no_other(two):
    facts = facts_in(two.folder)
    single, fsdp = sorted(facts.rows, key=lambda row: row["name"], reverse=True)
    for path in (two.folder.path / fsdp["run"]).rglob("config.yaml"):
        path.write_text("{")
    found = {group.rows[0]["name"]: items for group, items in differences(facts, single)}
    assert found == {"single": [], "fsdp": None}
    assert differences(facts, fsdp) is None


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


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ({}, ""),
        ({"overrides": []}, ""),
        ({"overrides": "seed=1,2"}, ""),
        ({"overrides": ["seed=1,2", "model=debug"]}, "titanlab sweep seed=1,2 model=debug"),
        ({"overrides": [3, None]}, "titanlab sweep 3 None"),
        (
            {"overrides": ["tracker.key=hf_abcdefghijklmnop", "seed=1,2"]},
            "titanlab sweep tracker.key=[hidden] seed=1,2",
        ),
    ],
)
def test_the_command_line_of_a_sweep(made, manifest, text):
    made.write()
    made.folder.write_manifest({"name": made.folder.name, **manifest}, [])
    assert command_line(facts_in(made.folder)) == text
    assert command_line(facts_of(run("a"))) == ""
