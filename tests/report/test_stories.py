"""The sections of sweeps that tell a story: a stack, scaling, growing sequences; what the first box and the notes say."""

from __future__ import annotations

import math
import re

import pytest

from tests.report.plain import facts_of, run
from titanlab.report.report import html
from titanlab.report.sections import sections_of
from titanlab.report.stories import scaling_series, scaling_texts, story_sections
from titanlab.sweep import notes_of, ranking_lines, sentence_of

GPU = {"accelerator": "cuda", "device": "NVIDIA H100 80GB HBM3", "ended": 3600.0, "started": 1.0, "global_batch": 8}


def repeated(name, layout, speed, **given):
    """Three runs that differ by a percent."""
    return [run(f"{name}-{n}", layout, speed * share, **given) for n, share in enumerate((0.99, 1.0, 1.01))]


def stack(*speeds, **given):
    rows = []
    for number, speed in enumerate(speeds):
        name = ("off", "blocks", "blocks+loss", "loss")[number]
        rows += repeated(name, "dp_s8", speed, compile=name, stack_step=number, world=8, **{**GPU, **given})
    return rows


def scaling(*, weak):
    rows = []
    for world, share in ((8, 1.0), (16, 0.97), (32, 0.9)):
        batch = 2 * world if weak else 128
        given = {**GPU, "world": world, "global_batch": batch, "seq_len": 128}
        rows += repeated(f"{weak}{world}", f"dp_s{world}", 1000.0 * (share if weak else share**2), **given)
    return rows


def lengths(**given):
    rows = []
    for number, length in enumerate((1024, 2048, 4096)):
        own = {**GPU, "world": 8, "seq_len": length, "layout.context": 2**number, **given}
        rows += repeated(f"r{length}", f"cp{2**number}", 1000.0 / 2**number, memory_gib=10.0 + number, **own)
    return rows


def stories(*rows):
    return {section.id: section for section in story_sections(facts_of(*rows))}


def texts(table):
    return [[cell.text for cell in line] for line in table.rows]


def test_a_stack_is_steps_with_their_gains_and_bands():
    section = stories(*stack(1000.0, 1160.0, 1500.0))["stack"]
    rows = texts(section.tables[0])
    assert [row[0] for row in rows] == ["dp_s8 · off", "dp_s8 · blocks", "dp_s8 · blocks+loss"]
    assert [row[2] for row in rows] == ["", "dp_s8 · off", "dp_s8 · blocks"]
    assert re.fullmatch(r"\+16\.0% \(95% interval 1\d\.\d% to 1\d\.\d%\)", rows[1][3])
    drawn = [mark for mark in section.figure.marks.values() if "+16.0%" in mark.text]
    assert [mark.runs for mark in drawn] == [("blocks-0", "blocks-1", "blocks-2")]
    assert "stack" not in stories(*repeated("a", "dp_s2", 1000.0), *repeated("b", "tp2", 900.0))


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_a_step_that_is_a_fifth_slower_is_named_by_the_first_sentence_of_the_report(tmp_path, slow):
    speeds = [1000.0, 1160.0, 1300.0, 1500.0]
    speeds[slow] = 0.8 * speeds[slow - 1]
    rows = stack(*speeds)
    worse = f"; worse than the step before: dp_s8 · {rows[3 * slow]['compile']} -20.0% (95% interval "
    assert worse in answer(rows, tmp_path)


@pytest.mark.parametrize("weak", [True, False])
@pytest.mark.parametrize(
    ("slow", "text"),
    [
        (None, ""),
        (16, "{} scaling is 2[0-9].\\d% better on 32 devices than on 16"),
        (64, "{} scaling loses most from 32 to 64 devices: -2[0-9].\\d%"),
    ],
)
def test_a_number_of_devices_that_is_a_fifth_slower_is_named_by_the_first_sentence(tmp_path, weak, slow, text):
    rows = []
    for world in (8, 16, 32, 64):
        given = {**GPU, "world": world, "global_batch": 2 * world if weak else 128, "seq_len": 128}
        rows += repeated(f"w{world}", f"dp_s{world}", 1000.0 * (0.8 if world == slow else 1.0), **given)
    assert re.search(rf"{text.format('weak' if weak else 'strong')}\.$", answer(rows, tmp_path))
    assert bool(text) == ("scaling" in answer(rows, tmp_path))


