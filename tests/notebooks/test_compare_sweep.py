"""notebooks/compare_sweep: the notebook and its script are the same, and it runs on a real sweep's results."""

import base64
import os
import warnings
from pathlib import Path

import jupytext
import nbformat
import pytest

from tests.small_sweep import small_sweep

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


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
    assert names == {path.stem for path in NOTEBOOKS.glob("*.py")}
    assert "compare_sweep" in names


def executed(path, **environ):
    """The notebook with its outputs, run by a kernel of its own."""
    # Not at the top: it is what its imports warn of that is let pass, and nothing else.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nbclient import NotebookClient

        notebook = nbformat.read(path, as_version=4)
        resources = {"metadata": {"path": str(path.parent)}}
        client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
        client.execute(env={**os.environ, **environ})
    return notebook


@pytest.mark.full
def test_it_shows_a_real_sweep(tmp_path_factory, tmp_path):
    folder = tmp_path_factory.getbasetemp() / "small_sweep"
    folder.mkdir(exist_ok=True)
    sweep = small_sweep(folder)
    notebook = executed(
        NOTEBOOKS / "compare_sweep.ipynb",
        TITANLAB_SWEEP=str(sweep),
        # The debugger that comes with the kernel would say that it cannot see frozen modules.
        PYDEVD_DISABLE_FILE_VALIDATION="1",
        IPYTHONDIR=str(tmp_path / "ipython"),
        JUPYTER_RUNTIME_DIR=str(tmp_path / "runtime"),
        MPLCONFIGDIR=str(tmp_path / "matplotlib"),
    )
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    # No warning either.
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    said = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert said.startswith("small: runs 2, points dropped 1, rows of metrics 12\n")
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 5
    assert all(len(base64.b64decode(picture)) > 5000 for picture in pictures)
    tables = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(tables) == 2
    assert "must be a multiple of the 3 data-parallel processes" in tables[0]
