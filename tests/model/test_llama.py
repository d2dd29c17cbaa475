"""Llama against its formulas, written out, and what the module promises to those who take it apart."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.model.published import load
from titanlab.techniques.model import llama
from titanlab.train.initialise import initialise

SEQ = 24


def built(config, *, seq_len=SEQ, seed=1, std=None):
    """A model with initial values, or with larger ones under which every term shows in the logits."""
    model = llama.LlamaModel(config, seq_len=seq_len)
    initialise(model, config.initial_values(), seed)
    if std is not None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=std, generator=generator)
    return model


def random_tokens(config, *shape):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, config, *, place):
    """Rotary embedding of one head at one place: pair by pair, by the formulas of the papers."""
    out = torch.empty_like(x)
    for pair in range(len(x) // 2):
        frequency = config.rope_theta ** (-2 * pair / len(x))
        wavelength = 2 * math.pi / frequency
        if wavelength > config.rope_original_context / config.rope_low_freq_factor:
            frequency /= config.rope_factor
        elif wavelength > config.rope_original_context / config.rope_high_freq_factor:
            low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
            smooth = (config.rope_original_context / wavelength - low) / (high - low)
            frequency = (1 - smooth) * frequency / config.rope_factor + smooth * frequency
        cos, sin = math.cos(place * frequency), math.sin(place * frequency)
        a, b = x[2 * pair], x[2 * pair + 1]
        out[2 * pair], out[2 * pair + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def written_out(model, tokens):
    """Logits [seq, vocab] of one sequence in fp64, without any of the module's code."""
    config = model.config
    weights = {name: value.double() for name, value in model.state_dict().items()}
    shared = config.heads // config.kv_heads
    x = weights["tok_embeddings.weight"][tokens]
    for layer in range(config.layers):
        w = {n.removeprefix(f"layers.{layer}."): v for n, v in weights.items() if n.startswith(f"layers.{layer}.")}
        h = norm(x, w["attention_norm.weight"], config.norm_eps)
        q, k, v = (h @ w[f"attention.w{name}.weight"].T for name in "qkv")
        mixed = torch.zeros_like(x)
        for head in range(config.heads):
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            lent = slice(head // shared * config.head_dim, (head // shared + 1) * config.head_dim)
            qs = torch.stack([turned(row, config, place=i) for i, row in enumerate(q[:, own])])
            ks = torch.stack([turned(row, config, place=i) for i, row in enumerate(k[:, lent])])
            for place in range(len(tokens)):
                scores = ks[: place + 1] @ qs[place] / math.sqrt(config.head_dim)
                mixed[place, own] = torch.softmax(scores, 0) @ v[: place + 1, lent]
        x = x + mixed @ w["attention.wo.weight"].T
        h = norm(x, w["ffn_norm.weight"], config.norm_eps)
        gate = h @ w["feed_forward.w1.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w["feed_forward.w3.weight"].T)) @ w["feed_forward.w2.weight"].T
    head = weights["tok_embeddings.weight" if config.tied_embeddings else "output.weight"]
    return norm(x, weights["norm.weight"], config.norm_eps) @ head.T


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kv_heads": 4},
        {"kv_heads": 1, "tied_embeddings": True},
        # Wavelengths on both sides of both bounds, and between them.
        {"rope_factor": 8.0, "rope_original_context": 64},
    ],
    ids=["shared heads", "own heads", "one kv head, tied", "scaled"],
)
def test_against_the_formulas(change):
    model = built(load("debug", **change), std=0.3)
    tokens = random_tokens(model.config, SEQ)
    expected = written_out(model, tokens)
    torch.testing.assert_close(model(tokens[None])[0].double(), expected, rtol=1e-4, atol=1e-4 * expected.std().item())


def test_far_positions_keep_their_angles():
    table = llama.rope_table(load("debug"), seq_len=100_001)
    assert table.dtype == torch.float32
    assert table[100_000, 0, 0].item() == pytest.approx(math.cos(100_000), abs=1e-7)


def test_positions():
    model = built(load("debug"), seq_len=64, std=0.1)
    tokens = random_tokens(model.config, 2, 16)
    plain = model(tokens)
    each = torch.arange(16).expand(2, -1)
    assert torch.equal(model(tokens, positions=each[0]), plain)
    assert torch.equal(model(tokens, positions=each), plain)
    # Only distances count, for each sequence by itself.
    torch.testing.assert_close(model(tokens, positions=each + torch.tensor([[40], [7]])), plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(tokens, positions=each * 2), plain, atol=1e-3)
    with pytest.raises(ValueError, match="65 tokens, but the model was built for 64"):
        model(random_tokens(model.config, 1, 65))


def test_buffers_are_fp32_whatever_the_parameters_are():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = llama.LlamaModel(load("debug"), seq_len=SEQ)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.norm.weight.dtype == torch.bfloat16
    assert model.rope.dtype == torch.float32
    assert model(random_tokens(model.config, 1, SEQ)).dtype == torch.bfloat16


def test_a_stage_with_a_tied_head_needs_the_table():
    tied = built(load("debug", tied_embeddings=True))
    tied.tok_embeddings = None
    with pytest.raises(RuntimeError, match="tied head needs tok_embeddings"):
        tied(torch.zeros(1, SEQ, tied.config.dim))


@pytest.mark.parametrize(
    "config",
    [
        load("llama_5m", tied_embeddings=True),
        load("llama_5m", dim=1024, heads=16, layers=2, ffn_dim=2816),
    ],
    ids=["tied", "wide"],
)
def test_the_first_loss_is_that_of_a_uniform_guess(config):
    model = built(config, seq_len=128)
    tokens, labels = random_tokens(config, 2, 2, 128)
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).item()
    assert loss == pytest.approx(math.log(config.vocab_size), rel=0.02)
