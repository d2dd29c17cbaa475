"""Reports as files: what is in the page, in which order, where each figure comes from, and figures for papers."""

from __future__ import annotations

import re
import shutil
import sys
import time
from html.parser import HTMLParser

import pytest

from tests.report.sweeps import NAMES, SCRIPT, hostile, losses, many, mixed, summary
from tests.sweep.made import Made, begin, end, train
from titanlab.errors import ConfigError
from titanlab.report import write_report
from titanlab.report.report import sweep_figures
from titanlab.sweep import NAMES as COLUMNS
from titanlab.sweep import SweepFolder, SweepTable

VOID = {"meta", "link", "br", "img", "input", "hr"}
METRICS = re.compile(r"(loss_metrics|breakdown)/\S+|n_tokens_seen|config\.yaml")


class Page(HTMLParser):
    """Elements of a page: tags that are open, attributes, texts by the section that they are in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.section = "header"
        self.words: dict[str, str] = {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = {name: value or "" for name, value in attributes}
        self.elements.append((tag, found))
        if tag == "section":
            self.section = found["id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words[self.section] = self.words.get(self.section, "") + data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def with_attribute(self, name):
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def written(made, **given) -> Page:
    rows = given.pop("rows", None) or SweepTable(made.folder).rows()
    into = made.folder.path / "report.html"
    write_report(made.folder, rows, into=into, **given)
    return Page(into.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Made:
    """A sweep with every kind of end, which tests only read."""
    return mixed(Made(tmp_path_factory.mktemp("shared")))


@pytest.fixture(scope="module")
def page(shared) -> Page:
    """Its report."""
    return written(shared)


def test_sections_stand_in_their_order(page):
    order = (
        "scaling pareto throughput step-time memory loss timeline estimate configuration dropped failures provenance"
    )
    assert [section["id"] for section in page.all("section")] == order.split()
    assert "is the fastest: 1,919 tokens/s per device, 26.7% more than tp2" in page.words["header"]
    assert "1 running, 1 prepared" in page.words["header"]
    assert "more processes than cores" in page.words["header"]


def test_every_mark_can_be_traced_to_a_run_folder_and_a_column(shared, page):
    folders = {run.path.name for run in shared.folder.runs()}
    marked = [name for names in page.with_attribute("data-run") for name in names.split()]
    assert set(marked) == folders
    columns = {name for names in page.with_attribute("data-column") for name in names.split()}
    assert all(name in COLUMNS or METRICS.fullmatch(name) for name in columns), columns
    # In each figure there is a mark with both; and below it a table with a row for each run.
    figures = page.text.split("<figure")[1:]
    assert len(figures) == 6
    for figure in figures:
        drawing, table = figure.partition("</svg>")[::2]
        assert 'data-run="' in drawing
        assert 'data-column="' in drawing
        assert "<code>" in table.partition("</figcaption>")[0]
        assert 'data-run="' in table


def test_values_of_the_table_are_those_of_the_columns(shared, page):
    values = page.text.split('<section id="throughput"')[1].split("<details>")[1].partition("</figure>")[0]
    rows = {row["run"]: row for row in SweepTable(shared.folder).rows() if row["run"]}
    shown = re.findall(r'<tr data-run="([^"]+)">.*?</th><td[^>]*><bdi>([\d,.]*)</bdi>', values)
    assert len(shown) == len(rows)
    for run, text in shown:
        expected = rows[run]["tokens_per_second"]
        assert (text == "") if expected is None else float(text.replace(",", "")) == pytest.approx(expected, rel=1e-3)


def test_nothing_of_a_strangers_files_is_a_part_of_the_page(made):
    page = written(hostile(made))
    assert "<script" not in page.text
    assert page.all("img") == []
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert SCRIPT in page.words["failures"]
    assert SCRIPT in page.words["dropped"]
    # Control characters, and those that turn the direction of writing, are replaced.
    assert re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", page.text) is None
    shown = page.words["pareto"]
    assert all(name in shown for name in NAMES if name.isprintable())
    assert "bell��[31m" in shown
    # A secret of the command line is not in it; a damaged file is a sentence.
    assert "hf_abcdefghijklmnop" not in page.text
    assert "parity.json cannot be read" in page.words["parity"]
    assert len(page.text) < 300_000
    links = [attributes["href"] for attributes in page.all("a")]
    assert all(re.match(r"#|\./|\.\./", link) for link in links), links


def test_tables_and_figures_are_accessible(page):
    assert all(attributes.get("scope") in ("row", "col") for attributes in page.all("th"))
    assert len(page.all("table")) == len(page.all("caption"))
    ids = page.with_attribute("id")
    assert len(ids) == len(set(ids))
    for drawing in page.all("svg"):
        assert drawing["role"] == "img"
        assert set(drawing["aria-labelledby"].split()) <= set(ids)
    assert page.all("html") == [{"lang": "en"}]


def without_runs(made):
    made.write()


def dropped_only(made):
    made.drop("rule", "no", parallelism="tp3")


def failures_only(made):
    for number in range(2):
        begin(run := made.run(f"f{number}", seed=number))
        end(run, "oom", cause="no memory", metrics={})


def one_run(made):
    begin(run := made.run("one"))
    train(run, losses=losses(5))
    end(run)


def odd_runs(made):
    """Without a measured step, with steps that updated nothing, with figures that are none or 0, and with no config."""
    begin(run := made.run("short"))
    end(run, metrics={**dict.fromkeys(summary(1.0, 1.0)), "measured_steps": 0})
    for name, skipped in (("some", 2), ("one", 1), ("none", 0)):
        begin(run := made.run(name, seed=1 + skipped))
        end(run, metrics={**summary(1.0, 1.0), "skipped_steps": skipped})
    begin(run := made.run("nan", seed=4))
    train(run, losses=[5.0, float("nan"), float("inf")])
    end(run, "nan", metrics={"loss_metrics/global_avg_loss": None})
    begin(run := made.run("zero", seed=5))
    train(run, losses=[0.0])
    end(run, metrics=summary(1e-300, 0.0))
    (made.run("broken", seed=6).path / "config.yaml").write_text("{")
    made.run("waits", seed=7)


@pytest.mark.parametrize(
    ("fill", "words"),
    [
        (without_runs, []),
        (dropped_only, ["1 point came to no run"]),
        (failures_only, ["2 runs: 2 oom"]),
        (
            odd_runs,
            [
                "without a step after the warm-up",
                "3 steps of 2 runs updated nothing, since their gradients were not finite.",
                "the loss or the gradient is not a finite number",
                "1 run folder cannot be read",
            ],
        ),
    ],
)
def test_sweeps_of_which_little_is_known(made, fill, words):
    fill(made)
    page = written(made)
    shown = " ".join(page.words.values())
    assert all(each in shown for each in words)
    assert len(page.all("section")) == 11


def test_runs_that_belong_to_no_sweep_and_a_page_elsewhere(made, tmp_path):
    one_run(made)
    for name in ("sweep.json", "points.jsonl"):
        (made.folder.path / name).unlink()
    into = tmp_path / "elsewhere" / "my report.html"
    write_report(made.folder, SweepTable(made.folder).rows(), into=into)
    page = Page(into.read_text())
    assert "Only single" in page.words["header"]
    assert "titanlab sweep" not in page.words["provenance"]
    links = {attributes["href"] for attributes in page.all("a") if not attributes["href"].startswith("#")}
    assert links
    assert all((into.parent / link / "config.yaml").is_file() for link in links)


def test_what_rows_and_files_add(made):
    """Estimates, the measured parts of a step, and loads of experts; each has its section."""
    mixed(made)
    rows = SweepTable(made.folder).rows()
    run = made.folder.run(next(row["run"] for row in rows if row["name"] == "fsdp"))
    with run.open_metrics(1) as metrics:
        metrics.write(
            "breakdown", 8, {"breakdown/step(s)": 0.3, "breakdown/forward(s)": 0.1, "breakdown/exposed_shard(s)": 0.2}
        )
        metrics.write("experts", 8, {"steps": 2, "counts": [[40, 0, 0, 0]]})
    for row in rows:
        row["estimate.step_seconds"] = row["step_seconds"]
        row["estimate.memory_gib"] = 0.5
    page = written(made, rows=rows)
    assert "time of a step: 10 of 10 runs within 20 %" in page.words["estimate"]
    assert "estimate.memory_gib" in page.words["pareto"]
    # The picture of a map is in the page, and names its run.
    start = page.text.index("<image", page.text.index('id="experts"'))
    picture = page.text[start : page.text.index(">", start)]
    assert 'href="data:image/png;base64' in picture
    assert f'data-run="{run.path.name}"' in picture
    assert "exposed: shard 67 %" in page.words["step-time"]
    assert "breakdown/exposed_shard(s) breakdown/forward(s)" in {
        " ".join(sorted(c.split())) for c in page.with_attribute("data-column")
    }


def test_the_rows_need_not_be_of_the_right_types(made):
    one_run(made)
    rows = SweepTable(made.folder).rows()
    for row in rows:
        row.update(
            {"tokens_per_second": "fast", "memory_gib": float("nan"), "loss": {}, "mfu_percent": True, "cause": 3}
        )
    # Files may change while they are read.
    shutil.rmtree(next(iter(made.folder.runs())).path)
    page = written(made, rows=rows)
    assert page.words["throughput"]
    assert page.words["provenance"]


def test_figures_for_papers(shared, tmp_path):
    made, figures = shared, sweep_figures(shared.folder.path)
    assert list(figures) == ["scaling", "pareto", "throughput", "memory", "loss", "timeline"]
    into, folder = tmp_path / "report.html", tmp_path / "figures"
    report = write_report(made.folder, SweepTable(made.folder).rows(), into=into, figures=folder, format="svg")
    assert report.figures == [folder / f"{name}.svg" for name in figures]
    assert {path.name for path in folder.iterdir()} == {path.name for path in report.figures}
    assert report.sentence in into.read_text().replace("&gt;", ">")
    # A title is in the file, which stands alone, and not in the page, which has a heading.
    assert "memory against tokens per second" in figures["pareto"].axes[0].get_title(loc="left")


def test_without_matplotlib_there_is_one_line(made, tmp_path, monkeypatch):
    made.write()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib, which is not installed; pip install 'titanlab\[plots\]'"):
        write_report(made.folder, [], into=tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.full
def test_a_thousand_runs_in_ten_seconds_and_five_megabytes(tmp_path):
    sweep = many(tmp_path / "runs", 1000).folder
    write_report(SweepFolder(sweep.path), [], into=tmp_path / "empty.html")  # what is imported once
    begin = time.process_time()
    into = tmp_path / "report.html"
    write_report(SweepFolder(sweep.path), SweepTable(sweep).rows(), into=into)
    assert time.process_time() - begin < 10
    assert into.stat().st_size < 5_000_000
