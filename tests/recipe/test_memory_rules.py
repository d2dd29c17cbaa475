"""Sizes that no machine has, and what this host's memory must hold at least."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests import tiny
from titanlab.distributed import Host
from titanlab.errors import ConfigError
from titanlab.recipe import Cluster, Training, check_host_memory
from titanlab.recipe.recipe_rules import PROCESS_BYTES
from titanlab.techniques.model.llama_schema import Llama

GIB = 2**30


def with_memory(gib: float) -> Host:
    return Host(accelerator="cpu", device="cpu", count=2, memory_bytes=int(gib * GIB))


def of_size(tmp_path, **given):
    return replace(tiny.recipe(tmp_path), model=Llama(**{**vars(tiny.recipe(tmp_path).model), **given}))


def test_parameters_and_gradients_have_to_fit(tmp_path):
    recipe = of_size(tmp_path, dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008, vocab_size=32000)
    # Llama 2 7B (arXiv 2307.09288): 6.74 billion parameters, in 4 bytes with their gradients 50.2 GiB.
    check_host_memory(recipe, with_memory(51), processes=1)
    with pytest.raises(ConfigError, match="6,738,415,616 parameters and their gradients take at least 50.2 GiB here"):
        check_host_memory(recipe, with_memory(50), processes=1)


def test_sharding_keeps_one_copy_and_replication_makes_several(tmp_path):
    large = {"dim": 2048, "ffn_dim": 8192, "layers": 8}
    recipes = {
        axis: replace(tiny.recipe(tmp_path, **{axis: 4}), model=Llama(**{**vars(tiny.recipe(tmp_path).model), **large}))
        for axis in ("shard", "replicate")
    }
    check_host_memory(recipes["shard"], with_memory(8), processes=4)
    with pytest.raises(ConfigError, match="parameters and their gradients"):
        check_host_memory(recipes["replicate"], with_memory(8), processes=4)
    # torchrun may have started one of four processes here.
    check_host_memory(recipes["replicate"], with_memory(8), processes=1)


def test_processes_have_to_fit(tmp_path):
    recipe = tiny.recipe(tmp_path, shard=12)
    check_host_memory(recipe, with_memory(1), processes=12)
    with pytest.raises(ConfigError, match=r"world=12: processes take at least 0.8 GiB, and this machine has 0.5 GiB"):
        check_host_memory(
            recipe, Host(accelerator="cpu", device="cpu", count=2, memory_bytes=8 * PROCESS_BYTES), processes=12
        )


@pytest.mark.parametrize(
    ("training", "key"),
    [
        ({"seq_len": 10**9}, "training.seq_len"),
        ({"global_batch": 10**9}, "training.global_batch"),
        ({"global_batch": 10**9, "microbatch": 10**8}, "training.microbatch"),
    ],
)
def test_a_microbatch_has_to_fit(tmp_path, training, key):
    recipe = replace(tiny.recipe(tmp_path), training=Training(**training))
    with pytest.raises(ConfigError, match="one microbatch is .* tokens, which take at least") as refused:
        check_host_memory(recipe, with_memory(24), processes=1)
    assert refused.value.key == key


def test_nothing_is_said_of_a_gpu_and_of_a_host_that_is_not_known(tmp_path):
    recipe = of_size(tmp_path, dim=65536, layers=200)
    check_host_memory(recipe, replace(with_memory(1), memory_bytes=None), processes=1)
    on_gpu = replace(recipe, cluster=Cluster(accelerator="cuda", device="NVIDIA H200"))
    check_host_memory(on_gpu, with_memory(1), processes=1)
