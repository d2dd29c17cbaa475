"""What a Llama declares: shapes, initial values, operations with FLOPs, and what autograd saves. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titanlab.costs import (
    CONTEXT_ATTENTION,
    EXCHANGE,
    GROUPED_PRODUCT,
    HIDDEN,
    Activation,
    Cut,
    Init,
    Joined,
    ModelAccount,
    Operation,
    Operator,
    RoutedExperts,
    block_name,
)

if TYPE_CHECKING:
    from titanlab.techniques.model.llama_schema import Llama


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
_SELECT = ("aten.index_select.default",)
_SUM = ("aten.sum.dim_IntList",)
# In place of the plan of a dense feed-forward, in models with experts.
EXPERTS_PLAN = {
    "layers.*.feed_forward": "experts",
    "layers.*.feed_forward.router": "router",
    "layers.*.feed_forward.experts.w1": "expert_colwise",
    "layers.*.feed_forward.experts.w3": "expert_colwise",
    "layers.*.feed_forward.experts.w2": "expert_rowwise",
}
HEAD_NORMS_PLAN = {"layers.*.attention.q_norm": "head_norm", "layers.*.attention.k_norm": "head_norm"}


def account(config: Llama) -> ModelAccount:
    """Parameters by name in the module's order, and the sizes that cost estimates need."""
    plan = {**TENSOR_PLAN, **(HEAD_NORMS_PLAN if config.has_head_norms else {})}
    if config.routed is not None:
        plan = {**{name: style for name, style in plan.items() if ".feed_forward" not in name}, **EXPERTS_PLAN}
    parameters: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.dim)}
    for layer in range(config.layers):
        parameters.update({f"{block_name(layer)}.{name}": shape for name, shape in _block_parameters(config).items()})
    parameters["norm.weight"] = (config.dim,)
    if not config.tied_embeddings:
        parameters[HEAD] = (config.vocab_size, config.dim)
    # Without norms of heads, attention keeps only the values from the fused product: it keeps rotated queries and keys.
    copied = () if config.has_head_norms else ("wv",)
    joined = [
        Joined(caller="layers.*.attention.projections", layers=("wq", "wk", "wv"), copied=copied),
        Joined(caller="layers.*.feed_forward.projections", layers=("w1", "w3")),
    ]
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
        tensor_plan=plan,
        experts=config.routed,
        joined=tuple(joined[: 1 if config.routed is not None else 2]) if config.fused else (),
        head="output",
    )


