"""The session on a GPU, without one: its rows, its record, its limits, its sums and its page."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.scripts import BENCHMARKS, part
from tests.launch.command import alive
from tests.torch_names import lacking, read, reviewed, stale, unknown
from tests.until import until
from titanlab.costs import training_flops_per_token

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


def test_the_memory_decides_the_layers():
    assert sizes.GPU.fitted(H100).layers == 6
    assert sizes.GPU.fitted(H200).layers == sizes.MOST_LAYERS == 8
    # A rehearsal's sizes stay, and where nothing is known of the device there are few layers.
    assert sizes.REHEARSAL.fitted(CPU) == sizes.REHEARSAL
    small = dataclasses.replace(H200, memory_bytes=24_000_000_000)
    assert sizes.GPU.fitted(small).layers == sizes.LEAST_LAYERS
    nothing = prediction.predicted(
        composed(row_of("ladder/eager", sizes.GPU), dataclasses.replace(H200, device="GPU 1"))
    )
    assert nothing["reason"].startswith("cluster.device=GPU 1: nothing is known of its speed")


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


def test_what_a_session_has_and_how_long_it_takes():
    all_rows = rows.rows(sizes.GPU)
    names = [row.name for row in all_rows]
    assert len(set(names)) == len(names)
    assert sum(row.expected for row in all_rows) <= 1500
    # Every row fits into one call, also at its limit.
    assert max(row.limit for row in all_rows) < 500
    assert all(row.expected < row.limit for row in all_rows)
    # What says most comes first.
    pieces = list(dict.fromkeys(row.piece for row in all_rows))
    assert pieces[:3] == ["products", "ladder", "float8"]
    # A rehearsal has the same rows, and says of those that no CPU can have why.
    assert [row.name for row in rows.rows(sizes.REHEARSAL)] == names
    absent = {row.name: row.lacking(CPU) for row in rows.rows(sizes.REHEARSAL) if row.lacking(CPU)}
    never = ("ladder/flash", "ladder/flash_attn", "ladder/flash3", "ladder/cuda_graphs", "saves/async_pinned")
    assert absent == dict.fromkeys(never, "not on a CPU")
    assert row_of("ladder/flash_attn").lacking(H100) == "flash_attn is not installed"
    assert row_of("tests/gpu").lacking(H100) == "pytest is not installed"


def test_rows_are_chosen_by_piece_and_pattern():
    all_rows = rows.rows(sizes.GPU)
    chosen = rows.chosen(all_rows, ["saves", "float8/*_head"])
    assert {row.piece for row in chosen} == {"saves", "float8"}
    assert len(chosen) == 4 + 3
    assert rows.chosen(all_rows, []) == all_rows
    with pytest.raises(ValueError, match="--only sves: fits no row; pieces are products, ladder"):
        rows.chosen(all_rows, ["sves"])


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


def test_a_bound_is_the_time_of_the_products_and_of_attention():
    recipe = composed(row_of("ladder/chunked", sizes.GPU))
    found = products.products_of(recipe)
    told = {str(product): {"seconds": product.flops / 500e12} for product in found}
    kernel = {"forward": {"seconds": 1e-3}, "backward": {"seconds": 3e-3}}
    measured = {"rates": told, "attention": {"auto": kernel}}
    peak = prediction.peak_of(recipe, H200)
    assert peak == 989e12
    bounded = bound.bound_of(recipe, measured, peak=peak)
    total = sum(product.flops * count for product, count in found.items())
    assert bounded.products == pytest.approx(total / 500e12)
    assert bounded.attention == pytest.approx(4e-3 * 4 * recipe.model.layers)
    per_token = training_flops_per_token(recipe.model.account(), seq_len=8192)
    assert bounded.mfu_percent == pytest.approx(100 * per_token * 4 * 8192 / bounded.seconds / 989e12)
    whole = bound.bound_of(recipe, measured, peak=peak, layers=32)
    assert whole.attention == pytest.approx(4 * bounded.attention)
    # A product that gave an error leaves no bound, and neither does a kernel.
    missing = dict(list(told.items())[1:])
    assert bound.bound_of(recipe, {**measured, "rates": missing}, peak=peak) is None
    assert bound.bound_of(recipe, {**measured, "attention": {}}, peak=peak) is None
    assert bound.bound_of(recipe, {}, peak=peak) is None


def test_what_a_save_costs_is_what_its_interval_takes_longer():
    def step(number, at, seconds=1.0):
        return {"step": number, "time": at, "time_metrics/end_to_end(s)": seconds}

    # Steps of a second, the first of ten; a save of two seconds after 4, in a step that takes half a second more, and
    # one of three seconds after 8.
    times = [10.0, 11.0, 12.0, 13.0, 16.5, 17.5, 18.5, 19.5, 23.5, 24.5, 25.5]
    steps = [step(number, at, 10.0 if number == 1 else 1.0) for number, at in enumerate(times, 1)]
    steps[4]["time_metrics/end_to_end(s)"] = 1.5
    assert measure.stalls(steps, 4, 1) == {"quiet_step_seconds": 1.0, "extra_seconds": [2.5, 3.0]}
    # Ended before the second save; before the first; with no step but warm-up.
    assert measure.stalls(steps[:6], 4, 1)["extra_seconds"] == [2.5]
    assert measure.stalls(steps[:4], 4, 1) == {}
    assert measure.stalls(steps, 4, 4) == {}


def test_rows_go_on_where_they_stopped(tmp_path):
    def opened(folder="a", code="c1", where=CPU):
        return record.Record(tmp_path / folder, where, code=code, commit=None)

    first, second, third = row_of("ladder/eager"), row_of("ladder/fused"), row_of("ladder/chunked")
    one = opened()
    for row, status in ((first, "measured"), (second, "failed"), (third, "cut")):
        assert not one.done(row)
        said = {"row": row.name, "keys": list(row.keys), "status": status, "figures": {"x": float("nan")}}
        one.keep({**said, "window": (1, 2)})
    again = opened()
    # What failed is data; what the end of a call has cut is run again.
    assert [again.done(row) for row in (first, second, third)] == [True, True, False]
    assert [said["row"] for said in again.rows([third, first])] == [third.name, first.name]
    assert again.rows([first])[0]["figures"] == {"x": None}
    # Other keys, other code, another device.
    assert not again.done(dataclasses.replace(first, keys=(*first.keys, "seed=1")))
    assert not opened(code="c2").done(first)
    assert not opened(where=H100).done(first)
    # A line that was cut off neither counts nor swallows the next one.
    with one.path.open("a") as file:
        file.write('{"row": "ladder/compi')
    torn = opened()
    torn.keep({"row": third.name, "keys": list(third.keys), "status": "late"})
    assert opened().done(third)
    # Rows that were carried home come back, once.
    for source in (tmp_path / "a", tmp_path / "a" / record.FILE):
        elsewhere = opened("b")
        assert elsewhere.take(source).startswith(f"--from {source}: 3 of ")
    assert opened("b").done(first)
    assert all(json.loads(line) for line in (tmp_path / "b" / record.FILE).read_text().splitlines())


def test_the_code_is_known_without_git(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    (tmp_path / "titanlab").mkdir()
    (tmp_path / "titanlab" / "a.py").write_text("1")
    before = record.code()
    (tmp_path / "README.md").write_text("of no account")
    assert record.code() == before
    assert record.commit() is None
    (tmp_path / "titanlab" / "a.py").write_text("2")
    assert record.code() != before


# Starts another process as titanlab starts ranks, in a session of its own, and waits.
STARTS_ANOTHER = """
import subprocess, sys, time
print("begun", flush=True)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
open("pid", "w").write(str(other.pid))
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


