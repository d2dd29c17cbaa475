"""Attention over several ranks is one process's attention: outputs, gradients, and nothing sent that is not used."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from benchmarks.context_memory import measure, model_config
from titanlab.errors import ConfigError
from titanlab.parallelism import Parallelism, attention_kernels, check_attention, context, positions
from titanlab.parallelism.context import EXCHANGES, ContextAttention, attention
from titanlab.techniques.model import llama
from titanlab.techniques.model.attention import InnerAttention
from titanlab.techniques.model.llama_schema import Llama

SEQ = 48
HEADS = 4
FP32_ERROR = 2e-6
METHODS = ("ring", "all_gather")


def opened():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    return dist.group.WORLD


def inputs(batch, kv_heads, head_dim, dtype=torch.float32, seed=0):
    """q, k, v and the output's gradient, [batch, seq, heads, head_dim]: of values that dtype has."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    return [torch.randn(batch, SEQ, count, head_dim, generator=generator).to(dtype) for count in heads]


def attend(function, q, k, v, grad):
    """The output and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def whole(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def own(x):
    """What this rank holds of [batch, seq, …]."""
    return x[:, positions(x.shape[1], ranks=dist.get_world_size(), rank=dist.get_rank())]


def largest_error(module, given):
    """Against one process, of output, dq, dk, dv: the largest difference, where values exceed 1 as a share of those."""
    expected = attend(whole, *given)
    found = attend(module, *map(own, given))
    pairs = [(a, own(b)) for a, b in zip(found, expected, strict=True)]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs)


def fp32_errors():
    group, errors = opened(), {}
    for method, kv_heads, batch, head_dim in itertools.product(METHODS, (4, 2), (1, 3), (16, 64)):
        given = inputs(batch, kv_heads, head_dim)
        errors[method, kv_heads, batch, head_dim] = largest_error(ContextAttention(method, group), given)
    return errors


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_one_process(pool, ranks):
    for errors in pool.run(ranks, fp32_errors):
        assert max(errors.values()) <= FP32_ERROR, errors


def bf16_errors():
    """Per tensor: ‖Δ‖/‖ref‖ against fp32 on the same values, of the ranks' result and of one process in bf16."""
    group, errors = opened(), {}
    for method, kv_heads, batch in itertools.product(METHODS, (4, 2), (1, 3)):
        given = inputs(batch, kv_heads, 32, torch.bfloat16)
        exact = attend(whole, *(x.float() for x in given))
        single = attend(whole, *given)
        found = attend(ContextAttention(method, group), *map(own, given))
        for name, *tensors in zip(("out", "dq", "dk", "dv"), found, map(own, single), map(own, exact), strict=True):
            ours, theirs, reference = (x.double() for x in tensors)
            assert tensors[0].dtype == torch.bfloat16
            norm = reference.norm()
            errors[method, kv_heads, batch, name] = (
                ((ours - reference).norm() / norm).item(),
                ((theirs - reference).norm() / norm).item(),
            )
    return errors


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_bf16_is_as_exact_as_one_process_in_bf16(pool, ranks):
    # Kernels round each part to 8 bits of mantissa, and sums are rounded once more: independent errors of about the
    # size of those that one process makes (2⁻⁹ each), so √2 times as much, and never twice.
    for errors in pool.run(ranks, bf16_errors):
        for case, (ours, single) in errors.items():
            assert ours <= max(1.6 * single, 2**-8), (case, ours, single)


def other_layouts():
    """Strides that are not a projection's; gradients of stride 0; no gradients at all."""
    group, errors = opened(), {}
    q, k, v, _ = inputs(2, 2, 16)
    one = torch.ones(()).expand_as(q)
    fused = torch.cat((q, k, v), dim=2)
    slices = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
    for method in METHODS:
        module = ContextAttention(method, group)
        errors[method, "fused"] = largest_error(module, (*slices, one))
        heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        errors[method, "heads first"] = largest_error(module, (*heads_first, one))
        with torch.no_grad():
            out = module(*(own(x).transpose(1, 2) for x in (q, k, v)))
        assert out.transpose(1, 2).is_contiguous()
        expected = own(whole(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)).transpose(1, 2)
        errors[method, "no gradients"] = (out - expected).abs().max().item()
    return errors


