"""docs/run-folder.md says what the files hold, all of it."""

import dataclasses
import re
from pathlib import Path

import pytest

from titanlab.costs import meter
from titanlab.distributed.start_up import PHASES
from titanlab.records import STATES, Outcome, OutcomeKind, Status, collect
from titanlab.records.run_folder import MetricsWriter, read_metrics
from titanlab.techniques.profiler.held import fullest
from titanlab.techniques.profiler.memory import largest
from titanlab.techniques.profiler.profilers_schema import BY_ITEM, ITEMS, REST
from titanlab.techniques.profiler.trace import EXPOSED, STEP
from titanlab.techniques.profiler.trace import PHASES as PARTS
from titanlab.techniques.profiler.trace import metrics as breakdown
from titanlab.techniques.tracker.contract import FINISHED, OPEN, STARTING, Record

PAGE = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()


def keys(heading):
    """Words in code style in the tables' first columns, and in nested cells, below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"`([^`]+)`", section))


def fields(kind):
    return {field.name for field in dataclasses.fields(kind)}


def measured():
    clock = iter(range(10))
    return meter.Meter(meter.RunWork(devices=1, flops_per_token=1.0), clock=lambda: next(clock))


PROFILED = breakdown(dict.fromkeys((STEP, *PARTS, f"{EXPOSED}AXIS"), 1.0))
SECTIONS = {
    "status.json": {*fields(Status), *STATES},
    "result.json": fields(Outcome) | set(measured().summary()) - keys("metrics.jsonl"),
    "start_up.json": {"seconds", "total", *PHASES},
    "tracker.json": {*fields(Record), STARTING, OPEN, FINISHED},
    "metrics.jsonl": {"breakdown", *PROFILED, "memory", *largest([dict.fromkeys(PARTS, 1.0)])}
    | {BY_ITEM, *fullest([dict.fromkeys((*ITEMS, REST), 1.0)])},
}


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_names_every_key(heading):
    assert SECTIONS[heading] <= keys(heading)


@pytest.mark.parametrize("kind", list(OutcomeKind))
def test_every_kind_of_end_is_in_the_table_as_it_is(kind):
    going_on = "yes" if kind.may_continue else ""
    by_itself = "yes" if kind.automatic else ""
    cells = [f"`{kind}`", str(kind.exit_code), kind.meaning, going_on, by_itself]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    assert cells in rows


def test_metrics(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl", attempt=1) as writer:
        writer.write("train", 1, {})
    steps = measured()
    steps.begin()
    steps.end_step(tokens=1)
    named = {meter.LOSS, meter.GRAD_NORM, meter.LEARNING_RATE, meter.TOKENS_SEEN, meter.VALIDATION_LOSS}
    written = set(read_metrics(tmp_path / "metrics.jsonl")[0]) | set(steps.window().metrics()) | named
    assert written <= keys("metrics.jsonl")


def test_env():
    record = collect(devices={}, launcher="local").record
    written = {"schema", *keys("env.json")}
    assert set(record) <= written
    for group in ("code", "python", "platform", "host"):
        assert set(record[group]) <= written
    if record["code"]["git"]:
        assert set(record["code"]["git"]) <= written