@pytest.mark.parametrize(
    ("slow", "text"),
    [
        (None, ""),
        (2048, "FLOP/s is 2[0-9].\\d% better on 4,096 tokens than on 2,048"),
        (8192, "FLOP/s loses most from 4,096 to 8,192 tokens: -2[0-9].\\d%"),
    ],
)
def test_a_length_that_is_a_fifth_slower_is_named_though_longer_sequences_have_fewer_tokens_a_second(
    tmp_path, slow, text
):
    rows = []
    for number, length in enumerate((1024, 2048, 4096, 8192)):
        speed, flops = 1000.0 / (1 + number) * (0.8 if length == slow else 1.0), 1.0 + number
        own = {**GPU, "world": 8, "seq_len": length, "layout.context": 2**number}
        rows += [
            {**row, "tflops": row["tokens_per_second"] * flops}
            for row in repeated(f"r{length}", f"cp{2**number}", speed, **own)
        ]
    assert bool(text) == ("FLOP/s" in answer(rows, tmp_path))
    assert re.search(rf"{text}\.$", answer(rows, tmp_path))


def answer(rows, folder):
    """The first sentence of the report."""
    facts = facts_of(*rows, folder=folder)
    (sentence,) = re.findall(r'<p class="answer">(.*?)</p>', html(facts, sections_of(facts), into=folder))
    return sentence


def test_scaling_is_efficiency_against_the_fewest_devices():
    rows = [*scaling(weak=True), *scaling(weak=False)]
    section = stories(*rows)["scaling"]
    efficiencies = {(row[0].partition(",")[0], row[2]): row[6] for row in texts(section.tables[0])}
    assert efficiencies[("weak", "32")] == "90.00"
    assert efficiencies[("strong", "32")] == "81.00"
    assert efficiencies[("weak", "8")] == "100.0"
    assert scaling_texts(facts_of(*rows)) == ["weak: 90% on 32, of 8", "strong: 81% on 32, of 8"]
    # Two recipes on equally many devices do not scale; nor does one whose other sizes were oversubscribed.
    assert "scaling" not in stories(*stack(1000.0, 1100.0))
    for row in rows:
        row["oversubscribed"] = row["world"] > 8
    assert scaling_series(facts_of(*rows)) == {}


def test_two_recipes_that_scale_alike_are_two_lines():
    rows = [{**row, "precision": "bf16"} for row in scaling(weak=True)]
    rows += [
        {**row, "run": f"f8{row['run']}", "precision": "float8", "tokens_per_second": 2000.0 * row["world"] ** -0.1}
        for row in rows
    ]
    facts = facts_of(*rows)
    assert sorted(scaling_series(facts)) == [f"weak, 16 sequences on 8, {kind}" for kind in ("bf16", "float8")]
    assert sorted(scaling_texts(facts)) == [
        "weak, 16 sequences on 8, bf16: 90% on 32, of 8",
        "weak, 16 sequences on 8, float8: 87% on 32, of 8",
    ]
    assert len(texts(stories(*rows)["scaling"].tables[0])) == 6


def test_growing_sequences_are_speed_and_memory_by_length():
    section = stories(*lengths())["context"]
    assert [row[1:] for row in texts(section.tables[0])] == [
        ["1,024", "1", "1,000", "10.00", "3 done"],
        ["2,048", "2", "500", "11.00", "3 done"],
        ["4,096", "4", "250", "12.00", "3 done"],
    ]
    columns = [mark.columns for mark in section.figure.marks.values()]
    assert columns == [("tokens_per_second",)] * 3 + [("memory_gib",)] * 3


def test_recipes_of_one_length_stand_by_their_speeds():
    rows, speeds = lengths(precision="bf16"), {1024: 800.0, 2048: 700.0, 4096: 200.0}
    for row in lengths(precision="float8"):
        rows.append({**row, "run": f"f8{row['run']}", "tokens_per_second": speeds[row["seq_len"]]})
    table = stories(*rows)["context"].tables[0]
    assert [row[3] for row in texts(table)] == ["1,000", "800", "700", "500", "250", "200"]


def test_the_first_box_has_speeds_scaling_and_hours(tmp_path):
    facts = facts_of(*scaling(weak=True), folder=tmp_path)
    box = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html(facts, sections_of(facts), into=tmp_path)))
    assert box["fastest"] == "1,000 tokens/s per device, 8,000 in all"
    assert box["scaling efficiency"] == "weak: 90% on 32, of 8"
    assert box["GPU-hours"] == "168"


