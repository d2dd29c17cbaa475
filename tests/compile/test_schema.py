"""What compilation refuses, in one line each, before anything is started."""

import importlib.metadata
from dataclasses import replace

import pytest
import torch

from tests import tiny
from titanlab.costs import Layout
from titanlab.errors import ConfigError
from titanlab.recipe.recipe_rules import setting
from titanlab.techniques.compile import schema
from titanlab.techniques.compile.schema import BACKENDS, ENTRY_POINTS, MODES, Compile
from titanlab.techniques.model.llama_schema import Qwen3Moe

EXPERTS = Qwen3Moe(
    dim=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn_dim=64, vocab_size=256, experts=4, active_experts=2
)


def setting_of(tmp_path, *, accelerator="cpu", world=1, **given):
    found = setting(tiny.recipe(tmp_path, **given))
    return replace(found, accelerator=accelerator, layout=Layout(shard=world))


RECORDS = "records CUDA graphs of parameters that stay where they are"
# Fields, and what else is in the setting; how the line begins and what its cure has in it.
WRONG = [
    ({"backend": "indcutor"}, {}, "compile.backend=indcutor: no such backend", "choose one of inductor, aot_eager"),
    ({"blocks": True, "backend": ""}, {}, "compile.backend=: no such backend", "inductor"),
    ({"blocks": True, "mode": "fast"}, {}, "compile.mode=fast: no such choice", "choose one of default, max-autotune-no"),
    ({"mode": "max-autotune"}, {}, "compile.mode=max-autotune: nothing is compiled", "try compile=block"),
    ({"blocks": True, "mode": "reduce-overhead", "backend": "aot_eager"}, {}, "compile.mode=reduce-overhead: is a mode of inductor, and aot_eager has none", "try default, or compile.backend=inductor"),
    ({"loss": True, "mode": "max-autotune", "backend": "cudagraphs"}, {}, "compile.mode=max-autotune: is a mode of", "try"),
    # CUDA graphs.
    ({"blocks": True, "mode": "reduce-overhead"}, {}, "compile.mode=reduce-overhead: records CUDA graphs, and this", "try default"),
    ({"blocks": True, "mode": "max-autotune"}, {}, "compile.mode=max-autotune: records", "try max-autotune-no-cudagraphs"),
    ({"blocks": True, "backend": "cudagraphs"}, {}, "compile.backend=cudagraphs: records CUDA graphs, and this", "try inductor"),
    ({"blocks": True, "mode": "reduce-overhead"}, {"accelerator": "cuda", "world": 2}, f"compile.mode=reduce-overhead: {RECORDS}, which dp_s2 moves", "try default"),
    ({"blocks": True, "mode": "reduce-overhead"}, {"accelerator": "cuda", "model": EXPERTS}, "compile.mode=reduce-overhead: records CUDA graphs of fixed shapes, and the router decides how many rows", "try default"),
    ({"blocks": True, "backend": "cudagraphs"}, {"accelerator": "cuda", "bf16": True}, f"compile.backend=cudagraphs: {RECORDS}, and bf16 casts them", "try inductor, or precision=bf16_full"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "others", "begins", "cure"), WRONG)
def test_what_cannot_work_is_refused(monkeypatch, tmp_path, given, others, begins, cure):
    monkeypatch.setattr(schema, "_check_tools", lambda setting: None)
    with pytest.raises(ConfigError) as refused:
        Compile(**given).check(setting_of(tmp_path, **others))
    assert str(refused.value).startswith(begins)
    assert cure in refused.value.cure


def test_inductor_without_its_tools(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="writes C\\+\\+ for a CPU, and there is no no-such-compiler"):
        Compile(loss=True).check(setting_of(tmp_path))
    # Nobody needs them for what is not compiled, or only traced, or on a GPU.
    Compile().check(setting_of(tmp_path))
    Compile(blocks=True).check(setting_of(tmp_path, accelerator="cuda"))
    Compile(blocks=True, backend="aot_eager").check(setting_of(tmp_path))


def test_recording_is_possible_on_one_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(schema, "_check_tools", lambda setting: None)
    for mode in MODES:
        Compile(blocks=True, mode=mode).check(setting_of(tmp_path, accelerator="cuda"))


def test_backends_are_those_that_torch_lists(monkeypatch):
    assert set(BACKENDS) <= set(torch._dynamo.list_backends(None))
    point = importlib.metadata.EntryPoint("mine", "package:backend", ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point] if group == ENTRY_POINTS else [])
    assert Compile(blocks=True, backend="mine").backend == "mine"
    with pytest.raises(ConfigError, match="choose one of .*cudagraphs, mine"):
        Compile(backend="yours")


def test_modes_are_those_that_inductor_has():
    assert set(MODES) <= set(torch._inductor.list_mode_options())


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_only_inductor_fuses(backend):
    both = Compile(blocks=True, loss=True, backend=backend)
    assert (both.fuses_blocks, both.fuses_loss) == ((backend == "inductor",) * 2)
    neither = Compile(backend=backend)
    assert (neither.fuses_blocks, neither.fuses_loss) == (False, False)
