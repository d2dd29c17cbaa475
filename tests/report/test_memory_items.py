"""Memory of runs by the planner's items, beside the measurement."""

import pytest

from tests.sweep.made import begin, end, train
from titanlab.errors import ConfigError
from titanlab.plan import ITEMS, most_memory
from titanlab.recipe import from_mapping
from titanlab.report import drawings
from titanlab.report.analyses import MEMORY_COLUMNS, memory_frame


def test_a_run_has_the_planners_account_and_its_measurement(made):
    for name, shard in (("single", 1), ("fsdp", 2)):
        run = made.run(name, shard=shard)
        begin(run)
        train(run)
        end(run)
    made.drop("rule", "breaks a rule", parallelism="tp")
    memory = memory_frame(made.folder.path)
    assert list(memory.columns) == list(MEMORY_COLUMNS)
    assert list(memory["name"]) == ["single", "fsdp"]
    assert list(memory["measured_gib"]) == [0.75, 0.75]
    most = most_memory(from_mapping(run.config(1)))
    row = memory.iloc[1]
    assert [row[f"item.{item}"] * 1024**3 for item in ITEMS] == pytest.approx([most.items[item] for item in ITEMS])
    assert row["tensors_gib"] * 1024**3 == pytest.approx(most.allocated)
    # On a CPU the measurement is of a process, and so is the estimate.
    assert row["estimated_gib"] > 0.3
    assert row["error_percent"] == pytest.approx(100 * (row["estimated_gib"] / 0.75 - 1))
    figure = drawings.draw_memory(memory)
    assert list(figure.axes[0].lines[0].get_xdata()) == [0.75, 0.75]


def test_runs_that_did_not_end_well_have_an_estimate_only(made):
    run = made.run("lost", shard=2)
    begin(run)
    end(run, "oom")
    made.run("waits")
    memory = memory_frame(made.folder.path)
    assert list(memory["name"]) == ["lost", "waits"]
    assert memory["measured_gib"].isna().all()
    assert (memory["estimated_gib"] > 0).all()
    drawings.draw_memory(memory).draw_without_rendering()
    drawings.draw_memory(memory[:0]).draw_without_rendering()


def test_what_is_no_sweep_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no sweep's folder"):
        memory_frame(tmp_path)
