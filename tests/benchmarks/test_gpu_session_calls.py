"""Calls of the session on a GPU that go on where others stopped: what counts, what runs again, what is one line."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.benchmarks.scripts import BENCHMARKS
from tests.benchmarks.test_gpu_session import (
    CPU,
    H100,
    H200,
    children,
    facts,
    main,
    measure,
    measured_rows,
    record,
    row_of,
    rows,
    sizes,
    table,
    watch,
)

FIRST, SECOND, THIRD = (row_of(f"ladder/{name}") for name in ("eager", "fused", "chunked"))


def opened(folder, code="c1", where=CPU):
    return record.Record(folder, where, code=code, commit=None)


def said(row, status="measured", **more):
    return {"row": row.name, "kind": row.kind, "keys": list(row.keys), "status": status, "figures": {}, **more}


def lines_of(folder):
    return (folder / record.FILE).read_text().splitlines()


def test_a_row_is_measured_when_its_package_is_there(tmp_path):
    row = row_of("float8/tensorwise")
    one = opened(tmp_path)
    one.keep(said(row, "absent", reason="torchao is not installed"))
    assert not opened(tmp_path).done(row)
    # As long as it is missing there is nothing to do, and nothing more to say.
    without = dataclasses.replace(CPU, packages={})
    assert opened(tmp_path, where=without).done(row)


def test_products_are_measured_again_with_a_package_that_they_lacked(tmp_path):
    row, bare = row_of("products/all"), dataclasses.replace(H100, packages={})
    without = measure.measured(dataclasses.replace(row, kind="none"), sizes.GPU, bare, limit=1, folder=tmp_path)
    opened(tmp_path, where=bare).keep({**without, "status": "measured"})
    assert opened(tmp_path, where=bare).done(row)
    assert not opened(tmp_path, where=H100).done(row)
    with_torchao = {"packages": {"torchao": "0.18"}}
    opened(tmp_path, where=H100).keep({**without, "status": "measured", **with_torchao})
    assert opened(tmp_path, where=H100).done(row)
    # Where a package is gone there is nothing to gain.
    assert opened(tmp_path, where=bare).done(row)
    newer = dataclasses.replace(H100, packages={"torchao": "0.19"})
    assert not opened(tmp_path, where=newer).done(row)


def test_rows_of_other_keys_are_not_shown(tmp_path):
    one = opened(tmp_path)
    one.keep(said(FIRST))
    assert [each["row"] for each in one.rows([FIRST])] == [FIRST.name]
    assert one.rows([dataclasses.replace(FIRST, keys=(*FIRST.keys, "seed=1"))]) == []


@pytest.mark.parametrize("status", ["cut", "absent"])
def test_a_row_without_figures_takes_the_place_of_none_that_was_measured(tmp_path, status):
    one = opened(tmp_path)
    one.keep(said(FIRST))
    one.keep(said(FIRST, status, reason="x"))
    assert one.rows([FIRST])[0]["status"] == "measured"
    assert len(lines_of(tmp_path)) == 1
    # Of other keys it says more than nothing; and so it does of a row that failed.
    other = dataclasses.replace(FIRST, keys=(*FIRST.keys, "seed=1"))
    one.keep(said(other, status, reason="x"))
    assert one.rows([other])[0]["status"] == status
    one.keep(said(SECOND, "failed", reason="x"))
    one.keep(said(SECOND, status, reason="x"))
    assert not opened(tmp_path).done(SECOND)


def test_only_newer_rows_of_another_folder_count_and_only_once(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    carried = opened(there)
    carried.keep(said(FIRST, ended=100.0, figures={"x": 1}))
    carried.keep(said(SECOND, ended=100.0))
    carried.keep(said(SECOND, "failed", reason="x", ended=200.0))
    carried.keep(said(THIRD, "cut", reason="x", ended=300.0))
    opened(there, code="c2").keep(said(row_of("ladder/compiled"), ended=100.0))
    own = opened(here)
    own.keep(said(FIRST, ended=150.0, figures={"x": 2}))
    own.keep(said(THIRD, ended=250.0))
    line = f"--from {there}: 3 of 4 rows count; the others are of another code, device or torch"
    for _ in range(2):
        again = opened(here)
        assert again.take(there) == line
        assert again.rows([FIRST])[0]["figures"] == {"x": 2}
        assert [each["status"] for each in again.rows([SECOND, THIRD])] == ["failed", "measured"]
        assert len(lines_of(here)) == 3
    # What was measured there is worth more than what was cut here later.
    last = opened(here)
    last.keep(said(row_of("sixteen/bf16"), "cut", reason="x", ended=900.0))
    carried.keep(said(row_of("sixteen/bf16"), ended=400.0))
    last.take(there / record.FILE)
    assert last.done(row_of("sixteen/bf16"))
    assert opened(here).done(row_of("sixteen/bf16"))
    assert opened(here, where=H100).take(there).startswith(f"--from {there}: 0 of 5 rows count; the others")
    assert opened(here).take(tmp_path) == f"--from {tmp_path}: there is no gpu_session.jsonl in it"


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    one = opened(tmp_path)
    one.keep(said(FIRST))
    whole = json.loads(lines_of(tmp_path)[0])
    torn = [{key: value for key, value in whole.items() if key != name} for name in ("row", "status", "keys")]
    wrong = [{**whole, name: 1} for name in ("row", "status", "keys")]
    with (tmp_path / record.FILE).open("ab") as file:
        for line in (1, None, "text", [], *torn, *wrong):
            file.write(json.dumps(line).encode() + b"\n")
        file.write(b'{"row": "\xff\n')
    assert opened(tmp_path).done(FIRST)
    assert opened(tmp_path / "b").take(tmp_path) == f"--from {tmp_path}: 1 of 1 rows count"


@pytest.mark.parametrize(
    "path",
    ["titanlab/a.py", "titanlab/b/peaks.json", "conf/a/b.yaml", "benchmarks/gpu_session/rows.py", "tests/test_gpu.py"],
)
def test_the_code_is_all_that_makes_figures(tmp_path, monkeypatch, path):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    before = record.code()
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("1")
    first = record.code()
    (tmp_path / path).write_text("2")
    assert len({before, first, record.code()}) == 3


@pytest.fixture
def called(monkeypatch, tmp_path, capsys):
    """A call of a rehearsal whose rows end as told, by a clock that each of them sets on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    clock = [0.0]
    monkeypatch.setattr(main, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def call(*arguments, ends=None, seconds=10.0, import_seconds=0.0, where=CPU):
        ran = []

        def found():
            clock[0] += import_seconds
            return where

        def measured(row, sizes, facts, *, limit, folder):
            ran.append(row.name)
            clock[0] += seconds
            status = (ends or {}).get(row.name, "measured")
            more = {} if status == "measured" else {"reason": "planned"}
            return said(row, status, **more)

        monkeypatch.setattr(measure, "facts_of_this_machine", found)
        monkeypatch.setattr(measure, "measured", measured)
        code = main.main(["--rehearse", "--out", str(tmp_path / "out"), *arguments])
        return code, ran, capsys.readouterr().out

    return call


def test_the_end_of_a_call_counts_from_its_first_line(called):
    """The import of torch is a part of it."""
    code, ran, out = called("--only", "ladder/eager", "--seconds", "520", import_seconds=495.0)
    assert (code, ran) == (1, [])
    assert "left for the next call: 1 rows, 22 s expected: ladder/eager" in out
    assert called("--only", "ladder/eager", "--seconds", "520", import_seconds=400.0)[:2] == (0, ["ladder/eager"])


def test_again_runs_the_rows_that_failed_or_were_late(called):
    names = ["ladder/eager", "ladder/compiled", "ladder/fused", "ladder/chunked"]
    ends = {"ladder/compiled": "failed", "ladder/fused": "late"}
    only = ("--only", ",".join(names), "--seconds")
    assert called(*only, "900", ends=ends)[:2] == (0, names)
    assert called(*only, "900", ends=ends)[:2] == (0, [])
    # One fits into a call. Each call goes on with the one that has waited longest.
    calls = [called(*only, "460", "--again", ends=ends, seconds=430.0)[:2] for _ in range(3)]
    assert calls == [(1, [names[1]]), (1, [names[2]]), (1, [names[1]])]
    assert called(*only, "900", "--again")[:2] == (0, [names[2], names[1]])
    assert called(*only, "900", "--again")[:2] == (0, [])


def test_rows_that_have_not_run_come_before_those_that_failed(called):
    ends = {"ladder/eager": "failed"}
    assert called("--only", "ladder/eager", ends=ends)[:2] == (0, ["ladder/eager"])
    wanted = ("--only", "ladder/eager,ladder/fused", "--again")
    assert called(*wanted)[1] == ["ladder/fused", "ladder/eager"]


def test_faults_are_one_line_and_another_code_than_rows_that_are_left(called, tmp_path):
    (tmp_path / "out").write_text("a file in the place of the folder")
    code, ran, out = called("--only", "ladder/eager")
    assert (code, ran) == (2, [])
    assert out.count("\n") == 1
    assert out.startswith("gpu_session: [Errno 17] File exists: ")


@pytest.mark.parametrize(
    ("ended", "line"),
    [
        (
            children.Ended(1, "Traceback\nOSError: libcudart.so.13: cannot open", 1.0),
            "OSError: libcudart.so.13: cannot",
        ),
        (children.Ended(0, "no facts", 1.0), "no facts"),
        (children.Ended(None, "", 1.0), "within 120 s"),
    ],
    ids=["broken", "other output", "late"],
)
def test_a_torch_that_does_not_start_is_one_line(monkeypatch, capsys, ended, line):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    monkeypatch.setattr(children, "run", lambda *_, **__: ended)
    assert main.main(["--rehearse", "--only", "ladder/eager"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("gpu_session: torch does not start")
    assert line in out
    assert out.count("\n") == 1


def test_a_wheel_that_cannot_be_installed_is_one_line(tmp_path):
    (tmp_path / "broken-1-py3-none-any.whl").write_text("not a wheel")
    environment = {**os.environ, "PYTHON": sys.executable, "WHEELS": str(tmp_path), "TMPDIR": str(tmp_path)}
    command = [str(BENCHMARKS / "gpu_session.sh"), "--list"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.startswith(f"gpu_session: the wheels in {tmp_path} cannot be installed: ")
    assert done.stdout.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["broken-1-py3-none-any.whl"]


def test_the_list_says_which_packages_are_missing(monkeypatch, capsys):
    installed = {**dict.fromkeys(facts.NEEDED, "1"), "torchao": None, "pytest": "9", "hypothesis": "6", "xdist": "3"}
    monkeypatch.setattr(main, "packages", lambda: installed)
    assert main.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    missing = {line.split()[0] for line in lines if line.endswith("(torchao is not installed)")}
    assert missing == {row.name for row in rows.rows(sizes.GPU) if "torchao" in row.needs}
    for kernel, package in rows.PACKAGES.items():
        (line,) = (line for line in lines if line.startswith(f"ladder/{kernel} "))
        assert line.endswith(f"({package} is not installed)")
    assert sum(line.endswith("is not installed)") for line in lines) == len(missing) + 2


@pytest.mark.parametrize(("failed", "status"), [({}, "measured"), ({"a": "x", "b": "y"}, "failed")])
def test_products_of_which_some_fail_have_failed(monkeypatch, tmp_path, failed, status):
    figures = {"rates": {"c": {}}, "attention": {}, "memory": {"copy": {}}, "failed": failed}
    monkeypatch.setattr(measure, "_child", lambda *_: (children.Ended(0, "", 1.0), figures))
    found = measure.measured(row_of("products/all"), sizes.REHEARSAL, CPU, limit=60, folder=tmp_path)
    assert (found["status"], found["figures"]) == (status, figures)
    assert found.get("reason") == ("2 of 4 figures failed" if failed else None)


def test_packages_of_attention_are_measured_where_they_can_be(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        measure, "_child", lambda _, given, *__: (asked.append(given), children.Ended(0, "", 1), {})[1:]
    )
    monkeypatch.setattr(measure, "rows", lambda _: [row_of(f"ladder/{name}", sizes.GPU) for name in rows.PACKAGES])
    both = dataclasses.replace(H100, packages={"flash_attn": "2.8", "flash_attn_interface": "3.0"})
    for where in (both, dataclasses.replace(both, capability=(8, 0)), H100):
        measure.measured(row_of("products/all"), sizes.GPU, where, limit=60, folder=tmp_path)
    torch_has = ["auto", "flash", "cudnn", "efficient"]
    assert [given["kernels"] for given in asked] == [
        [*torch_has, "flash_attn", "flash3"],
        [*torch_has, "flash_attn"],
        torch_has,
    ]
    row = row_of("ladder/flash3", sizes.GPU)
    assert row.lacking(both) is None
    assert row.lacking(H100) == "flash_attn_interface is not installed"
    assert row.lacking(dataclasses.replace(both, capability=(8, 0))) == "only on Hopper (compute capability 9.0)"
    assert row.lacking(CPU) == "not on a CPU"


def test_only_whole_rows_of_as_many_sequences_are_compared():
    order, found = measured_rows(sizes.GPU, H200)

    def aims(changes):
        changed = []
        for each in found:
            change = changes.get(each["row"], {})
            changed.append({**each, **change, "figures": {**each.get("figures", {}), **change.get("figures", {})}})
        return table.page(order, changed, H200, sizes.GPU)

    # A run that failed early, or was late, may have been the fastest by then.
    fast = {"figures": {"tokens_per_second": 90_000.0, "mfu_percent": 180.0}, "reason": "nan: step 5"}
    for status in ("failed", "late", "cut"):
        text = aims({"ladder/fused": {"status": status, **fast}, "float8/rowwise": {"status": status, **fast}})
        assert "best is 62.0 %, `sixteen/bf16`: 6.0 points missing" in text
        assert "best is 1.39 ×, `sixteen/rowwise_head` over `sixteen/bf16`: reached" in text
    # 43,000 of 16 sequences stand over nothing; 20,000 over 20,000 of four are left.
    text = aims({"sixteen/bf16": {"status": "failed", "reason": "x"}})
    assert "best is 1.00 ×, `float8/tensorwise` over `ladder/eager`" in text
    assert "`sixteen/rowwise_head` over" not in text
    gone = {row.name: {"status": "failed", "reason": "x"} for row in order if row.piece == "ladder"}
    text = aims({**gone, "sixteen/bf16": {"status": "failed", "reason": "x"}})
    assert "no row in float8 was measured beside one in bf16 with as many sequences" in text


def without_numbers(value):
    """As a row comes back from JSON if nothing of it was finite."""
    if isinstance(value, dict):
        return {key: without_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_numbers(each) for each in value]
    return None if isinstance(value, float) else value


@pytest.mark.parametrize("piece", ["products", "ladder", "float8", "sixteen", "memory", "saves", "kernels"])
def test_figures_that_are_no_numbers_leave_a_page(piece):
    order, found = measured_rows(sizes.GPU, H200)
    found = [without_numbers(each) if each["row"].startswith(f"{piece}/") else each for each in found]
    assert "## Kernels of a step" in table.page(order, found, H200, sizes.GPU)


def test_the_gpu_that_is_watched_is_the_one_that_rows_use(monkeypatch, tmp_path, called):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\necho "1755, 690.25, 60, 100"\n')
    program.chmod(0o755)
    with watch.Watch("GPU-1-2") as watching:
        watching._process.wait(20)
    assert (tmp_path / "asked").read_text().endswith(" -i GPU-1-2\n")
    two = dataclasses.replace(CPU, gpus=2)
    assert "\nuses GPU 0 of 2\n" in called("--only", "ladder/eager", where=two)[2]
    assert "uses GPU" not in called("--only", "ladder/eager", where=dataclasses.replace(CPU, gpus=1))[2]


def test_a_folder_of_any_name_is_the_folder_of_runs(monkeypatch, tmp_path):
    """As TMPDIR may be called."""
    parser = pytest.importorskip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    commands = []
    monkeypatch.setattr(children, "run", lambda command, **_: commands.append(command) or children.Ended(1, "", 1.0))
    for name in ("plain", "a,b", "k=[v]", "{it's}", "a b", "back\\", "\\'quoted\\\\'"):
        folder = tmp_path / name
        measure.measured(row_of("ladder/eager"), sizes.REHEARSAL, CPU, limit=60, folder=folder)
        (runs,) = (parser.parse_override(each) for each in commands.pop() if each.startswith("runs="))
        assert Path(str(runs.value())) == folder / "runs"


def test_an_end_from_outside_removes_the_folders_of_rows(monkeypatch):
    ended = []
    monkeypatch.setattr(main.os, "_exit", ended.append)
    with children.folder_of_its_own() as folder:
        (folder / "log.txt").write_text("x")
        main._ended(15, None)
        assert not folder.exists()
    assert ended == [143]
    with children.folder_of_its_own() as folder:
        assert folder.is_dir()
    assert not folder.exists()


def test_rows_are_no_ranks_of_the_caller(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("OTHER", "7")
    command = [sys.executable, "-S", "-c", "import os; print(sorted(key for key, v in os.environ.items() if v == '7'))"]
    assert children.run(command, folder=tmp_path, limit=60).last_line == "['OTHER']"
