"""The sections of a report: their order, their tables, and what stands where there is nothing to show."""

import dataclasses
import json
import math

import pytest

from tests.report.plain import facts_in, facts_of, run
from tests.sweep.made import begin, end
from tests.sweep.table.plain import row
from titanlab.report.panels import Cell, cell
from titanlab.report.sections import sections_of

pytestmark = pytest.mark.usefixtures("drawn")


def sections(facts, by="tps"):
    return {section.id: section for section in sections_of(dataclasses.replace(facts, by=by))}


def cells(table):
    return [[cell.text for cell in line] for line in table.rows]


ORDER = [
    *("pareto", "throughput", "step-time", "memory", "loss", "timeline", "estimate"),
    *("configuration", "dropped", "failures", "provenance"),
]


def test_a_sweep_of_nothing_has_all_sections_which_say_why(tmp_path):
    found = sections(facts_of(folder=tmp_path))
    assert list(found) == ORDER
    assert {name: list(section.texts) for name, section in found.items() if section.texts} == {
        "step-time": ["Neither measured nor estimated for any recipe."],
        "memory": ["Neither measured nor declared for any recipe."],
        "timeline": ["No recipe has a pipeline that can be drawn."],
        "estimate": ["No run that is done has both an estimate and a measurement."],
        "configuration": ["The sweep has no run."],
        "dropped": ["No point was dropped."],
        "failures": ["No run has failed."],
        "provenance": ["No run has begun, so that nothing is recorded of code and machines."],
    }
    assert cells(found["throughput"].tables[0]) == []
    assert not found["provenance"].tables
    assert found["provenance"].command == ""


@pytest.mark.parametrize(
    ("by", "mfu", "title"),
    # Without a peak of the device there is no MFU to draw.
    [("mfu", 40.0, "Memory against MFU"), ("mfu", None, "Memory against speed"), ("tps", 40.0, "Memory against speed")],
)
def test_the_first_figure_is_by_what_the_recipes_are_ranked(by, mfu, title):
    assert sections(facts_of(run("a", mfu_percent=mfu)), by=by)["pareto"].title == title


def test_recipes_are_rows_in_the_order_of_their_places():
    facts = facts_of(
        *(run(f"slow{place}", "tp2", speed, world=4) for place, speed in enumerate((90.0, 110.0))),
        *(run(f"fast{place}", "dp_s2", speed) for place, speed in enumerate((990.0, 1010.0))),
        run("oom", "cp2", None, outcome="oom", memory_gib=None, mfu_percent=None),
        run("single", "single", 500.0, control=True),
    )
    (table,) = sections(facts)["throughput"].tables
    assert (
        table.caption
        == "Recipes by place: geometric means of tokens/s and MFU, medians of the rest, of the runs that are done"
    )
    # Nobody has a loss.
    assert table.headings == [
        *("recipe", "place", "processes", "runs", "tokens/s", "95% interval", "MFU %", "GiB"),
        *("outcomes", "not ranked"),
    ]
    by_recipe = {line[0]: line[1:] for line in cells(table)}
    assert list(by_recipe) == ["dp_s2", "tp2", "cp2", "single"]
    assert by_recipe["dp_s2"][:4] == ["1", "2", "2", "1,000"]
    assert by_recipe["tp2"][:3] == ["2", "4", "2"]
    assert by_recipe["cp2"] == ["", "2", "1", "", "", "", "", "oom", "no run is done"]
    assert by_recipe["single"][:4] == ["control", "2", "1", "500"]
    low, _, high = by_recipe["dp_s2"][4].partition(" to ")
    assert int(low.replace(",", "")) < 1000 < int(high.replace(",", ""))
    assert [line[0].run for line in table.rows] == ["fast0", "slow0", "oom", "single"]


def test_oversubscribed_recipes_are_marked_and_the_mark_is_explained():
    facts = facts_of(run("a", oversubscribed=True), run("b", "tp2", 50.25))
    (table,) = sections(facts)["throughput"].tables
    assert [(line[0], line[4]) for line in cells(table)] == [("tp2", "50.25"), ("dp_s2 *", "1,000")]
    assert table.caption.endswith("; * more processes than cores")