def _block_parameters(config: Llama) -> dict[str, tuple[int, ...]]:
    dim, q_dim, kv_dim = config.dim, config.attention_dim, config.kv_heads * config.head_dim
    head_norms = {f"attention.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    up, down = (config.ffn_dim, dim), (dim, config.ffn_dim)
    feed_forward: dict[str, tuple[int, ...]] = {"w1": up, "w2": down, "w3": up}
    if config.routed is not None:
        count = config.routed.count
        stacks = {f"experts.{name}": (count, *shape) for name, shape in feed_forward.items()}
        feed_forward = {"router": (count, dim), **stacks}
    return {
        "attention_norm.weight": (dim,),
        "attention.wq.weight": (q_dim, dim),
        "attention.wk.weight": (kv_dim, dim),
        "attention.wv.weight": (kv_dim, dim),
        "attention.wo.weight": (dim, q_dim),
        **(head_norms if config.has_head_norms else {}),
        "ffn_norm.weight": (dim,),
        **{f"feed_forward.{name}.weight": shape for name, shape in feed_forward.items()},
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


# Device and precision decide which operator runs; each returns the output and the log-sum-exp of the scores.
FUSED_ATTENTION = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    CONTEXT_ATTENTION,
)


def block_operations(config: Llama, *, batch: int, seq_len: int) -> list[Operation]:
    """The operations of one block's forward pass, in the order in which the module runs them.

    Names are paths in the block. Shapes: `[batch, seq, width]`; `attention.rope_*` give
    `[batch, seq, heads, head_dim]`, `attention.inner` gives `[batch, heads, seq, head_dim]`.

    The rotations save only the table of angles, which all blocks share. Casts are not declared as operators: without
    mixed precision there are none.
    """
    dim = config.dim
    q_shape, k_shape = ((batch, seq_len, heads, config.head_dim) for heads in (config.heads, config.kv_heads))
    tokens, kv_dim = (batch, seq_len), math.prod(k_shape[2:])
    stream, after_attention = (Activation(name=name, shape=(*tokens, dim)) for name in (HIDDEN, "attention_residual"))
    normed, fed = (Activation(name=f"{name}_norm", shape=(*tokens, dim), cut="whole") for name in ("attention", "ffn"))
    fed = fed if config.routed is None else replace(fed, with_experts="stream")
    attention = _attention(config, batch, seq_len)
    return [
        norm("attention_norm", stream),
        *_projections(config, "attention", normed, {"wq": config.attention_dim, "wk": kv_dim, "wv": kv_dim}),
        *_head_norms(config, q_shape, k_shape),
        _rotation("attention.rope_q", q_shape),
        _rotation("attention.rope_k", k_shape),
        attention,
        matmul("attention.wo", _mixed(config, attention, tokens), dim, "whole"),
        _pointwise(after_attention, "aten.add.Tensor"),
        norm("ffn_norm", after_attention),
        *_feed_forward_operations(config, fed),
        # No saved output: it is the input of the next block, and is counted there.
        Operation(name="ffn_residual", kind="pointwise", flops=0, output=stream.shape),
    ]


def _feed_forward_operations(config: Llama, fed: Activation) -> list[Operation]:
    if config.routed is not None:
        return _experts_operations(config.routed, fed, ffn_dim=config.ffn_dim)
    gate, up, silu, mul = (
        Activation(name=f"feed_forward.{name}", shape=(*fed.shape[:-1], config.ffn_dim), cut="part")
        for name in ("w1", "w3", "silu", "mul")
    )
    return [
        *_projections(config, "feed_forward", fed, dict.fromkeys(("w1", "w3"), config.ffn_dim)),
        _pointwise(silu, "aten.silu.default", keeps=(gate,), passes=2.0),
        _pointwise(mul, "aten.mul.Tensor", keeps=(silu, up)),
        matmul("feed_forward.w2", mul, config.dim, "whole"),
    ]


def _experts_operations(experts: RoutedExperts, fed: Activation, *, ffn_dim: int) -> list[Operation]:
    """The operations of a feed-forward of experts.

    Shapes: a row is a token for one of its experts, `[batch, seq · active, width]`. Counts of rows are those of all
    experts together.
    """
    batch, seq_len, dim = fed.shape
    whole, rows = (batch, seq_len), (batch, seq_len * experts.active)

    def like(activation: Activation, name: str, **changes: Any) -> Activation:
        return replace(activation, name=f"feed_forward.{name}", **changes)

    # The router computes in float32; torch's softmax keeps its result, and top-k the places of the chosen.
    logits = like(fed, "router", shape=(*whole, experts.count), element_bytes=4)
    scores = like(logits, "scores")
    chosen = like(logits, "chosen", shape=(*whole, experts.active), element_bytes=8)
    best, weights = (like(chosen, name, element_bytes=4) for name in ("best", "weights"))
    total = like(best, "total", shape=(*whole, 1))
    order, inverse = (like(chosen, name, shape=(*rows, 1)) for name in ("order", "inverse"))
    row = Activation(name="", shape=(*rows, dim), cut="whole", with_experts="stream")
    spread, down = (like(row, name) for name in ("spread", "experts.w2"))
    gate, up, silu, mul = (
        like(row, f"experts.{name}", shape=(*rows, ffn_dim), cut="part") for name in ("w1", "w3", "silu", "mul")
    )
    # The router's tally and balance need these in the backward pass.
    kept = [Activation(name="feed_forward.entropy", shape=(1,), cut="all", element_bytes=4)]
    if experts.balance.startswith("auxiliary"):
        sequences = batch if experts.balance == "auxiliary_sequence" else 1
        kept.append(like(kept[0], "slope", shape=(sequences, experts.count)))
    # The order of the rows that other ranks have sent, and its inverse.
    travelled = [like(order, name, with_experts="only") for name in ("arrived", "returned")]
    # The numbers of rows that the rank sends and gets, on the host.
    counts = like(kept[0], "counts", shape=(2, experts.count), element_bytes=8, with_experts="only")
    theirs = like(counts, "theirs", shape=(experts.count,))
    only = replace(spread, with_experts="only")
    combined = like(fed, "combine")
    by_token = like(down, "by_token")
    return [
        replace(
            matmul(logits.name, fed, experts.count, "whole"),
            operators=(Operator(names=("aten.mm.default",), results=(logits,)),),
        ),
        _pointwise(
            scores,
            "aten._softmax.default",
            keeps=(scores, chosen, best, total, *kept),
            passes=6.0,
            name="feed_forward.choose",
            later=(
                Operator(names=("aten.topk.default",), results=(like(best, "ranked"), chosen)),
                Operator(names=("aten.gather.default",), results=(best,)),
                Operator(names=("aten.mul.Tensor",), results=(like(logits, "entropies"),)),
                Operator(names=_SUM, results=(total,)),
                Operator(names=("aten.div.Tensor",), results=(weights,)),
            ),
        ),
        _pointwise(
            spread,
            *_SELECT,
            keeps=(order, inverse),
            passes=2.0,
            first=(Operator(names=_SELECT, results=(like(order, "by_expert"),)),),
        ),
        _exchange("feed_forward.exchange", spread, (counts, *travelled[:1]), theirs, like(only, "received")),
        _grouped(experts, "feed_forward.experts.w1", spread, gate),
        _grouped(experts, "feed_forward.experts.w3", spread, up),
        _pointwise(silu, "aten.silu.default", keeps=(gate,), passes=2.0),
        _pointwise(mul, "aten.mul.Tensor", keeps=(silu, up)),
        _grouped(experts, "feed_forward.experts.w2", mul, down),
        _exchange("feed_forward.return", down, (counts, *travelled[1:]), like(only, "results")),
        # For each of a token's experts: reads a row, writes the weighted row, and reads that again.
        _pointwise(
            combined,
            *_SUM,
            keeps=(down, weights, order, inverse),
            passes=4.0 * experts.active + 1,
            first=(
                Operator(names=_SELECT, results=(by_token,)),
                Operator(names=("aten.mul.Tensor",), results=(like(down, "weighted"),)),
            ),
        ),
    ]


def _grouped(experts: RoutedExperts, name: str, inputs: Activation, result: Activation) -> Operation:
    ends = Activation(
        name="feed_forward.ends", shape=(experts.count,), cut="all", element_bytes=4, with_experts="stream"
    )
    return replace(
        matmul(name, inputs, result.shape[-1], "part"),
        keeps=(inputs, ends),
        operators=(Operator(names=(GROUPED_PRODUCT,), results=(result,)),),
        groups=experts.count,
    )


def _exchange(name: str, rows: Activation, keeps: tuple[Activation, ...], *results: Activation) -> Operation:
    """Rows that travel to other ranks and are sorted before or after it; only with expert parallelism.

    Args:
        results: of the exchange of counts, and of the exchange of rows.
    """
    sorted_rows = replace(rows, name=f"{name}.sorted", with_experts="only")
    return Operation(
        name=name,
        kind="exchange",
        flops=0,
        output=rows.shape,
        keeps=keeps,
        operators=(
            *(Operator(names=(EXCHANGE,), results=(result,)) for result in results),
            Operator(names=_SELECT, results=(sorted_rows,)),
        ),
        passes=2.0,
    )


def _projections(config: Llama, module: str, inputs: Activation, outputs: Mapping[str, int]) -> list[Operation]:
    """Products of one input with several layers, or one product if they are fused."""
    if not config.fused:
        return [matmul(f"{module}.{name}", inputs, width, "part") for name, width in outputs.items()]
    # `wqkv` and `w13`.
    first, *others = outputs
    name = f"{module}.{first}{''.join(other.removeprefix('w') for other in others)}"
    return [replace(matmul(name, inputs, sum(outputs.values()), "part"), layer=f"{module}.{first}")]


def matmul(name: str, inputs: Activation, outputs: int, cut: Cut) -> Operation:
    """A product of inputs [batch, seq, width] with a matrix; autograd saves the inputs."""
    output = (*inputs.shape[:-1], outputs)
    result = Activation(name=name, shape=output, cut=cut)
    return Operation(
        name=name,
        kind="matmul",
        flops=2 * inputs.shape[-1] * math.prod(output),
        output=output,
        keeps=(inputs,),
        operators=(Operator(names=("aten.mm.default",), results=(result,)),),
    )


def norm(name: str, inputs: Activation) -> Operation:
    """RMSNorm in float32: on a GPU one kernel, which saves its inputs; on a CPU one kernel for each step."""
    rstd = Activation(name=f"{name}.rstd", shape=(*inputs.shape[:-1], 1), cut=inputs.cut, element_bytes=4)
    wide = replace(inputs, name=f"{name}.wide", copy_of=inputs.name, element_bytes=4)
    scaled, squares = (replace(inputs, name=f"{name}.{step}", element_bytes=4) for step in ("scaled", "squares"))
    weighted = replace(scaled, name=f"{name}.weighted", copy_of=name)
    by_step = {
        "aten.pow.Tensor_Scalar": (squares,),
        "aten.mean.dim": (replace(rstd, name=f"{name}.mean"),),
        "aten.rsqrt.default": (rstd,),
        "aten.mul.Tensor": (scaled, weighted),
    }
    fused = Operator(names=("aten._fused_rms_norm.default",), results=_on("cuda", replace(inputs, name=name), rstd))
    steps = (Operator(names=(step,), results=_on("cpu", *results)) for step, results in by_step.items())
    return Operation(
        name=name,
        kind="norm",
        flops=0,
        output=inputs.shape,
        keeps=(rstd, *_on("cuda", inputs), *_on("cpu", wide, scaled)),
        operators=(fused, *steps),
        passes=2.0,
    )


def _head_norms(config: Llama, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> list[Operation]:
    if not config.has_head_norms:
        return []
    products = {"q_norm": ("wq", q_shape), "k_norm": ("wk", k_shape)}
    return [
        norm(f"attention.{name}", Activation(name=f"attention.{product}", shape=shape, cut="part"))
        for name, (product, shape) in products.items()
    ]


def _pointwise(
    result: Activation,
    operator: str,
    keeps: tuple[Activation, ...] = (),
    passes: float = 3.0,
    *,
    name: str = "",
    first: tuple[Operator, ...] = (),
    later: tuple[Operator, ...] = (),
) -> Operation:
    """An operation whose time is that of moving its result's bytes; `first`, `later`: the operators around this one."""
    return Operation(
        name=name or result.name,
        kind="pointwise",
        flops=0,
        output=result.shape,
        keeps=keeps,
        operators=(*first, Operator(names=(operator,), results=(result,)), *later),
        passes=passes,
    )


def _rotation(name: str, shape: tuple[int, ...]) -> Operation:
    result = Activation(name=name, shape=shape, cut="part")
    rotated = replace(result, name=f"{name}.turned", element_bytes=4, copy_of=name)
    operators = (Operator(names=("aten.mul.Tensor",), results=(rotated,)),)
    # In units of bfloat16: the cast reads 1 and writes 2, the product reads 2 and writes 2, the cast back reads 2 and
    # writes 1.
    return Operation(name=name, kind="pointwise", flops=0, output=shape, operators=operators, passes=10.0)


def _attention(config: Llama, batch: int, seq_len: int) -> Operation:
    output = (batch, config.heads, seq_len, config.head_dim)
    q = Activation(name="attention.rope_q", shape=output, cut="part")
    k, v = (
        replace(q, name=name, shape=(batch, config.kv_heads, *output[2:]))
        for name in ("attention.rope_k", "attention.wv")
    )
    mixed = replace(q, name="attention.inner")
    kept: Sequence[Activation]
    if config.attention == "math":
        kept, operators = _plain_attention(q, v, mixed)
    else:
        lse = Activation(name="attention.inner.lse", shape=output[:-1], cut="part", element_bytes=4)
        if config.attention == "efficient" and k.shape != q.shape:
            # The module repeats key/value heads for every query head before it calls this kernel.
            k, v = (replace(x, name=f"attention.inner.{name}", shape=q.shape) for x, name in ((k, "k"), (v, "v")))
        kept, operators = (q, k, v, mixed, lse), (Operator(names=FUSED_ATTENTION, results=(mixed, lse)),)
    if config.fused and config.has_head_norms:
        # The values are a view of the fused result, which also holds queries and keys before their norms.
        if config.attention == "math":
            # The math kernel copies the values. On a GPU the norms keep their inputs, and so the fused result.
            kept = (*kept, *_on("cuda", replace(v, name="attention.wqkv.values")))
        else:
            before = (replace(x, name=f"attention.{name}") for x, name in ((q, "wq"), (k, "wk")))
            kept = (*kept, *(replace(x, shape=(batch, seq_len, *x.shape[1::2])) for x in before))
    return Operation(
        name="attention.inner",
        kind="attention",
        # Scores and weighted values: two products of 2·seq·seq·head_dim each, for every head.
        flops=2 * 2 * math.prod(output) * seq_len,
        output=output,
        keeps=tuple(kept),
        operators=operators,
    )


def _plain_attention(
    q: Activation, v: Activation, mixed: Activation
) -> tuple[Sequence[Activation], tuple[Operator, ...]]:
    """The `math` kernel of torch: it saves scaled q and k, v and the full matrix of weights, all in float32."""
    scaled = [
        replace(q, name=f"attention.inner.{name}", element_bytes=4, copy_of=copy_of)
        for name, copy_of in (("q", ""), ("k", ""), ("v", v.name if v.shape == q.shape else ""))
    ]
    weights = replace(scaled[0], name="attention.inner.weights", shape=(*q.shape[:-1], q.shape[-2]))
    scores, out = (replace(x, name=f"{x.name}.product") for x in (weights, mixed))
    results = {
        "aten.mul.Scalar": scaled[:2],
        "aten.bmm.default": (scores,),
        # The sum of the scores and the causal mask.
        "aten.add.Tensor": (replace(weights, name=f"{weights.name}.masked"),),
        "aten._safe_softmax.default": (weights,),
    }
    operators = (Operator(names=(name,), results=tuple(tensors)) for name, tensors in results.items())
    last = Operator(names=("aten.bmm.default",), results=(replace(out, element_bytes=4),))
    return [*scaled, weights], (*operators, last)


def _mixed(config: Llama, attention: Operation, tokens: tuple[int, int]) -> Activation:
    """The attention's output as the input of the projection, [batch, seq, heads · head_dim]."""
    # Fused kernels write this order; the output of math is copied into it.
    name = f"{attention.name}.by_token" if config.attention == "math" else attention.name
    return Activation(name=name, shape=(*tokens, config.attention_dim), cut="part")


def _on(accelerator: str, *activations: Activation) -> tuple[Activation, ...]:
    return tuple(replace(activation, accelerator=accelerator) for activation in activations)