def test_any_strides_do(pool):
    for errors in pool.run(2, other_layouts):
        assert max(errors.values()) <= FP32_ERROR, errors


def test_parts_are_merged_by_their_denominators():
    """Also where an exponential would overflow, and where a part has no weight."""
    for offset in (0.0, 1000.0, -1000.0):
        scores = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) + offset
        values = torch.tensor([[1.0], [2.0], [4.0], [8.0]], dtype=torch.float64)

        def part(chosen, scores=scores, values=values):
            out = (scores[chosen].softmax(0) @ values[chosen]).view(1, 1, 1, 1)
            return out, scores[chosen].logsumexp(0).view(1, 1, 1)

        out, lse = part(slice(0, 1))
        context.merge(out, lse, *part(slice(1, 4)))
        torch.testing.assert_close((out, lse), part(slice(0, 4)), rtol=1e-12, atol=1e-12)
        context.merge(out, lse, torch.full_like(out, 7.0), torch.full_like(lse, -torch.inf))
        torch.testing.assert_close((out, lse), part(slice(0, 4)), rtol=1e-12, atol=1e-12)


def traffic():
    """Elements of K/V and gradients sent by this rank, of a block of K and V; and what happened first."""
    group, sent, order = opened(), [], []
    given = list(map(own, inputs(2, 2, 16)))
    block = 2 * given[1].numel()

    usual = context.transfer

    def told(going, *rest):
        sent.append(sum(x.numel() for x in going) / block)
        order.append("send")
        received = usual(going, *rest)
        return lambda: order.append("wait") or received()

    def noted(function):
        return lambda *tensors, causal: order.append("compute") or function(*tensors, causal=causal)

    plain = attention_kernels.CPU
    kernel = attention_kernels.AttentionKernel(noted(plain.forward), noted(plain.backward))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(context, "transfer", told)
        monkeypatch.setattr(attention_kernels, "CPU", kernel)
        module = ContextAttention("ring", group)
        leaves = [x.requires_grad_() for x in given[:3]]
        out = module(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
        forward = list(sent), list(order)
        sent.clear()
        order.clear()
        out.backward(given[3])
    return *forward, sent, order


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_sends_what_is_used_and_computes_meanwhile(pool, ranks):
    answers = pool.run(ranks, traffic)
    used = 0.75 * ranks * (ranks - 1)
    assert sum(sum(sent) for sent, *_ in answers) == used
    assert sum(sum(sent) for _, _, sent, _ in answers) == 2 * used
    for sent, order, _, back in answers:
        hops = ranks - 1
        assert len(sent) == hops
        # Two local parts; then, for every hop but the last, the next is sent before the block is used.
        assert order == ["send", "compute", "compute", *["wait", "send", "compute"] * (hops - 1), "wait", "compute"]
        # Gradients go with one hop of delay, and the last of them under the last local part.
        first = ["wait", "send", "compute", "send"] if hops > 1 else ["wait", "compute", "send"]
        middle = ["wait", "send", "compute", "wait", "send"] * (hops - 2)
        last = ["wait", "compute", "wait", "send"] if hops > 1 else []
        assert back == ["send", "compute", *first, *middle, *last, "compute", "wait"]


class Scaled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, q, k, v):
        """[batch, seq, heads, head_dim], as a block has them."""
        return 2 * self.inner(*(x.transpose(1, 2) for x in (q, 3 * k, v))).transpose(1, 2)


def compiled_errors():
    group, errors = opened(), {}
    given = list(map(own, inputs(2, 2, 16)))
    for method in METHODS:
        results = []
        module = Scaled(ContextAttention(method, group))
        for function in (module, torch.compile(module, backend="aot_eager", fullgraph=True)):
            leaves = [x.clone().requires_grad_() for x in given[:3]]
            out = function(*leaves)
            out.backward(given[3])
            results.append([out, *(x.grad for x in leaves)])
        errors[method] = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
    torch._dynamo.reset()
    return errors


def test_a_compiled_block_holds_it_without_a_graph_break(pool):
    for errors in pool.run(2, compiled_errors):
        assert errors == {"ring": 0, "all_gather": 0}


