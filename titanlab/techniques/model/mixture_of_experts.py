"""A feed-forward of experts; a router chooses a few for each token (arXiv 1701.06538, 2101.03961, 2401.04088).

No token is dropped: the tokens are sorted by expert, and each product multiplies all experts' tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from titanlab.costs import RoutedExperts

# Each row of an operand must begin at a multiple of this number of bytes.
_ALIGNMENT = 16
_grouped_mm: Callable[..., Tensor] = getattr(F, "grouped_mm", None) or torch._grouped_mm


@torch.library.custom_op("titanlab::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The product rows · weight[g]ᵀ for the rows of each group g, by `torch.nn.functional.grouped_mm`.

    It is an operator of its own because torch 2.13 traces `grouped_mm` (for compilation and for tensors without data)
    only in bfloat16, and because the gradients need strides that `grouped_mm` accepts. It can go when
    `torch._meta_registrations` has all dtypes.

    Args:
        rows: [n, in], sorted by group.
        weight: [groups, out, in].
        ends: [groups] int32: number of rows in this and all earlier groups; the last one is n. Groups may be empty.

    Returns:
        [n, out].
    """
    if not rows.shape[0]:
        return rows.new_empty((0, weight.shape[1]))
    product = _multiply(_aligned(rows), _aligned(weight, rows=True).transpose(1, 2), ends)
    return product[:, : weight.shape[1]].contiguous()


