"""The declared costs and initial values of a Llama: shapes, operations with FLOPs. Torch-free."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from titanlab.costs.account import HIDDEN, Activation, Init, Joined, ModelAccount, Operation, block_name
from titanlab.model import moe_account
from titanlab.model.llama_block_account import matmul, norm

if TYPE_CHECKING:
    from titanlab.model.llama_schema import Llama

EMBEDDING = "tok_embeddings.weight"
HEAD = "output.weight"
# Megatron's plan (arXiv 1909.08053, section 3): columns, then rows, so that two products need one all-reduce.
TENSOR_PLAN = {
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gathered",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gathered",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "norm",
    "output": "head",
}
HEAD_NORMS_PLAN = {"layers.*.attention.q_norm": "head_norm", "layers.*.attention.k_norm": "head_norm"}


def account(config: Llama) -> ModelAccount:
    """Parameters by name in the module's order, and the sizes that cost estimates need."""
    parameters: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.dim)}
    for layer in range(config.layers):
        parameters.update({f"{block_name(layer)}.{name}": shape for name, shape in _block_parameters(config).items()})
    parameters["norm.weight"] = (config.dim,)
    if not config.tied_embeddings:
        parameters[HEAD] = (config.vocab_size, config.dim)
    return ModelAccount(
        parameters=parameters,
        embedding=EMBEDDING,
        tied={HEAD: EMBEDDING} if config.tied_embeddings else {},
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dim=config.dim,
        vocab_size=config.vocab_size,
        pieces=("tok_embeddings", *(block_name(layer) for layer in range(config.layers)), "norm", "output"),
        attention="attention.inner",
        tensor_plan=_tensor_plan(config),
        experts=config.routed,
        joined=_fused_projections(config) if config.fused else (),
        head="output",
    )


def _fused_projections(config: Llama) -> tuple[Joined, ...]:
    # Without norms of heads, attention keeps only the values of this product: queries and keys are rotated first.
    copied = () if config.has_head_norms else ("wv",)
    attention = Joined(caller="layers.*.attention.projections", layers=("wq", "wk", "wv"), copied=copied)
    feed_forward = Joined(caller="layers.*.feed_forward.projections", layers=("w1", "w3"))
    return (attention,) if config.routed is not None else (attention, feed_forward)


def _tensor_plan(config: Llama) -> dict[str, str]:
    plan = {**TENSOR_PLAN, **(HEAD_NORMS_PLAN if config.has_head_norms else {})}
    if config.routed is None:
        return plan
    dense = {name: style for name, style in plan.items() if ".feed_forward" not in name}
    return {**dense, **moe_account.TENSOR_PLAN}


def _block_parameters(config: Llama) -> dict[str, tuple[int, ...]]:
    dim, q_dim, kv_dim = config.dim, config.attention_dim, config.kv_heads * config.head_dim
    head_norms = {f"attention.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return {
        "attention_norm.weight": (dim,),
        "attention.wq.weight": (q_dim, dim),
        "attention.wk.weight": (kv_dim, dim),
        "attention.wv.weight": (kv_dim, dim),
        "attention.wo.weight": (dim, q_dim),
        **(head_norms if config.has_head_norms else {}),
        "ffn_norm.weight": (dim,),
        **_feed_forward(config),
    }


def _feed_forward(config: Llama) -> dict[str, tuple[int, ...]]:
    if config.routed is not None:
        return moe_account.parameters(config.routed, dim=config.dim, ffn_dim=config.ffn_dim)
    return {
        "feed_forward.w1.weight": (config.ffn_dim, config.dim),
        "feed_forward.w2.weight": (config.dim, config.ffn_dim),
        "feed_forward.w3.weight": (config.ffn_dim, config.dim),
    }


def edge_operations(config: Llama, *, batch: int, seq_len: int) -> list[Operation]:
    """The operations before and after the blocks: embedding, final norm, head."""
    hidden = Activation(name=HIDDEN, shape=(batch, seq_len, config.dim))
    normed = Activation(name="norm", shape=hidden.shape, cut="whole")
    return [
        Operation(name="tok_embeddings", kind="lookup", flops=0, output=hidden.shape),
        norm("norm", hidden),
        matmul("output", normed, config.vocab_size, "part"),
    ]


def initial_values(config: Llama) -> dict[str, Init]:
    """The initial value of every parameter, by name.

    Matrices: normal with std 0.02. The std of the two that write into the residual stream (wo, w2) is divided by
    sqrt(2·layers), so that its variance does not grow with depth (GPT-2; Megatron-LM, arXiv 1909.08053, section 4).
    Norms: ones. The output head, also a tied one, has a std of at most 1/(2·sqrt(dim)): logits of a normalised stream
    then have a std of at most 1/2, and the first loss is at most 1/8 above ln(vocab_size).
    """
    residual_std = 0.02 / math.sqrt(2 * config.layers)
    head_std = min(0.02, 0.5 / math.sqrt(config.dim))
    head = EMBEDDING if config.tied_embeddings else HEAD
    values: dict[str, Init] = {}
    for name in account(config).parameters:
        if "norm." in name:
            values[name] = Init(kind="ones")
        elif name == head:
            values[name] = Init(kind="normal", std=head_std)
        elif name.endswith((".wo.weight", ".w2.weight")):
            values[name] = Init(kind="normal", std=residual_std)
        else:
            values[name] = Init(kind="normal", std=0.02)
    return values
