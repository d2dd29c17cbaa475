"""What experts change in the account of a Llama block: parameters, operations, tensor plan. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from titanlab.costs.account import EXCHANGE, GROUPED_PRODUCT, Activation, Operation, Operator, RoutedExperts

_SELECT = ("aten.index_select.default",)
_SUM = ("aten.sum.dim_IntList",)
# In place of the plan of a dense feed-forward.
TENSOR_PLAN = {
    "layers.*.feed_forward": "experts",
    "layers.*.feed_forward.router": "router",
    "layers.*.feed_forward.experts.w1": "expert_colwise",
    "layers.*.feed_forward.experts.w3": "expert_colwise",
    "layers.*.feed_forward.experts.w2": "expert_rowwise",
}


def parameters(experts: RoutedExperts, *, dim: int, ffn_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the feed-forward's parameters by name in the block, in the module's order."""
    return {
        "feed_forward.router.weight": (experts.count, dim),
        "feed_forward.experts.w1.weight": (experts.count, ffn_dim, dim),
        "feed_forward.experts.w2.weight": (experts.count, dim, ffn_dim),
        "feed_forward.experts.w3.weight": (experts.count, ffn_dim, dim),
    }


def operations(experts: RoutedExperts, fed: Activation, *, ffn_dim: int) -> list[Operation]:
    """The operations of the feed-forward.

    Shapes: a row is a token for one of its experts, `[batch, seq · active, width]`. Counts of rows are those of all
    experts together.

    Args:
        fed: its input.
    """
    batch, seq_len, dim = fed.shape
    whole, rows = (batch, seq_len), (batch, seq_len * experts.active)
    # The router computes in float32; torch's softmax keeps its result, and top-k the places of the chosen.
    logits = replace(fed, name="feed_forward.router", shape=(*whole, experts.count), element_bytes=4)
    scores = replace(logits, name="feed_forward.scores")
    chosen = replace(logits, name="feed_forward.chosen", shape=(*whole, experts.active), element_bytes=8)
    best, weights = (replace(chosen, name=f"feed_forward.{name}", element_bytes=4) for name in ("best", "weights"))
    total = replace(best, name="feed_forward.total", shape=(*whole, 1))
    order, inverse = (replace(chosen, name=f"feed_forward.{name}", shape=(*rows, 1)) for name in ("order", "inverse"))
    spread, down = (
        Activation(name=f"feed_forward.{name}", shape=(*rows, dim), cut="whole", with_experts="stream")
        for name in ("spread", "experts.w2")
    )
    gate, up, silu, mul = (
        Activation(name=f"feed_forward.{name}", shape=(*rows, ffn_dim), cut="part", with_experts="stream")
        for name in ("experts.w1", "experts.w3", "experts.silu", "experts.mul")
    )
    # What is counted and balanced in the backward pass.
    kept = [Activation(name="feed_forward.entropy", shape=(1,), cut="all", element_bytes=4)]
    if experts.balance.startswith("auxiliary"):
        sequences = batch if experts.balance == "auxiliary_sequence" else 1
        kept.append(replace(kept[0], name="feed_forward.slope", shape=(sequences, experts.count)))
    # Their order among the rows that other ranks have sent, and the inverse.
    travelled = [replace(order, name=f"feed_forward.{name}", with_experts="only") for name in ("arrived", "returned")]
    # The counts of rows that it sends and that it gets, on the host.
    counts = Activation(
        name="feed_forward.counts", shape=(2, experts.count), cut="all", element_bytes=8, with_experts="only"
    )
    theirs = replace(counts, name="feed_forward.theirs", shape=(experts.count,))
    only = replace(spread, with_experts="only")
    combined = replace(fed, name="feed_forward.combine")
    by_token = replace(down, name="feed_forward.by_token")
    return [
        Operation(
            name="feed_forward.router",
            kind="matmul",
            flops=2 * dim * batch * seq_len * experts.count,
            output=logits.shape,
            keeps=(fed,),
            operators=(Operator(names=("aten.mm.default",), results=(logits,)),),
        ),
        _moves(
            "feed_forward.choose",
            scores,
            "aten._softmax.default",
            keeps=(scores, chosen, best, total, *kept),
            passes=6.0,
            later=(
                Operator(names=("aten.topk.default",), results=(replace(best, name="feed_forward.ranked"), chosen)),
                Operator(names=("aten.gather.default",), results=(best,)),
                Operator(names=("aten.mul.Tensor",), results=(replace(logits, name="feed_forward.entropies"),)),
                Operator(names=_SUM, results=(total,)),
                Operator(names=("aten.div.Tensor",), results=(weights,)),
            ),
        ),
        _moves(
            "feed_forward.spread",
            spread,
            *_SELECT,
            keeps=(order, inverse),
            passes=2.0,
            first=(Operator(names=_SELECT, results=(replace(order, name="feed_forward.by_expert"),)),),
        ),
        _exchange(
            "feed_forward.exchange",
            spread,
            (counts, *travelled[:1]),
            theirs,
            replace(only, name="feed_forward.received"),
        ),
        _grouped(experts, "feed_forward.experts.w1", spread, gate),
        _grouped(experts, "feed_forward.experts.w3", spread, up),
        _moves("feed_forward.experts.silu", silu, "aten.silu.default", keeps=(gate,), passes=2.0),
        _moves("feed_forward.experts.mul", mul, "aten.mul.Tensor", keeps=(silu, up)),
        _grouped(experts, "feed_forward.experts.w2", mul, down),
        _exchange("feed_forward.return", down, (counts, *travelled[1:]), replace(only, name="feed_forward.results")),
        # Reads a row for each of a token's experts, and writes and reads it again with its weight.
        _moves(
            "feed_forward.combine",
            combined,
            *_SUM,
            keeps=(down, weights, order, inverse),
            passes=4.0 * experts.active + 1,
            first=(
                Operator(names=_SELECT, results=(by_token,)),
                Operator(names=("aten.mul.Tensor",), results=(replace(down, name="feed_forward.weighted"),)),
            ),
        ),
    ]


def _grouped(experts: RoutedExperts, name: str, inputs: Activation, result: Activation) -> Operation:
    width = inputs.shape[-1]
    return Operation(
        name=name,
        kind="matmul",
        flops=2 * width * result.shape[0] * result.shape[1] * result.shape[2],
        output=result.shape,
        keeps=(
            inputs,
            Activation(
                name="feed_forward.ends", shape=(experts.count,), cut="all", element_bytes=4, with_experts="stream"
            ),
        ),
        operators=(Operator(names=(GROUPED_PRODUCT,), results=(result,)),),
        groups=experts.count,
    )


def _exchange(name: str, rows: Activation, keeps: tuple[Activation, ...], *results: Activation) -> Operation:
    """Rows that travel to other ranks and are sorted before or after it; only with expert parallelism.

    Args:
        results: of the exchanges: of counts, and of rows.
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


def _moves(
    name: str,
    result: Activation,
    operator: str,
    keeps: tuple[Activation, ...],
    passes: float = 3.0,
    first: tuple[Operator, ...] = (),
    later: tuple[Operator, ...] = (),
) -> Operation:
    """An operation whose time is that of moving its result's bytes; `first`, `later`: the operators around this one."""
    return Operation(
        name=name,
        kind="pointwise",
        flops=0,
        output=result.shape,
        keeps=keeps,
        operators=(*first, Operator(names=(operator,), results=(result,)), *later),
        passes=passes,
    )