@torch.library.custom_op("titanlab::grouped_product_of_inputs", mutates_args=())
def of_inputs(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The gradient of `rows`: [n, out] → [n, in]."""
    if not gradient.shape[0]:
        return gradient.new_empty((0, weight.shape[2]))
    return _multiply(_aligned(gradient), _aligned(weight, rows=True), ends)[:, : weight.shape[2]].contiguous()


@torch.library.custom_op("titanlab::grouped_product_of_weight", mutates_args=())
def of_weight(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    """The gradient of `weight`: [groups, out, in]."""
    out, width = gradient.shape[1], rows.shape[1]
    if not rows.shape[0]:
        return rows.new_zeros((ends.shape[0], out, width))
    return _multiply(_aligned(gradient).t(), _aligned(rows), ends)[:, :out, :width].contiguous()


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


@of_inputs.register_fake
def _(gradient: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return gradient.new_empty((gradient.shape[0], weight.shape[2]))


@of_weight.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], gradient.shape[1], rows.shape[1]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weight, ends = ctx.saved_tensors
    return (
        of_inputs(gradient, weight, ends) if ctx.needs_input_grad[0] else None,
        of_weight(gradient, rows, ends) if ctx.needs_input_grad[1] else None,
        None,
    )


grouped_product.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula([torch.ops.titanlab.grouped_product, torch.ops.titanlab.grouped_product_of_inputs])
def _(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[1] * weight[2]


@register_flop_formula(torch.ops.titanlab.grouped_product_of_weight)
def _(gradient: tuple[int, ...], rows: tuple[int, ...], *_: Any, **__: Any) -> int:
    return 2 * gradient[0] * gradient[1] * rows[1]


def _multiply(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if type(left) is not Tensor and isinstance(left, FakeTensor):
        # When communication is traced, this body runs on tensors without data: return the shape only.
        groups = () if right.ndim == 3 else (ends.shape[0],)
        return left.new_empty((*groups, left.shape[0], right.shape[-1]))
    return _grouped_mm(left, right, offs=ends)


def _aligned(operand: Tensor, *, rows: bool = False) -> Tensor:
    """The operand, contiguous, with zeros at the end of each row until its length is a multiple of the alignment.

    Zeros along the inner dim of a product do not change its result. `contiguous`, as a gradient may have strides of 0.

    Args:
        rows: also add rows of zeros until the number of rows is aligned: for an operand whose number of rows is the
            inner dim of the product, or the row length of its result.
    """
    unit = _ALIGNMENT // operand.element_size()
    missing = (-operand.shape[-1] % unit, -operand.shape[-2] % unit if rows else 0)
    return F.pad(operand, (0, missing[0], 0, missing[1])) if any(missing) else operand.contiguous()


class ExpertChoice(NamedTuple):
    """The experts of each token.

    weights: [tokens, active] float32, whose sum for a token is 1
    experts: [tokens, active] int64, the most probable expert first
    """

    weights: Tensor
    experts: Tensor


class Auxiliary(NamedTuple):
    """The auxiliary loss of load balance, whose gradient a router adds in its backward pass (arXiv 2101.03961).

    For N experts it is weight · N · Σ (share · mean probability) over experts; like the main loss, a mean over tokens.

    shares: [experts], each expert's share of the tokens; None: the shares in each sequence are computed
    weight: factor of this rank's part of the auxiliary loss
    scale: the loss is multiplied by this before its backward; a tensor may change between steps
    seq_len: tokens of a sequence on this rank
    """

    shares: Tensor | None
    weight: float
    scale: float | Tensor
    seq_len: int


class Router(nn.Module):
    """Chooses the `active` most probable experts of each token [tokens, dim]; multiplies in float32.

    Training sets the attributes below; without them the router neither counts nor balances.

    Attributes:
        bias: [experts] float32, which is added to the probabilities for the choice only (arXiv 2408.15664).
        tally: [experts + 1] float32. Its gradient is the count of tokens by expert, and the sum of entropies. Counting
            in the backward pass counts each microbatch once, also if its forward pass is recomputed.
    """

    def __init__(self, dim: int, experts: RoutedExperts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.count, dim))
        self.active = experts.active
        self.bias: Tensor | None = None
        self.auxiliary: Auxiliary | None = None
        self.tally: Tensor | None = None

    def forward(self, tokens: Tensor) -> ExpertChoice:
        return self.choose(tokens, self.weight)

    def choose(self, tokens: Tensor, weight: Tensor) -> ExpertChoice:
        """The choice of experts; the weight may be a plain tensor instead of the parameter."""
        logits: Tensor = WideProduct.apply(tokens, weight)  # type: ignore[no-untyped-call]
        scores = logits.softmax(-1)
        with torch.no_grad():
            ranked = scores if self.bias is None else scores + self.bias
            experts = ranked.topk(self.active, dim=-1).indices
        if self.auxiliary is not None:
            scores = self._with_auxiliary(scores, experts, self.auxiliary)
        best = scores.gather(-1, experts)
        if self.tally is not None:
            with torch.no_grad():
                entropy = -(scores * scores.clamp(min=_SMALLEST).log()).sum()
            best = Tally.apply(best, self.tally, experts, entropy)  # type: ignore[no-untyped-call]
        return ExpertChoice(best / best.sum(-1, keepdim=True), experts)

    def _with_auxiliary(self, scores: Tensor, experts: Tensor, auxiliary: Auxiliary) -> Tensor:
        count = scores.shape[-1]
        with torch.no_grad():
            if auxiliary.shares is None:
                chosen = experts.view(-1, auxiliary.seq_len * self.active)
                counts = scores.new_zeros((chosen.shape[0], count))
                shares = counts.scatter_add(1, chosen, torch.ones_like(chosen, dtype=scores.dtype)) / chosen.shape[1]
            else:
                shares = auxiliary.shares.unsqueeze(0)
            # Subtracting a constant changes no gradient, as probabilities sum to 1; equal shares give exactly zero.
            slope = (shares - 1 / count) * (auxiliary.weight * count)
        added: Tensor = AddSlope.apply(scores, slope, auxiliary.scale)  # type: ignore[no-untyped-call]
        return added


class ExpertLinear(nn.Module):
    """A linear layer of every expert: rows [n, in] sorted by expert, and the end of each expert's rows → [n, out]."""

    def __init__(self, inputs: int, outputs: int, experts: RoutedExperts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts.count, outputs, inputs))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        product: Tensor = grouped_product(rows, self.weight, ends)
        return product

    def extra_repr(self) -> str:
        experts, outputs, inputs = self.weight.shape
        return f"experts={experts}, in={inputs}, out={outputs}"


class Experts(nn.Module):
    """SwiGLU of every expert, w2(silu(w1 x) · w3 x): rows [n, dim] sorted by expert → the same shape."""

    def __init__(self, dim: int, ffn_dim: int, experts: RoutedExperts) -> None:
        super().__init__()
        self.w1 = ExpertLinear(dim, ffn_dim, experts)
        self.w2 = ExpertLinear(ffn_dim, dim, experts)
        self.w3 = ExpertLinear(dim, ffn_dim, experts)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, up = self.w1(rows, ends), self.w3(rows, ends)
        output: Tensor = self.w2(F.silu(gate) * up, ends)
        return output


