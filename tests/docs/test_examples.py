"""Examples in Python and in files of a reader's own do what the pages say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch  # noqa: F401 (CONTRIBUTING.md's example takes it as imported)
import yaml

from tests.docs.pages import blocks
from tests.report.wandb_api import Api
from titanlab.costs import Share, meter
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing
from titanlab.techniques.model.llama_schema import Llama


def code(page, language="python"):
    return [block.text for block in blocks(page) if block.language == language]


# The workers import the function of the example from this module.
exec(code("CONTRIBUTING.md")[0])
example_of_ranks = globals().pop("test_ranks_are_summed")


def test_ranks_are_summed_as_shown(pool):
    example_of_ranks(pool)


def test_frames_and_figures_are_made_as_shown(reader):
    pytest.importorskip("matplotlib").use("agg")
    (example,) = code("docs/comparing.md")
    names = {}
    exec(example, names)
    assert list(names["runs"]["name"]) == ["single", "fsdp-world2"]
    assert set(names["steps"]["run"]) == set(names["runs"]["run"])
    assert Path("throughput.png").is_file()


def test_figures_of_a_report_are_made_as_shown(reader):
    pytest.importorskip("matplotlib").use("agg")
    (example,) = code("docs/reports.md")
    names = {}
    exec(example, names)
    assert Path("pareto.pdf").read_bytes().startswith(b"%PDF")
    marks = names["figures"]["throughput"].marks.values()
    assert {run for mark in marks for run in mark.runs} <= {
        path.name for path in Path("runs/quickstart_layouts").iterdir()
    }
    assert any("tokens_per_second" in mark.columns for mark in marks)


def test_analyses_are_made_as_shown(reader):
    pytest.importorskip("matplotlib").use("agg")
    example, _ = code("docs/notebooks.md")
    names = {}
    exec(example, names)
    assert list(names["memory"]["name"]) == ["single", "fsdp-world2"]
    assert list(names["largest"]["name"]) == ["fsdp-world2"]
    assert names["pipelines"].empty
    assert len(names["schedules"]) > 10
    assert Path("scaling.png").is_file()


def test_runs_on_the_server_of_wandb_are_read_as_shown(reader, capsys, monkeypatch):
    _, example = code("docs/notebooks.md")
    (run,) = Path("runs/quickstart_layouts").glob("fsdp-*")
    config = {**yaml.safe_load((run / "config.yaml").read_text()), "attempt": 1}
    rows = [{"_step": 1, "_timestamp": 1.0, meter.LOSS: 5.0, meter.TOKENS_SEEN: 384}]
    known = {"config": config, "rows": rows, "summary": {}, "state": "running", "metadata": None}
    monkeypatch.setattr(
        Api, "projects", {"ENTITY/titanlab": [{**known, "name": run.name, "group": "quickstart_layouts"}]}
    )
    monkeypatch.setattr("wandb.Api", Api)
    names = {}
    exec(example, names)
    assert capsys.readouterr().out == f"{run.name} 1 None\n"
    assert list(names["runs"]["layout.label"]) == ["dp_s2"]
    assert len(names["steps"]) == 1


def test_runs_are_found_and_read_as_shown(reader, monkeypatch):
    search, field, rows = code("docs/run-folder.md")
    run = next(Path("runs/quickstart_layouts").glob("single-*"))
    names = {}
    exec(search.replace('find_run("quickstart")', f'find_run("{run.name}")'), names)
    assert names["run"].path == run
    monkeypatch.chdir(run)
    exec(rows, names)
    assert list(names["train"]["step"]) == [1, 2, 3, 4]
    exec(f"from dataclasses import dataclass, field\n@dataclass\nclass Example:\n    {field}", names)
    assert names["Example"]().fused


def test_bytes_are_summed_as_shown():
    (example,) = code("docs/activation-checkpointing.md")
    model = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, vocab_size=2048)
    names = {"policy": FullCheckpointing(), "model": model, "Share": Share}
    # Its input: batch × tokens × dim in 2 bytes, half of the tokens on each of two ranks.
    assert eval(example, names) == 2 * 1024 * 64 * 2 / 2


def test_the_order_that_is_shown_can_be_run(reader):
    shown = next(block.text for block in blocks("docs/schedules.md") if block.text.startswith("0F0,"))
    Path("my.csv").write_text(shown)
    said = reader.types("titanlab schedule csv --file my.csv")
    assert (said.code, said.out.splitlines()[0]) == (0, "csv: 2 ranks, 2 microbatches, 1 stage a rank")
