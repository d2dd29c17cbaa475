"""The proofs of a sweep are kept with it, the newest of every run."""

import json
import re
import threading

import pytest

from titanlab.errors import ConfigError
from titanlab.prove import ProofRow, proof, read_parity, write_parity

ROW = ProofRow(
    run="a-12345678", layout="dp_s2", precision="fp32", passed=True, loss=1e-7, gradient=(2e-7, "w"), tolerance=1e-5
)


def mapping(run, **changes):
    return {**ROW.to_mapping(), "run": run, **changes}


def test_rows_are_written_and_read(tmp_path):
    sweep = tmp_path / "runs" / "layouts"
    assert read_parity(tmp_path) is None
    assert write_parity(sweep, [mapping("a")], reference="one process") == sweep / "parity.json"
    content = json.loads((sweep / "parity.json").read_text())
    assert content.keys() == {"schema", "time", "reference", "rows"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", content["time"])
    (row,) = content["rows"]
    assert row == {
        "run": "a",
        "layout": "dp_s2",
        "precision": "fp32",
        "passed": True,
        "reason": "",
        "loss": 1e-7,
        "grad_norm": None,
        "gradient": [2e-7, "w"],
        "parameter": None,
        "tolerance": 1e-5,
    }
    assert read_parity(sweep) == content


def test_rows_of_runs_that_were_proved_again_replace_the_earlier_ones(tmp_path):
    write_parity(tmp_path, [mapping("a"), mapping("a", precision="bf16"), mapping("b")], reference="x")
    write_parity(tmp_path, [mapping("a", passed=False), mapping("c")], reference="x")
    rows = read_parity(tmp_path)["rows"]
    assert [(row["run"], row["precision"], row["passed"]) for row in rows] == [
        ("b", "fp32", True),
        ("a", "fp32", False),
        ("c", "fp32", True),
    ]


def test_two_commands_that_write_at_once_lose_no_rows(tmp_path, monkeypatch):
    write_parity(tmp_path, [], reference="x")
    threads = []
    write = proof.write_json

    def slowly(path, value):
        if not threads:
            threads.append(
                threading.Thread(target=write_parity, args=(tmp_path, [mapping("b")]), kwargs={"reference": "x"})
            )
            threads[0].start()
            threads[0].join(0.1)
        write(path, value)

    monkeypatch.setattr(proof, "write_json", slowly)
    write_parity(tmp_path, [mapping("a")], reference="x")
    threads[0].join()
    assert [row["run"] for row in read_parity(tmp_path)["rows"]] == ["a", "b"]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    write_parity(tmp_path, [mapping("a", loss=float("inf"), gradient=(float("nan"), "w"))], reference="x")
    (row,) = read_parity(tmp_path)["rows"]
    assert (row["loss"], row["gradient"]) == (None, [None, "w"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "is no JSON"), ('{"schema": 2, "rows": []}', "reads schema 1"), ('{"rows": [1]}', "must be a list of rows")],
)
def test_a_damaged_file_is_left_as_it_is(tmp_path, text, complaint):
    (tmp_path / "parity.json").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        write_parity(tmp_path, [mapping("a")], reference="x")
    assert (tmp_path / "parity.json").read_text() == text
