"""A short form of the quickstart's sweep, trained once in a session, and what a notebook prints and draws."""

from __future__ import annotations

import base64
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from tests.installed_command import titanlab
from tests.sweep.made import Made, begin, end, train

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
# Recipes of the quickstart's Llama: on one process, in two precisions, sharded, and as a pipeline, with a repeat; and a
# point that breaks a rule.
SWEEP = """\
# @package _global_
defaults:
  - /recipe: quickstart
  - override /hydra/sweeper: space

sweep: quickstart_layouts
world: null
training:
  steps: 8
  seq_len: 64
  log_every: 1
  validate_every: 4
  validation_sequences: 8
  unmeasured_steps: 2
optimizer:
  schedule:
    warmup_steps: 2
checkpoint:
  at_end: false
cluster:
  peak_tflops: 0.5

hydra:
  mode: MULTIRUN
  sweeper:
    repeats: 2
    space:
      list:
        - {parallelism: single}
        - {parallelism: single, precision: bf16}
        - {parallelism: fsdp, world: 2}
        - {parallelism: pp, world: 2}
        - {parallelism: fsdp, world: 3}
"""


@dataclass(frozen=True)
class Executed:
    """What a notebook has printed and drawn.

    Attributes:
        text: of the standard output.
        errors: texts of the standard error; a warning is one.
        pictures: PNG files.
        tables: as HTML.
    """

    text: str
    errors: list[str]
    pictures: list[bytes]
    tables: list[str]


@pytest.fixture(scope="session")
def short_sweep(tmp_path_factory):
    """The folder of the sweep."""
    folder = tmp_path_factory.mktemp("short_sweep")
    (folder / "groups" / "sweeps").mkdir(parents=True)
    (folder / "groups" / "sweeps" / "short.yaml").write_text(SWEEP)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = ["--config-dir", "groups", "+sweeps=short", "--wait"]
    titanlab("sweep", *words, folder=folder, environ=environ, seconds=900)
    return folder / "runs" / "quickstart_layouts"


@pytest.fixture
def execute(tmp_path):
    """Runs a notebook in a kernel of its own: execute(name, **environ) -> Executed."""

    def run(name: str, **environ: str) -> Executed:
        # Not at the top: it is what its imports warn of that is let pass, and nothing else.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from nbclient import NotebookClient

            notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
            resources = {"metadata": {"path": str(NOTEBOOKS)}}
            client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources)
            own = {
                # The debugger that comes with the kernel would say that it cannot see frozen modules.
                "PYDEVD_DISABLE_FILE_VALIDATION": "1",
                "IPYTHONDIR": str(tmp_path / "ipython"),
                "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
                "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
            }
            client.execute(env={**os.environ, **own, **environ})
        outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
        data = [output.get("data", {}) for output in outputs]
        executed = Executed(
            text="".join(output.text for output in outputs if output.get("name") == "stdout"),
            errors=[output.text for output in outputs if output.get("name") == "stderr"],
            pictures=[base64.b64decode(each["image/png"]) for each in data if "image/png" in each],
            tables=[each["text/html"] for each in data if "text/html" in each],
        )
        if kept := os.environ.get("TITANLAB_KEEP_PICTURES"):
            for number, picture in enumerate(executed.pictures):
                (Path(kept) / f"{name}-{number}.png").write_bytes(picture)
        return executed

    return run


@pytest.fixture
def made_without_pipeline(tmp_path):
    """The folder of a sweep without a pipeline, made without training."""
    made = Made(tmp_path / "runs")
    run = made.run("fsdp", shard=2)
    begin(run)
    train(run)
    end(run)
    return made.folder.path