def test_a_twin_says_that_its_speeds_do_not_transfer_and_what_it_leaves_out(tmp_path):
    rows = stack(1000.0, 1100.0, accelerator="cpu", device="cpu")
    rows += repeated("f8", "dp_s8", 9000.0, precision="float8", accelerator="cpu", emulated=True, stack_step=2, world=8)
    dropped = {**rows[0], "run": None, "state": "dropped", "outcome": "infeasible", "dropped_stage": "rule"}
    dropped["cause"] = "parallelism.async_tensor=true: needs symmetric memory between GPUs"
    facts = facts_of(*rows, dropped, folder=tmp_path)
    page = html(facts, sections_of(facts), into=tmp_path)
    assert "<li>These are speeds of a CPU: they do not transfer to GPUs.</li>" in page
    assert "<li>3 runs emulated products that the device lacks, such as float8: their speed gets no place.</li>" in page
    assert "<li>Left out: parallelism.async_tensor=true: needs symmetric memory between GPUs.</li>" in page
    assert "float8" not in re.findall(r'<p class="answer">(.*?)</p>', page)[0]
    steps = texts(stories(*rows)["stack"].tables[0])
    assert [row[0].rpartition(" · ")[0] for row in steps][:2] == [
        "dp_s8 · global_batch 8 · off",
        "dp_s8 · global_batch 8 · blocks",
    ]
    assert steps[2][3].startswith("no place: emulated")


def failed(rows, outcome="oom"):
    return [{**row, "outcome": outcome, "tokens_per_second": None, "memory_gib": None} for row in rows]


def test_a_stack_whose_middle_step_failed_says_so_and_compares_the_next_with_the_one_before():
    rows = stack(1000.0, 1200.0, 1500.0)
    rows[3:6] = failed(rows[3:6], "crash")
    facts = facts_of(*rows)
    (section,) = story_sections(facts)
    steps = texts(section.tables[0])
    assert steps[1][1:] == ["", "", "no place: no run is done: 3 crash"]
    assert steps[2][2] == steps[0][0]
    assert steps[2][3].startswith("+50.0% (95% interval ")
    assert any(mark.text.endswith("in all, 3 runs") for mark in section.figure.marks.values())
    (line,) = (line for line in ranking_lines(facts.ranking) if "+50.0%" in line)
    assert line.startswith(f"  {steps[2][0]} over {steps[0][0]}: ")


@pytest.mark.parametrize("lost", [8, 16, 32])
def test_numbers_of_devices_without_a_run_that_is_done_are_gaps(lost):
    rows = scaling(weak=True)
    rows = [*(row for row in rows if row["world"] != lost), *failed([row for row in rows if row["world"] == lost])]
    facts = facts_of(*rows)
    section = stories(*rows)["scaling"]
    (said,) = scaling_texts(facts)
    assert said.endswith(f" (no run done on {lost})")
    assert f", of {16 if lost == 8 else 8} (" in said
    (missing,) = (row for row in texts(section.tables[0]) if row[2] == str(lost))
    assert missing[3:] == ["", "", "", "", "3 oom"]
    assert f"dp_s{lost} · global_batch {2 * lost}: oom, {lost} devices" in {
        mark.text for mark in section.figure.marks.values()
    }
    # No line joins the neighbours of a gap.
    lines = [
        line for line in section.figure.axes[0].lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 3
    ]
    assert [math.isnan(value) for value in lines[0].get_ydata()] == [size == lost for size in (8, 16, 32)]
    assert "A cross is a recipe of which no run is done" in section.caption


def test_a_length_that_ran_out_of_memory_stays_in_the_figure_and_in_the_table():
    rows = lengths()
    rows[6:] = failed(rows[6:])
    section = stories(*rows)["context"]
    assert [row[1:] for row in texts(section.tables[0])][2] == ["4,096", "4", "", "", "3 oom"]
    crosses = [mark for mark in section.figure.marks.values() if "oom" in mark.text]
    assert [mark.runs for mark in crosses] == [("r4096-0", "r4096-1", "r4096-2")] * 2
    assert "4,096 tokens: 3 oom" in section.description


def test_a_drift_of_the_machine_is_not_taken_for_a_step_that_is_worse():
    # The machine slows down by a fifth; the rounds are in turns, so that each step has its share.
    rows, shares = stack(1000.0, 1160.0, 1300.0), (1.0, 0.9, 0.8)
    for number, row in enumerate(rows):
        row["tokens_per_second"] *= shares[number % 3]
    control = repeated("control", "dp_s8", 1000.0, world=8, control=True, compile="off", **GPU)
    for number, row in enumerate(control):
        row |= {"tokens_per_second": 1000.0 * shares[number], "started": 100.0 * (number + 1)}
    ranking = facts_of(*rows, *control).ranking
    assert not any(step.is_worse for step in ranking.steps)
    assert "worse" not in sentence_of(ranking)
    assert any(
        note.startswith("Drift: the control's tokens/s per device went 20.0% down") for note in notes_of(ranking)
    )