def test_why_there_is_no_estimate_is_told_by_the_most_frequent_note():
    notes = ["no figures of <x>", "other", "no figures of <x>", None]
    facts = facts_of(*(run(f"r{place}", **{"estimate.note": note}) for place, note in enumerate(notes)))
    assert sections(facts)["estimate"].texts == [
        "No run that is done has both an estimate and a measurement. Without an estimate: no figures of <x>."
    ]


def test_dropped_points_are_counted_by_stage_and_reason():
    drop = {"state": "dropped", "outcome": None}
    facts = facts_of(
        row(**drop, dropped_stage="rule", cause="a" * 301),
        *(row(**drop, dropped_stage="where", cause="world <= 4") for _ in range(2)),
        row(**drop),
    )
    section = sections(facts)["dropped"]
    assert section.texts == ["4 points came to no run."]
    (table,) = section.tables
    assert cells(table) == [["where", "2", "world <= 4"], ["rule", "1", "a" * 300 + "…"], ["", "1", ""]]
    # The whole reason is there on demand.
    assert table.rows[1][2].more == "a" * 301


def test_failures_are_told_with_step_rank_and_cause():
    facts = facts_of(
        run("a", outcome="oom", step=4, rank=1, cause="no memory"),
        run("b", outcome="oom", step=None, steps=None, cause=None),
        run("c", outcome="preempted", step=0),
        run("d", state="missing", outcome=None, cause="its folder is gone"),
        run("e", state="running", outcome=None),
        run("f", outcome="crash", cause="bad token hf_abcdefghijklmnop"),
        run("g"),
    )
    section = sections(facts)["failures"]
    assert section.texts == [
        (
            "5 runs: 2 oom (memory ran out, on the device or on the host); "
            "1 preempted (told to stop, by the scheduler or by SIGTERM); 1 missing; "
            "1 crash (an error that no other outcome describes; the traceback shows it)."
        )
    ]
    (table,) = section.tables
    found = cells(table)
    assert found[:4] == [
        ["a", "dp_s2", "oom", "4 of 10", "1", "no memory"],
        ["b", "dp_s2", "oom", "", "", ""],
        ["c", "dp_s2", "preempted", "0 of 10", "", ""],
        ["d", "dp_s2", "missing", "10 of 10", "", "its folder is gone"],
    ]
    assert "hf_abcdefghijklmnop" not in found[4][5]


def test_of_runs_with_one_cause_one_traceback_is_shown(made):
    for place, cause in enumerate(["ValueError: no", "ValueError: no", "KeyError: x"]):
        begin(made_run := made.run(f"r{place}", seed=place))
        text = "x" * 5000 if place == 2 else f"Traceback {place}, token hf_abcdefghijklmnop"
        end(made_run, "crash", cause=cause, rank=place, traceback=text, metrics={})
    details = sections(facts_in(made.folder))["failures"].details
    names = [run_folder.path.name for run_folder in made.folder.runs()]
    assert [summary for summary, _ in details] == [
        f"{names[0]}: traceback of rank 0",
        f"{names[2]}: traceback of rank 2",
    ]
    assert details[0][1].startswith("Traceback 0, token ")
    assert "hf_abcdefghijklmnop" not in details[0][1]
    # Of a long one the end is shown.
    assert details[1][1] == "…" + "x" * 4000


def test_without_a_run_that_is_done_configs_are_compared_with_the_first(made):
    for name, seed in (("a", 0), ("b", 5)):
        begin(made_run := made.run(name, seed=seed, point={"seed": seed}))
        end(made_run, "oom", metrics={})
    section = sections(facts_in(made.folder))["configuration"]
    first = next(iter(made.folder.runs())).path.name
    assert section.texts == [
        (
            f"Compared with {first}, the first one, because no run is done. "
            "Names, paths and the number of the repeat are left out."
        )
    ]
    (table,) = section.tables
    assert [line[2].text for line in table.rows] == ["the recipe that the others are compared with", ""]
    assert table.rows[1][2].items == ["seed: 0 → 5"]


def test_a_config_that_cannot_be_read_is_said(made):
    for name, seed in (("a", 0), ("b", 5)):
        begin(made_run := made.run(name, seed=seed, point={"seed": seed}))
        end(made_run, metrics={})
    facts = facts_in(made.folder)
    assert len(facts.groups) == 2
    first, second = made.folder.runs()
    (second.path / "attempts/1/config.yaml").write_text("{")
    (table,) = sections(facts)["configuration"].tables
    assert table.rows[1][2].text == "config.yaml cannot be read"
    (first.path / "attempts/1/config.yaml").write_text("{")
    section = sections(facts)["configuration"]
    assert (section.texts, section.tables) == ([f"The config.yaml of {first.path.name} cannot be read."], ())


