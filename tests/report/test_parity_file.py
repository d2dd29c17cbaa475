"""parity.json as a section of a report."""

import json

import pytest

from tests.report.plain import facts_of
from tests.report.test_sections import PANELS
from titanlab.report.facts import answer_of
from titanlab.report.sections import sections_of


def section_of(folder):
    facts = facts_of(folder=folder)
    found = {section.id: section for section in sections_of(facts, answer_of(facts, by="tps"), PANELS)}
    return found.get("parity")


def row_of(folder):
    (table,) = section_of(folder).tables
    (row,) = table.rows
    return dict(zip(table.headings, (cell.text for cell in row), strict=True))


def written(folder, *rows, **given):
    value = {"schema": 1, "time": "2026-11-24 20:00", "reference": "single in fp32", "rows": list(rows), **given}
    (folder / "parity.json").write_text(json.dumps(value))
    return folder


def test_without_a_file_there_is_none(tmp_path):
    assert section_of(tmp_path) is None
    assert section_of(tmp_path / "nowhere") is None


def test_a_file_without_rows_is_one_without_comparisons(tmp_path):
    assert section_of(written(tmp_path)).texts == [
        "0 comparisons with single in fp32, 2026-11-24 20:00: all within their tolerances."
    ]


def test_a_row_is_words(tmp_path):
    row = {
        "run": "fsdp-1",
        "layout": "dp_s2",
        "precision": "fp32",
        "loss": 1.234e-7,
        "grad_norm": 0,
        "gradient": [1e-6, "layers.0.wq"],
        "parameter": [2e-6, None],
        "tolerance": {"loss": 1e-5, "parameter": 2},
        "passed": True,
        "reason": "",
    }
    assert row_of(written(tmp_path, row)) == {
        "run": "fsdp-1",
        "layout": "dp_s2",
        "precision": "fp32",
        "verdict": "PASS",
        "loss": "1.2e-07",
        "gradient norm": "0",
        "gradient": "1e-06 (layers.0.wq)",
        "parameter": "2e-06",
        "tolerance": "loss 1e-05, parameter 2",
        "reason": "",
    }


@pytest.mark.parametrize(
    ("given", "column", "text"),
    [
        ({}, "verdict", "unknown"),
        ({"passed": False}, "verdict", "FAIL"),
        ({"passed": "yes"}, "verdict", "unknown"),
        ({"passed": 1}, "verdict", "unknown"),
        ({"loss": None}, "loss", ""),
        ({"loss": "small"}, "loss", "small"),
        ({"loss": True}, "loss", "True"),
        ({"loss": float("nan")}, "loss", "nan"),
        ({"gradient": 0.5}, "gradient", "0.5"),
        ({"gradient": [1, 2, 3]}, "gradient", "[1, 2, 3]"),
        ({"gradient": []}, "gradient", "[]"),
        ({"tolerance": 1e-5}, "tolerance", "1e-05"),
        ({"tolerance": {}}, "tolerance", ""),
        ({"tolerance": {"a": []}}, "tolerance", "a []"),
        ({"layout": None, "reason": None}, "layout", ""),
        ({"reason": 3}, "reason", "3"),
    ],
)
def test_values_of_other_types_are_shown_as_they_are(tmp_path, given, column, text):
    assert row_of(written(tmp_path, {"run": "a", **given}))[column] == text


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 2}', '{"schema": 1}', "\xff"])
def test_a_damaged_file_is_a_note(tmp_path, text):
    (tmp_path / "parity.json").write_text(text)
    section = section_of(tmp_path)
    assert section.texts[0].startswith("parity.json cannot be read: ")
    assert section.tables == ()


@pytest.mark.parametrize("given", [{"rows": {}}, {"rows": [1]}, {"rows": [{"run": 1}]}, {"time": 3}, {"schema": "1"}])
def test_a_file_of_other_types_is_a_note(tmp_path, given):
    assert section_of(written(tmp_path, **given)).texts[0].startswith("parity.json cannot be read: ")
