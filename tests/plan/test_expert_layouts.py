"""The layouts that experts chose: the first answer is of that family, or nearly as fast and among the first five."""

from __future__ import annotations

import pytest

from titanlab.cli.compose import compose_one
from titanlab.plan import for_planning, plan
from titanlab.plan.ranking import NEAR
from titanlab.recipe import read_flags

TORCHTITAN = "pytorch/torchtitan@31a17bf benchmarks/llama3_h100_202412_torchtitan.md"
TORCHTITAN_A100 = "pytorch/torchtitan@4d88a8a docs/performance.md"
# The table of container 25.11 for DGX-H100, in a copy of the page.
MEGATRON = "pufanyi/Megatron-Bridge@21a2ced docs/performance-summary.md"
MODEL_ZOO = "yanring/Megatron-MoE-ModelZoo best_practice/Qwen3/readme.md"
LLAMA_3 = "arXiv 2407.21783, table 4"


def expert(source, recipe, world, batch, tokens, *axes, instead=""):
    """A row: the expert's axes beside those of data, and the family that the planner takes instead."""
    marks = [pytest.mark.xfail(strict=True, reason=f"the planner takes {instead}")] if instead else []
    return pytest.param(recipe, world, batch, tokens, set(axes), source, marks=marks)


EXPERTS = [
    expert(f"{TORCHTITAN}, table 1", "llama3_1_8b_8gpus", 8, 16, 8192),
    expert(f"{TORCHTITAN_A100}, Llama 3, on A100", "llama3_1_8b_8gpus", 64, 64, 8192),
    expert(f"{TORCHTITAN}, table 3", "llama3_1_8b_128gpus", 128, 256, 8192),
    expert(
        *(f"{MEGATRON}: TP 4, PP 8", "llama3_1_70b_256gpus", 64, 128, 8192, "tensor", "pipeline"),
        instead="dp_s32·tp2 with 4 sequences and ac=full; no pipeline is among the first five",
    ),
    # AsyncTP does not hide the sums of the backward pass, and in float8 no gathers.
    expert(
        *(f"{TORCHTITAN}, table 4", "llama3_1_70b_256gpus", 256, 512, 8192, "tensor"),
        instead="dp_s256 with 2 sequences and ac=full; dp_s128·tp2 takes 6 % longer",
    ),
    expert(
        *(f"{TORCHTITAN}, table 5: TP 8, PP 8", "llama3_1_405b_512gpus", 512, 256, 8192, "tensor", "pipeline"),
        instead="dp_s256·tp2 with 1 sequence and ac=full; no pipeline is among the first five",
    ),
    expert(
        *(f"{MEGATRON}: TP 8, PP 8, CP 2", "llama3_1_405b_512gpus", 1024, 512, 8192, "tensor", "pipeline", "context"),
        instead="dp_s512·tp2 with 1 sequence and ac=full; no pipeline is among the first five",
    ),
    expert(
        *(f"{LLAMA_3}: TP 8, PP 16", "llama3_1_405b_2048gpus", 8192, 2048, 8192, "tensor", "pipeline"),
        instead="dp_s32·cp4·tp4·pp16 with ac=selective_op; no pipeline without context is among the first five",
    ),
    expert(
        *(f"{MODEL_ZOO}: FSDP, TP 2, EP 8", "qwen3_moe_235b_a22b_512gpus", 256, 2048, 4096, "tensor", "expert"),
        instead="dp_s4·tp2·pp32 with ac=selective_op; FSDP with experts divided takes 10 % longer",
    ),
    expert(
        *(f"{MEGATRON}: PP 2, EP 8", "qwen3_moe_30b_a3b_32gpus", 16, 512, 4096, "pipeline", "expert"),
        instead="dp_s16 with 8 sequences and ac=full; no experts are divided among the first five",
    ),
    expert(f"{TORCHTITAN}, table 2: CP 4", "llama3_1_8b_8gpus_262k", 8, 2, 131072, "context"),
    expert(
        f"{TORCHTITAN}, table 6: TP 8, PP 8, CP 4",
        *("llama3_1_405b_512gpus_131k", 512, 16, 131072, "tensor", "context", "pipeline"),
        instead="dp_s16·cp8·tp4 with ac=full; no pipeline is among the first five",
    ),
]
AXES = ("pipeline", "context", "tensor", "expert")


@pytest.mark.full
@pytest.mark.parametrize(("name", "world", "batch", "tokens", "axes", "source"), EXPERTS)
def test_the_first_answer_is_an_experts(name, world, batch, tokens, axes, source):
    values = (f"world={world}", f"training.global_batch={batch}", f"training.seq_len={tokens}")
    composed = compose_one(read_flags([f"+recipe={name}", "cluster=h100", *values]))
    found = plan(for_planning(composed[1]), top=5).best
    families = [{axis for axis in AXES if getattr(ranked.point.layout, axis) > 1} for ranked in found]
    near = [family for family, ranked in zip(families, found, strict=True) if is_near(ranked, found[0])]
    assert axes in near, f"{[ranked.point.layout.label for ranked in found]}; {source}"


def is_near(ranked, first):
    return ranked.time.seconds <= (1 + NEAR) * first.time.seconds