def test_of_many_differences_the_first_are_visible(made):
    changed = {"dim": 128, "layers": 3, "heads": 8, "ffn_dim": 256, "lr": 0.5, "weight_decay": 0.5, "eps": 0.5}
    changed |= {"steps": 20, "seq_len": 64, "global_batch": 24, "log_every": 2, "max_grad_norm": 0.5, "seed": 3}
    changed |= {"norm_eps": 0.5, "rope_theta": 5.0, "validate_every": 5, "unmeasured_steps": 4, "gc_every": 9}
    changed |= {"every": 7, "keep": 5, "deterministic": True, "shard": 2, "sequence_parallel": False}
    for name, given in (("a", {}), ("b", changed)):
        begin(made_run := made.run(name, point={"name": name}, **given))
        end(made_run, metrics={})
    (table,) = sections(facts_in(made.folder))["configuration"].tables
    cell = table.rows[1][2]
    count = len(cell.more.splitlines())
    assert count > 20
    assert len(cell.items) == 21
    assert list(cell.items[:20]) == cell.more.splitlines()[:20]
    assert cell.items[20] == f"and {count - 20} {'key' if count == 21 else 'keys'} more"


PROVED = {"run": "a", "layout": "dp_s2", "precision": "fp32", "passed": True}


def parity_of(folder):
    return sections(facts_of(folder=folder)).get("parity")


def written(folder, *rows, **given):
    value = {"schema": 1, "time": "2026-11-24 20:00", "reference": "single in fp32", "rows": list(rows), **given}
    (folder / "parity.json").write_text(json.dumps(value))
    return folder


def row_of(folder):
    (table,) = parity_of(folder).tables
    (row,) = table.rows
    return dict(zip(table.headings, (each.text for each in row), strict=True))


def test_a_parity_file_is_a_section_before_the_last(tmp_path):
    assert parity_of(tmp_path) is None
    rows = [{**PROVED, "run": "a"}, {**PROVED, "run": "b", "passed": False, "reason": "r" * 301}]
    for own, text in (
        ([], "0 comparisons with single in fp32, 2026-11-24 20:00: all within their tolerances."),
        (rows[:1], "1 comparison with single in fp32, 2026-11-24 20:00: all within their tolerances."),
        (rows, "2 comparisons with single in fp32, 2026-11-24 20:00: 1 not within the tolerance."),
    ):
        found = sections(facts_of(folder=written(tmp_path, *own)))
        assert list(found)[-2:] == ["parity", "provenance"]
        assert found["parity"].texts == [text]
    (table,) = found["parity"].tables
    assert [(line[0].run, line[3].text) for line in table.rows] == [("a", "PASS"), ("b", "FAIL")]
    assert table.rows[1][-1].text == "r" * 300 + "…"


@pytest.mark.parametrize(
    ("given", "column", "text"),
    [
        ({"loss": None}, "loss", ""),
        ({"loss": 1.234e-7}, "loss", "1.2e-07"),
        ({"gradient": [1e-6, "layers.0.wq"]}, "gradient", "1e-06 (layers.0.wq)"),
        ({"tolerance": {"loss": 1e-5, "parameter": 2}}, "tolerance", "loss 1e-05, parameter 2"),
    ],
)
def test_differences_of_a_proof_are_short(tmp_path, given, column, text):
    assert row_of(written(tmp_path, {**PROVED, **given}))[column] == text


def test_differences_are_short_and_without_secrets(made):
    for name, seed in (("a", 0), ("b", 5)):
        begin(made_run := made.run(name, seed=seed, point={"seed": seed}))
        end(made_run, metrics={})
    (path,) = (made_run.path / "attempts").rglob("config.yaml")
    text = path.read_text().replace("init_from: null", f"init_from: {'x' * 201}")
    path.write_text(text.replace("load_from: null", "load_from: api_key=abcdefgh12345678"))
    (table,) = sections(facts_in(made.folder))["configuration"].tables
    said = table.rows[1][2].more or "\n".join(table.rows[1][2].items)
    assert f"init_from: null → {'x' * 200}…" in said
    assert "load_from" in said
    assert "abcdefgh12345678" not in said


