"""Recipes whose time is estimated: nothing of them runs."""

from typing import Any

from titanlab.parallelism import Parallelism
from titanlab.recipe import Cluster, Recipe, Training
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.optimizer.optimizers_schema import AdamW
from titanlab.techniques.precision.cast_schema import Bf16
from titanlab.techniques.schedule.published_schema import OneFOneB

LLAMA_8B = Llama(dim=4096, layers=32, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256)
SMALL = Llama(dim=256, layers=6, heads=8, kv_heads=4, ffn_dim=768, vocab_size=2048)
H100 = "NVIDIA H100 80GB HBM3"


def made(
    *,
    model: Llama = LLAMA_8B,
    batch: int = 16,
    seq_len: int = 8192,
    microbatch: int | None = None,
    compiled: bool = False,
    device: str = H100,
    cluster: dict[str, Any] | None = None,
    precision: Any = None,
    ac: Any = None,
    schedule: Any = None,
    **parallelism: Any,
) -> Recipe:
    """A recipe for nodes of eight GPUs; degrees that are not given are 1."""
    layout = Parallelism(**parallelism)
    world = layout.pipeline * layout.replicate * layout.shard * layout.context * layout.tensor
    values = {"accelerator": "cuda", "device": device, "per_node": 8, "network_gb_per_second": 50, **(cluster or {})}
    return Recipe(
        world=world,
        training=Training(seq_len=seq_len, global_batch=batch, microbatch=microbatch),
        model=model,
        parallelism=layout,
        schedule=schedule or OneFOneB(),
        precision=precision or Bf16(),
        ac=ac or NoCheckpointing(),
        compile=Compile(blocks=compiled, loss=compiled),
        optimizer=AdamW(lr=1e-3),
        cluster=Cluster(**values),
    )