class MixtureOfExperts(nn.Module):
    """The weighted sum of the chosen experts' outputs, [..., dim] → the same shape.

    Attributes:
        exchange: `titanlab.parallelism.expert.TokenExchange` with expert parallelism; None: this rank has all experts.
    """

    def __init__(self, dim: int, ffn_dim: int, experts: RoutedExperts) -> None:
        super().__init__()
        self.count = experts.count
        self.exchange: Any = None
        self.router = Router(dim, experts)
        self.experts = Experts(dim, ffn_dim, experts)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        choice = self.router(tokens)
        order, inverse, ends = sort_by_expert(choice.experts, self.count)
        rows = Spread.apply(tokens, order, inverse, choice.experts.shape[1])  # type: ignore[no-untyped-call]
        if self.exchange is None:
            rows = self.experts(rows, ends)
        else:
            rows, ends, way = self.exchange.spread(rows, ends)
            rows = self.exchange.gather(self.experts(rows, ends), way)
        output: Tensor = WeightedSum.apply(rows, choice.weights, order, inverse)  # type: ignore[no-untyped-call]
        return output.view(hidden.shape)


def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order that sorts rows by expert; each token has one row for each of its experts.

    Args:
        experts: [tokens, active].

    Returns:
        order [rows]: for each sorted row, its index in `experts.flatten()`. inverse [rows]: for each such index, where
        its row is in the sorted order. ends [count] int32: number of rows of this and all earlier experts.
    """
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    places = torch.arange(flat.shape[0], device=flat.device)
    inverse = torch.zeros_like(order).scatter(0, order, places)
    numbers = torch.arange(count, device=flat.device)
    ends = torch.searchsorted(flat.index_select(0, order), numbers, right=True, out_int32=True)
    return order, inverse, ends


# Smaller probabilities are raised to this before the logarithm.
_SMALLEST = 1e-30


class Tally(torch.autograd.Function):
    """Identity of `best`; the backward computes the tally's gradient: tokens by expert, and the sum of entropies."""

    @staticmethod
    def forward(ctx: Any, best: Tensor, tally: Tensor, experts: Tensor, entropy: Tensor) -> Tensor:
        ctx.save_for_backward(experts, entropy)
        ctx.count = tally.shape[0] - 1
        return best.view_as(best)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        experts, entropy = ctx.saved_tensors
        flat = experts.flatten()
        counts = entropy.new_zeros(ctx.count).scatter_add(0, flat, torch.ones_like(flat, dtype=entropy.dtype))
        return gradients[0], torch.cat((counts, entropy.view(1))), None, None


class AddSlope(torch.autograd.Function):
    """Identity of scores [tokens, experts]; the backward adds slope [sequences or 1, experts] · scale."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, slope: Tensor, scale: float | Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.scale = scale
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (slope,) = gradients, ctx.saved_tensors
        by_sequence = gradient.unflatten(0, (slope.shape[0], -1)) + (slope * ctx.scale).unsqueeze(1)
        return by_sequence.flatten(0, 1), None, None


class WideProduct(torch.autograd.Function):
    """tokens · weightᵀ in float32; saves both operands for the backward in their own precision."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return F.linear(tokens.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (tokens, weight) = gradients, ctx.saved_tensors
        return (gradient @ weight.float()).to(tokens.dtype), (gradient.t() @ tokens.float()).to(weight.dtype)


# Spread and WeightedSum read by index, also in the backward. The backward of torch's own indexing adds instead, in the
# order of a GPU's threads, so that its sums may differ from run to run.


class Spread(torch.autograd.Function):
    """Tokens [tokens, dim] → rows [tokens · active, dim] in the order of experts."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, active: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.active = active
        return tokens.index_select(0, order // active)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _by_token(gradients[0], inverse, ctx.active).sum(1), None, None, None


class WeightedSum(torch.autograd.Function):
    """Rows [tokens · active, dim] in the order of experts, weights [tokens, active] → their sums [tokens, dim]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        return (_by_token(rows, inverse, weights.shape[1]) * weights.to(rows.dtype).unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,), (rows, weights, order, inverse) = gradients, ctx.saved_tensors
        active = weights.shape[1]
        own = weights.to(rows.dtype).flatten().index_select(0, order).unsqueeze(-1)
        of_rows = gradient.index_select(0, order // active) * own
        # Compute this gradient in float32, because the router computes in float32.
        of_weights = (_by_token(rows, inverse, active).float() * gradient.unsqueeze(1)).sum(-1)
        return of_rows, of_weights, None, None


def _by_token(rows: Tensor, inverse: Tensor, active: int) -> Tensor:
    """[tokens · active, dim] in the order of experts → [tokens, active, dim]."""
    by_token: Tensor = rows.index_select(0, inverse).unflatten(0, (-1, active))
    return by_token