@pytest.mark.parametrize(("seconds", "limit"), [(300, 1.5), (0, 60)], ids=["late", "ended"])
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
def test_a_run_that_fails_or_is_late_keeps_what_it_has_measured(tmp_path):
    row = row_of("ladder/eager")

    def found(name, *keys, limit=60):
        (tmp_path / name).mkdir()
        given = dataclasses.replace(row, keys=(*row.keys, *keys))
        return measure.measured(given, sizes.REHEARSAL, CPU, limit=limit, folder=tmp_path / name)

    diverged = found("diverged", "optimizer.lr=1e30")
    assert diverged["status"] == "failed"
    assert diverged["reason"].startswith("nan: step ")
    assert diverged["log"]
    late = found("late", "training.steps=1000000", limit=30)
    assert (late["status"], late["reason"]) == ("late", "ended after its 30 s")
    assert late["figures"]["steps"] > 3
    assert late["figures"]["tokens_per_second"] > 0


NVIDIA_SMI = """#!/bin/sh
echo "$@" > "$(dirname "$0")/asked"
while :; do
  echo "345, 80.5, 40, 0"
  echo "1755, 690.25, 60, 100"
  echo "1755, [N/A], 62, 100"
  sleep 0.05
done
"""


def test_clocks_and_watts_are_those_of_a_busy_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    begin = time.time()
    with watch.Watch() as watching:
        while not watching.between(begin, time.time()) and time.time() < begin + 20:
            time.sleep(0.02)
        told = watching.between(begin, time.time())
    assert (told["mhz"], told["watts"]) == (1755, 690.25)
    assert told["celsius"] in (60, 61, 62)
    assert watching.between(begin - 20, begin - 10) == {}
    # It asks, and sets nothing.
    assert (tmp_path / "asked").read_text().startswith("--query-gpu=clocks.sm,power.draw,")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with watch.Watch() as blind:
        assert blind.between(begin, time.time()) == {}