def checked_operator():
    group = opened()
    q, k, v, _ = (own(x).transpose(1, 2).requires_grad_() for x in inputs(2, 2, 16))
    for method in METHODS:
        torch.library.opcheck(attention, (q, k, v, None, method, group.group_name, "auto"))


@pytest.mark.filterwarnings("default")
def test_the_operator_is_what_it_says_it_is(pool):
    pool.run(1, checked_operator)


class Causal(torch.nn.Module):
    """A package's own attention; it attends to the last `window` keys."""

    def __init__(self, window=None, scale=None):
        super().__init__()
        self.window, self.scale = window, scale

    def forward(self, q, k, v):
        ones = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        mask = ones if self.window is None else ones.triu(1 - self.window)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)


class Renamed(InnerAttention):
    """Computes what its class does."""


class Softcapped(InnerAttention):
    """Computes something else, in another method than forward."""

    def __call__(self, q, k, v):
        return super().__call__(q, 0.5 * k, v)


class WithSinks(Causal):
    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.zeros(4))


def patched(change):
    module = InnerAttention()
    change(module)
    return module


ATTENTIONS = {
    "titanlab's": (InnerAttention(), ""),
    "a kernel of a GPU": (InnerAttention("cudnn"), ""),
    "a subclass": (Renamed(), ""),
    "a package's": (Causal(), ""),
    "another scale": (Causal(scale=0.3), "has another forward (Causal)"),
    "a window": (Causal(window=SEQ - 1), "has another forward (Causal)"),
    "a subclass's call": (Softcapped(), "has another forward (Softcapped)"),
    "parameters": (WithSinks(), "has another forward (WithSinks)"),
    "no attention": (torch.nn.Identity(), "has another forward (Identity)"),
    "attribute": (patched(lambda it: setattr(it, "forward", lambda q, k, v: v)), "has another forward (InnerAttention)"),
    "hook": (patched(lambda it: it.register_forward_hook(lambda _, __, output: 2 * output)), "has hooks"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_that_is_not_causal_is_not_replaced(name):
    module, how = ATTENTIONS[name]
    config = Llama(dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=96, vocab_size=64)
    with torch.device("meta"):
        model = llama.LlamaModel(config, seq_len=SEQ)
    model.layers["1"].attention.inner = module
    refused = pytest.raises(ConfigError) if how else contextlib.nullcontext()
    random = torch.random.get_rng_state()
    with refused as error:
        check_attention(model, config.account(), seq_len=SEQ, context=2)
    if how:
        path = "layers.1.attention.inner"
        rule = f"computes {path} as causal softmax(q·kᵀ/√head_dim)·v, and {path} {how}"
        cure = "try 1, or titanlab.techniques.model.attention.InnerAttention"
        assert str(error.value) == f"parallelism.context=2: {rule}; {cure}"
    assert torch.equal(random, torch.random.get_rng_state())


def test_positions_are_a_partition_from_both_ends():
    for ranks in range(1, 9):
        held = [positions(16 * ranks, ranks=ranks, rank=rank) for rank in range(ranks)]
        assert sorted(torch.cat(held).tolist()) == list(range(16 * ranks))
        # As many keys before the rows of one rank as before those of another.
        assert len({places.sum().item() for places in held}) == 1
        assert all((places.diff() > 0).all() for places in held)
    assert positions(8, ranks=2, rank=0).tolist() == [0, 1, 6, 7]
    assert positions(8, ranks=2, rank=1).tolist() == [2, 3, 4, 5]


def test_each_method_of_the_config_is_an_exchange():
    choices = Parallelism.__dataclass_fields__["context_method"].metadata["choices"]
    assert tuple(EXCHANGES) == METHODS == choices


def figures(method):
    opened()
    return measure(model_config(dim=64, layers=2), seq=2048, batch=1, method=method)


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_peak_activation_bytes_fall_with_the_degree(pool, method):
    (single,) = pool.run(1, figures, method)
    # One matrix of float32 scores would be more than everything there is.
    assert single["peak_bytes"] < 4 * 4 * 2048**2
    spread = pool.run(4, figures, method)
    assert sum(each["loss"] for each in spread) == pytest.approx(single["loss"], rel=1e-6)
    for each in spread:
        assert each["peak_bytes"] * 4 == pytest.approx(single["peak_bytes"], rel=0.15)
