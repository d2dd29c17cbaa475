"""The measurement of attention kernels, rehearsed on a CPU, and what the table makes of its rows."""

import json

import pytest

from tests.benchmarks.scripts import script
from titanlab.costs.attention_order import rules_of


@pytest.fixture(scope="module")
def benchmark():
    return script("gpu_attention")


def test_it_measures_forward_and_backward_of_every_kernel(benchmark, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    tiny = ["--tokens", "64", "--lengths", "16", "32", "--heads", "4", "2", "--widths", "16", "--times", "2", "--write"]
    figures = benchmark.main(tiny)
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "kept.json").read_text()) == figures
    shapes = [(row["dtype"], row["seq_len"], row["batch"]) for row in figures["measured"]]
    assert shapes == [("bfloat16", 16, 4), ("bfloat16", 32, 2), ("float16", 16, 4), ("float16", 32, 2)]
    for row in figures["measured"]:
        assert set(row["ms"]) == {"flash", "math"}
        assert all(ms > 0 for ms in row["ms"].values())
        # No rule is made of what a CPU does.
        assert len(rules_of({"published": [], "measured": [row]}, (9, 0))) == 1


def test_a_kernel_that_does_not_take_the_inputs_has_no_time(benchmark, monkeypatch):
    class Refusing(benchmark.InnerAttention):
        def forward(self, q, k, v):
            if self.kernel == "math":
                raise RuntimeError("No available kernel")
            return super().forward(q, k, v)

    monkeypatch.setattr(benchmark, "InnerAttention", Refusing)
    cpu, half = benchmark.torch.device("cpu"), benchmark.torch.bfloat16
    row = benchmark.measured(cpu, half, (2, 2), 16, 8, tokens=8, times=1)
    assert row["ms"]["math"] is None
    assert row["ms"]["flash"] > 0


def test_adopted_rows_replace_those_of_the_same_device(benchmark):
    def row(capability, seq_len, ms):
        kind = {"capability": capability, "dtype": "bfloat16", "head_dim": 128, "seq_len": seq_len}
        return {**kind, "ms": {"cudnn": ms, "flash": 2.0}, "source": "a test"}

    table = {"published": [], "measured": [row([8, 0], 512, 1.0), row([9, 0], 512, 1.0), row([9, 0], 1024, 1.0)]}
    found = json.loads(benchmark.adopted(table, [row([9, 0], 512, 3.0)]))
    assert found == {"published": [], "measured": [row([8, 0], 512, 1.0), row([9, 0], 512, 3.0)]}
    assert rules_of(found, (9, 0))[0].order == ("flash", "cudnn", "efficient")
    assert rules_of(found, (8, 0))[0].order == ("cudnn", "flash", "efficient")


def test_a_cpu_is_not_adopted(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main(["--adopt"])
    assert "--adopt: the table is about GPUs, and there is none here" in capsys.readouterr().err
