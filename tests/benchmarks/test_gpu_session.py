"""The session on a GPU, without one: its rows, its record, its limits, its sums and its page."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.benchmarks.scripts import BENCHMARKS, part
from tests.launch.command import alive
from tests.torch_names import lacking, read, reviewed, stale, unknown
from tests.until import until

SESSION = BENCHMARKS / "gpu_session"
NAMES = "bound children facts held measure prediction products rates record rows sizes table watch __main__".split()
bound, children, facts, held, measure, prediction, products, rates, record, rows, sizes, table, watch, main = (
    part("gpu_session", name) for name in NAMES
)

H100 = prediction.Facts("NVIDIA H100 80GB HBM3", "2.11.0+cu130", 85_520_000_000, (9, 0), {"torchao": "0.18"})
H200 = dataclasses.replace(H100, device="NVIDIA H200", memory_bytes=150_754_000_000)
CPU = prediction.Facts(
    "cpu", "2.13.0+cpu", packages={"torchao": "0.18", "pytest": "9", "hypothesis": "6", "xdist": "3"}
)
# What the session takes from torch beside the package, as in tests/torch_names.txt.
TORCH_NAMES = """
torch._scaled_mm 2.11 scale_a scale_b out_dtype use_fast_accum
torch.autograd.DeviceType 2.11
torch.autograd.DeviceType.CUDA 2.11
torch.autograd.grad 2.11 retain_graph
torch.cuda.get_device_name 2.11
torch.cuda.max_memory_allocated 2.11
torch.cuda.mem_get_info 2.11
torch.profiler.profile 2.11 profile_memory activities acc_events
torch.randint 2.11 device
torch.randn 2.11 device dtype
torch.randn_like 2.11
"""


def row_of(name, of=sizes.REHEARSAL):
    (found,) = [row for row in rows.rows(of) if row.name == name]
    return found


def composed(row, where=H200):
    return prediction.composed(row.keys, where)


@pytest.mark.full
@pytest.mark.parametrize("where", [H100, H200], ids=["H100", "H200"])
def test_every_recipe_is_one_that_the_gpu_can_run(where):
    fitted = sizes.GPU.fitted(where)
    for row in rows.rows(fitted):
        if not row.keys or set(rows.PACKAGES.values()) & set(row.needs):
            continue
        recipe = composed(row, where)
        said = prediction.predicted(recipe)
        assert said["reserved_bytes"] < 0.9 * where.memory_bytes, row.name
        assert said["step_seconds"] > 0
        dim, vocabulary = recipe.model.dim, recipe.model.vocab_size
        assert (dim, recipe.model.ffn_dim, recipe.training.seq_len) == (4096, 14336, 8192)
        assert vocabulary == recipe.data.vocab_size == (4096 if row.piece == "saves" else 128256)
        if row.kind == "run":
            sequences = 16 if row.piece == "sixteen" else 4
            assert (recipe.microbatch, recipe.microbatches) == (1, sequences), row.name
            assert ("output" in recipe.precision.products(recipe.model.account())) == row.name.endswith("_head")


@pytest.mark.parametrize("name", ["ladder/eager", "ladder/fused", "float8/rowwise_with_gw_hp_head", "sixteen/bf16"])
@pytest.mark.parametrize("of", [sizes.GPU, sizes.REHEARSAL], ids=["gpu", "rehearsal"])
def test_products_are_all_the_flops_of_a_step(name, of):
    """6·(N − N_emb) a token, whatever is fused, cut in chunks or in another format; norms do not multiply."""
    recipe = composed(row_of(name, of), H200 if of is sizes.GPU else CPU)
    account = recipe.model.account()
    norms = sum(shape[0] for shape in account.parameters.values() if len(shape) == 1)
    found = products.products_of(recipe)
    assert sum(product.flops * count for product, count in found.items()) == (
        6 * (account.active_count - account.embedding_count - norms) * recipe.tokens_per_step
    )
    doubled = products.products_of(recipe, layers=2 * recipe.model.layers)
    head = {product for product in found if product.columns == recipe.model.vocab_size}
    assert head
    assert all(doubled[each] == count * (1 if each in head else 2) for each, count in found.items())
    formats = {product.format for product in found}
    float8 = "float8_rowwise" in formats
    assert formats == ({"float8_rowwise", "bfloat16"} if float8 else {"bfloat16"})
    assert float8 == name.startswith("float8")
    if float8:
        # The gradients of weights are those that stay in bf16.
        assert {product.kind for product in found if product.format == "bfloat16"} == {"weights"}


# Starts another process as titanlab starts ranks, in a session of its own, and waits.
STARTS_ANOTHER = """
import subprocess, sys, time
print("begun", flush=True)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
open("pid", "w").write(str(other.pid))
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