def measured_rows(of, where):
    """Made-up figures of a whole session."""
    order, found = rows.rows(of), []
    for row in order:
        said = {"row": row.name, "kind": row.kind, "keys": list(row.keys), "what": row.what, "status": "measured"}
        said.update(wall_seconds=60.0, watched={"mhz": 1700.0, "watts": 650.0}, code="abc", commit="def")
        if row.lacking(where):
            said.update(status="absent", reason=row.lacking(where))
        elif row.kind == "run":
            said["predicted"] = {"tokens_per_second": 30_000.0, "mfu_percent": 55.0, "reserved_bytes": 60e9}
            speed = {"sixteen/bf16": 31_000.0, "sixteen/rowwise_head": 43_000.0}.get(row.name, 20_000.0)
            said["figures"] = {"tokens_per_second": speed, "tflops": 500.0, "mfu_percent": speed / 500}
            said["figures"].update(step_seconds=1.0, step_seconds_all=[1.0, 1.0, 1.1], reserved_bytes=66e9)
        elif row.kind == "products":
            recipe = composed(row_of("ladder/chunked", of), where)
            told = {
                str(each): {"seconds": 1e-3, "tflops": 700.0, "mhz": 1710.0} for each in products.products_of(recipe)
            }
            part_of = {"seconds": 1e-3, "tflops": 400.0}
            said["figures"] = {
                "rates": told,
                "attention": {"auto": {"forward": part_of, "backward": part_of}},
                "memory": {"copy": {"seconds": 1e-3, "bytes_per_second": 4e12}},
                "failed": {"forward 1x2x3 float8_rowwise": "RuntimeError: a | b"},
            }
        elif row.piece == "memory":
            said["figures"] = {"held_bytes": 3e9, "allocated_bytes": 40e9, "step_seconds": 1.0}
            said["predicted"] = {"activation_bytes": 4e9, "allocated_bytes": 50e9}
        elif row.piece == "kernels":
            said["figures"] = {"kernels": {"seconds": 2.0, "most": {"gemm|x": {"seconds": 1.5, "calls": 12}}}}
        elif row.kind == "saves":
            said["figures"] = {"extra_seconds": [2.0, 0.5], "checkpoint_bytes": 3e9, "quiet_step_seconds": 0.1}
            said["predicted"] = {"checkpoint_bytes": 3e9}
        else:
            said["figures"] = {"tests": 9, "passed": 8, "skipped": 0, "failed": {"t::a": "assert 1\n== 2"}}
            said.update(status="failed", reason="1 of 9 tests failed")
        found.append(said)
    return order, found


def test_the_page_has_a_line_for_every_row():
    where = dataclasses.replace(H200, packages={"torchao": "0.18", "pytest": "9", "hypothesis": "6", "xdist": "3"})
    order, found = measured_rows(sizes.GPU, where)
    text = table.page(order, found, where, sizes.GPU)
    assert all(row.name in text for row in order)
    assert "8 layers of `model=llama3_8b`" in text
    # 43,000 over 31,000; 62 % of 68.
    assert "- 68 % MFU in bf16: best is 62.0 %, `sixteen/bf16`: 6.0 points missing." in text
    assert "- 1.35 × in float8: best is 1.39 ×, `sixteen/rowwise_head` over `sixteen/bf16`: reached." in text
    assert "Its products and attention alone would be " in text
    line = next(
        line
        for line in text.splitlines()
        if line.startswith("| ladder/chunked | chunked") or "ladder/chunked | head" in line
    )
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[3:] == [
        "20,000", "500.0", "40.0 %", "1 (1 to 1.05)", "66.00", "30,000", "55.0 %", "60.00", "0.67", "1.10", "1700",
        "650", "",
    ]  # fmt: skip
    assert "| memory/full | 3 | 4 | 0.75 | 40 | 50 | 0.80 | 1 |" in text
    assert "| saves/async_pinned | 3 | 3 | 0.1 | 2.000 | 0.500 | 1.00 |" in text
    assert "| copy | 4 TB/s |" in text
    assert "| forward 1x2x3 float8_rowwise | RuntimeError: a / b |" in text
    assert "| `gemm/x` | 1500.000 | 75.0 % | 12 |" in text
    assert "`tests/gpu`: 8 of 9 passed" in text
    assert "- `t::a`: assert 1 == 2" in text
    missing = text[text.index("## Rows that were not measured whole") :]
    assert "| ladder/flash_attn | absent | flash_attn is not installed |" in missing
    assert "| tests/gpu | failed | 1 of 9 tests failed |" in missing
    assert missing.count("\n|") == 5
    # All tables are whole: each line has as many cells as its heading.
    width = 0
    for line in text.splitlines():
        cells = line.count("|")
        assert cells in (0, width or cells), line
        width = cells
    # Before anything is measured each row is there too.
    empty = table.page(order, [], where, sizes.GPU)
    assert all(f"| {row.name} | not run |" in empty for row in order)
    assert "no row in bf16 was measured" in empty


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


def test_mistakes_are_one_line(capsys):
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