def provenance(folder):
    """The table of sources, by what it tells."""
    (table,) = sections(facts_in(folder))["provenance"].tables
    return {line[0].text: line[1:] for line in table.rows}


def test_runs_of_one_origin_are_together_and_the_most_frequent_first(made):
    for place, code in enumerate(["one", "two", "two"]):
        begin(made_run := made.run(f"r{place}", seed=place), code=code)
        end(made_run, ended=2000.0 + place)
    made.run("waits", seed=9)
    found = provenance(made.folder)
    assert [each.text for each in found["code"]] == ["two", "one"]
    # Those of all its runs: the first to begin, the last to end.
    assert (found["began"][0].text, found["ended"][0].text) == ("1970-01-01 00:16:40 UTC", "1970-01-01 00:33:22 UTC")
    assert (found["runs"][0].text, found["runs"][1].text.partition("-")[0]) == ("2 runs", "r0")
    assert [name.partition("-")[0] for name in found["runs"][0].more.splitlines()] == ["r1", "r2"]


KNOWN = {
    "code": {"version": "0.9", "fingerprint": "f" * 64, "git": {"sha": "a" * 40, "branch": "main", "dirty": True}},
    "packages": {"torch": "2.11.0"},
    "python": {"version": "3.12.1"},
    "host": {"name": "n1", "cpu": "EPYC", "usable_cores": 64},
    "launcher": "slurm",
}


@pytest.mark.parametrize(
    ("env", "told"),
    [
        (
            {"time": 1000.0, **KNOWN},
            {"code": "f" * 12, "commit": "a" * 12 + " (main), with changes", "titanlab": "0.9", "torch": "2.11.0",
             "Python": "3.12.1", "device": "cpu", "host": "n1 (EPYC, 64 cores)"},
        ),
        ({"time": 1e300, "host": {"name": "n1"}, "code": {"git": {"sha": 7, "dirty": "yes"}}}, {"host": "n1"}),
        ({"time": 1.0, "code": "text", "host": ["a"], "packages": 3}, {"began": "1970-01-01 00:00:01 UTC"}),
    ],
)  # fmt: skip
def test_an_origin_says_all_that_is_known(made, env, told):
    begin(made_run := made.run("a"))
    (made_run.path / "attempts/1/env.json").write_text(json.dumps(env))
    found = provenance(made.folder)
    assert {name: found[name][0].text for name in told} == told


@pytest.mark.parametrize("count", [1, 4, 5])
def test_few_sources_are_columns_and_many_are_rows(made, count):
    for place in range(count):
        begin(made_run := made.run(f"r{place}", seed=place), code=f"code{place}")
        end(made_run)
    section = sections(facts_in(made.folder))["provenance"]
    (table,) = section.tables
    if count <= 4:
        assert table.headings == ["fact", *(f"source {place + 1}" for place in range(count))]
        assert cells(table)[0] == ["code", *(f"code{place}" for place in range(count))]
    else:
        assert list(table.headings)[:2] == ["code", "commit"]
        assert [line[0] for line in cells(table)] == [f"code{place}" for place in range(count)]


@pytest.mark.parametrize(
    ("origin", "texts"),
    [("command line", []), ("sweeps/mine.yaml", ["The sweep is sweeps/mine.yaml."]), (3, []), (None, [])],
)
def test_the_origin_of_a_sweep_is_told_unless_it_is_the_command_line(made, origin, texts):
    begin(made_run := made.run("a"))
    end(made_run)
    made.folder.write_manifest({"name": "a", "origin": origin, "overrides": ["seed=1"]}, made.points)
    section = sections(facts_in(made.folder))["provenance"]
    assert (section.texts, section.command) == (texts, "titanlab sweep seed=1")


@pytest.mark.parametrize(
    ("value", "shown", "is_number"),
    [
        (None, "", False),
        (True, "yes", False),
        (0, "0", True),
        (12345678, "12,345,678", True),
        (1000.4, "1,000", True),
        (0.00001234, "0.00001234", True),
        (math.nan, "nan", True),
        ("12", "12", False),
        (["a", 1], "['a', 1]", False),
    ],
)
def test_a_plain_value_has_a_text(value, shown, is_number):
    assert cell(value) == Cell(text=shown, is_number=is_number)
