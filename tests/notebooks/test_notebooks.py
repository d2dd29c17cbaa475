"""Every notebook and its script are the same, and it runs on the results of a real sweep."""

from __future__ import annotations

import jupytext
import nbformat
import pytest

from tests.docs.pages import blocks
from tests.notebooks.conftest import NOTEBOOKS
from tests.report.wandb_api import write_module
from titanlab.sweep import SweepFolder

NAMES = {"compare_sweep", "from_wandb", "loss_parity", "memory", "pipeline_schedules"}


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_and_its_script_are_the_same_and_keep_no_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    script = jupytext.read(path.with_suffix(".py"))
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in script.cells
    ], f"cure: jupytext --sync notebooks/{path.name}"
    assert notebook.metadata.jupytext["formats"] == script.metadata.jupytext["formats"] == "ipynb,py:percent"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None), "cure: clear all outputs, and save"


def test_every_notebook_is_paired():
    names = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    assert names == {path.stem for path in NOTEBOOKS.glob("*.py")} == NAMES


def shown(executed, *, pictures, tables):
    """The text, after the checks that all notebooks have in common."""
    # No warning either.
    assert executed.errors == []
    assert len(executed.pictures) == pictures
    assert all(len(picture) > 5000 for picture in executed.pictures)
    assert len(executed.tables) == tables
    return executed.text


# The first one needs no sweep, and runs in the default layer.
def test_schedules_are_simulated_where_there_is_no_pipeline(execute, made_without_pipeline):
    executed = execute("pipeline_schedules", TITANLAB_SWEEP=str(made_without_pipeline))
    text = shown(executed, pictures=1, tables=3)
    assert text.endswith("layouts: pipelines 0\n")
    # The page shows the first output.
    (timeline,) = [block.text for block in blocks("docs/notebooks.md") if block.language == "text"]
    assert all(f"{line}\n" in text for line in timeline.splitlines())
    assert "rank 3 ......F0B0--F1B1" in timeline
    assert all(name in executed.tables[0] for name in ("gpipe", "zbv", "27.27"))


@pytest.mark.full
def test_schedules_stand_beside_the_pipelines_of_a_sweep(execute, short_sweep):
    executed = execute("pipeline_schedules", TITANLAB_SWEEP=str(short_sweep))
    assert shown(executed, pictures=1, tables=3).endswith("quickstart_layouts: pipelines 2\n")
    # Two ranks, eight microbatches: (p − 1) / (m + p − 1).
    assert "11.111" in executed.tables[2]


@pytest.mark.full
def test_a_sweep_is_compared(execute, short_sweep):
    executed = execute("compare_sweep", TITANLAB_SWEEP=str(short_sweep))
    text = shown(executed, pictures=7, tables=1)
    assert text.startswith("quickstart_layouts: runs 8, points dropped 2, rows of metrics 64\n")
    assert "must be a multiple of the 3 data-parallel processes" in executed.tables[0]
    assert "95% interval" in text


@pytest.mark.full
def test_memory_is_accounted_for(execute, short_sweep):
    executed = execute("memory", TITANLAB_SWEEP=str(short_sweep))
    text = shown(executed, pictures=1, tables=2)
    assert text == (
        "quickstart_layouts: runs with an estimate 8, with a measurement 8\n"
        "runs with an estimate of time and memory: 0\n"
    )
    assert "item.activations" in executed.tables[0]


@pytest.mark.full
def test_losses_are_compared(execute, short_sweep):
    executed = execute("loss_parity", TITANLAB_SWEEP=str(short_sweep))
    text = shown(executed, pictures=3, tables=2)
    assert text == "quickstart_layouts: reference single (single, fp32)\n"
    assert "bf16" in executed.tables[1]


@pytest.mark.full
def test_a_sweep_is_read_from_the_server_of_wandb(execute, short_sweep, tmp_path):
    module = write_module(tmp_path / "stand_in", {"us/titanlab": [as_recorded(run) for run in SweepFolder(short_sweep).runs()]})
    executed = execute("from_wandb", TITANLAB_WANDB="us/titanlab", PYTHONPATH=str(module))
    assert shown(executed, pictures=4, tables=2) == "us/titanlab: runs 8, rows 64\n"


def as_recorded(run):
    """A run as wandb's tracker records it, without wandb."""
    rows = [{**row, "_step": row["step"], "_timestamp": row["time"]} for row in run.metrics("train")]
    return {
        "name": run.path.name,
        "group": run.path.parent.name,
        "config": {**run.config(), "attempt": 1},
        "rows": rows,
        "summary": {**run.result().metrics, "outcome": "done"},
        "state": "finished",
        "metadata": {"cpu_count_logical": 2},
    }