@pytest.mark.parametrize(("seconds", "limit"), [(300, 4), (0, 60)], ids=["late", "ended"])
def test_nothing_outlives_a_row(tmp_path, seconds, limit):
    command = [sys.executable, "-S", "-c", STARTS_ANOTHER, str(seconds)]
    ended = children.run(command, folder=tmp_path, limit=limit)
    assert ended.code == (None if seconds else 3)
    assert ended.seconds < 30
    assert ended.last_line == "begun"
    # The process that it has started was killed, and dies when it gets a core.
    until(lambda: not alive(int((tmp_path / "pid").read_text())), 10)


def test_what_a_killed_session_has_left_is_ended():
    sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
    gone = subprocess.Popen(["true"])
    gone.wait()
    orphan, own = (
        subprocess.Popen(sleeps, env={"TITANLAB_GPU_SESSION_ROW": f"{pid}.a.b"}) for pid in (gone.pid, os.getpid())
    )
    try:
        assert children.end_orphans() == 1
        assert orphan.wait(20) == -9
        assert own.poll() is None
    finally:
        own.kill()
        own.wait()
        orphan.kill()
        orphan.wait()


def test_a_failure_is_data(tmp_path):
    row = row_of("ladder/eager")
    wrong = dataclasses.replace(row, keys=(*row.keys, "training.seq_len=0"))
    found = measure.measured(wrong, sizes.REHEARSAL, CPU, limit=60, folder=tmp_path)
    assert found["status"] == "failed"
    assert found["reason"].startswith("refused before its start: training.seq_len=0: must be at least 1")
    # What cannot be read is the row's fault, and not the session's.
    broken = dataclasses.replace(row, kind="no such kind")
    found = measure.measured(broken, sizes.REHEARSAL, CPU, limit=60, folder=tmp_path)
    assert (found["status"], found["reason"]) == ("failed", "KeyError: 'no such kind'")
    absent = row_of("ladder/cuda_graphs")
    found = measure.measured(absent, sizes.REHEARSAL, CPU, limit=60, folder=tmp_path)
    assert (found["status"], found["reason"]) == ("absent", "not on a CPU")


@pytest.mark.full
def test_names_of_torch_are_those_of_the_oldest_torch():
    """The floor of the package, for code that only runs on GPUs."""
    own = reviewed(TORCH_NAMES)
    of_package = reviewed((Path(__file__).parents[1] / "torch_names.txt").read_text())
    both = {name: own.get(name, entry) for name, entry in {**own, **of_package}.items()}
    readers = {path.name: read(path.read_text()) for path in SESSION.glob("*.py")}
    found = [
        f"{name}:{use.line}: {what}"
        for name, reader in readers.items()
        for use in reader.uses
        if (what := unknown(use, both)) and not what.endswith(".SDPAParams.key")
    ]
    assert not found
    assert not list(stale(own, readers.values()))
    assert not list(filter(None, (lacking(name, entry) for name, entry in own.items())))


FIRST, SECOND, THIRD = (row_of(f"ladder/{name}") for name in ("eager", "fused", "chunked"))


def said(row, status="measured", **more):
    return {"row": row.name, "kind": row.kind, "keys": list(row.keys), "status": status, "figures": {}, **more}


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


def test_mistakes_are_one_line(called, tmp_path, capsys):
    for given, said in (
        (["--only", "nothing"], "--only nothing: fits no row"),
        (["--list", "--only", "sixteen"], "3 rows, 180 s expected: 3.0 minutes"),
    ):
        code = main.main(given)
        assert code == (0 if "--list" in given else 2)
        assert said in capsys.readouterr().out
    for given in (["--at-once", "2"], ["--from", "/nowhere/at/all"]):
        with pytest.raises(SystemExit) as ended:
            main.main(given)
        assert ended.value.code == 2
        assert given[0] in capsys.readouterr().err
    (tmp_path / "out").write_text("a file in the place of the folder")
    code, ran, out = called("--only", "ladder/eager")
    assert (code, ran, out.count("\n")) == (2, [], 1)
    assert out.startswith("gpu_session: [Errno 17] File exists: ")
