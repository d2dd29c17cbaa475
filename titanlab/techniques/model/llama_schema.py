"""Configs of the Llama family: Llama, Mixtral, and Qwen3 with and without experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from titanlab.costs import Init, ModelAccount, Operation, RoutedExperts, Setting, divisors
from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.model import llama_account
from titanlab.techniques.model.contract import ModelBuilder, ModelConfig, ReducedSizes
from titanlab.techniques.model.llama_huggingface import LlamaFamily, MixtralFamily, Qwen3Family, Qwen3MoeFamily

# Kernels of attention; `auto` is the fastest one on the device that supports the inputs.
ATTENTION_BACKENDS = ("auto", "flash", "cudnn", "efficient", "math", "flash3", "flash_attn")


@option("model", "llama")
@dataclass(frozen=True, kw_only=True)
class Llama(ModelConfig):
    """A decoder-only transformer of the Llama family (arXiv 2302.13971, 2307.09288, 2407.21783).

    Attributes:
        dim: width of the residual stream.
        heads: query heads, each of width dim / heads.
        kv_heads: key/value heads; heads / kv_heads query heads share each of them (arXiv 2305.13245).
        ffn_dim: width of the SwiGLU feed-forward; not derived from dim.
        vocab_size: rows of the embedding and of the output head.
        norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_factor: context extension of Llama 3.1 and 3.2: frequencies with a wavelength above
            rope_original_context / rope_low_freq_factor are divided by it, those with a wavelength below
            rope_original_context / rope_high_freq_factor are kept, and between them the two are blended. 1 is off.
        rope_low_freq_factor, rope_high_freq_factor, rope_original_context: see rope_factor.
        tied_embeddings: the output head uses the embedding's weight (Llama 3.2).
        attention: kernel of the attention: auto, the fastest that supports the inputs; flash, cudnn, efficient, math,
            a kernel of torch; flash3, FlashAttention 3 through torch; flash_attn, the kernel of the package flash-attn.
        fused: one matrix product for queries, keys and values, and one for gate and up of the feed-forward. Parameters
            keep their names, shapes and initial values. The experts of models with experts are not fused.
    """

    # Whether each head of queries and keys is normalised before the rotation.
    has_head_norms: ClassVar[bool] = False
    masks_documents: ClassVar[bool] = True

    kind: str = "llama"
    dim: int
    # Rules and plans loop over all blocks; no known model has more than 1,000.
    layers: int = field(metadata={"most": 10_000})
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_context: int = 8192
    tied_embeddings: bool = False
    attention: str = "auto"
    fused: bool = field(default=False, metadata={"before": False})

    @property
    def routed(self) -> RoutedExperts | None:
        """The experts of the feed-forwards; a Llama has none."""
        return None

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def attention_dim(self) -> int:
        return self.heads * self.head_dim

    def account(self) -> ModelAccount:
        return llama_account.account(self)

    def block_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        return llama_account.block_operations(self, batch=batch, seq_len=seq_len)

    def edge_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        return llama_account.edge_operations(self, batch=batch, seq_len=seq_len)

    def initial_values(self) -> dict[str, Init]:
        return llama_account.initial_values(self)

    def implementation(self) -> ModelBuilder:
        from titanlab.techniques.model.llama import LlamaBuilder

        return LlamaBuilder(self)

    def reduced(self, sizes: ReducedSizes) -> Llama:
        return replace(
            self,
            dim=sizes.heads * sizes.head_dim,
            layers=sizes.layers,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            ffn_dim=sizes.ffn_dim,
            vocab_size=sizes.vocab_size,
        )

    @classmethod
    def hugging_face(cls) -> LlamaFamily:
        return LlamaFamily(cls)

    def __post_init__(self) -> None:
        cures = {
            "dim": "try 256",
            "layers": "try 6",
            "heads": "try 8",
            "kv_heads": f"try {max(self.heads, 1)} (no sharing)",
            # Two thirds of 4·dim, rounded up to a multiple of 256 (arXiv 2302.13971, section 2.2).
            "ffn_dim": f"try {max(math.ceil(8 * self.dim / 3 / 256), 1) * 256}",
            "vocab_size": "try 2048, or what the tokenizer has",
            "rope_original_context": "try 8192",
        }
        for name, cure in cures.items():
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}", getattr(self, name), "must be at least 1", cure)
        if self.vocab_size < 2:
            raise ConfigError("model.vocab_size", self.vocab_size, "must be at least 2", cures["vocab_size"])
        self._check_width_of_heads()
        if self.heads % self.kv_heads:
            cure = f"try {nearest(divisors(self.heads), self.kv_heads)}"
            raise ConfigError("model.kv_heads", self.kv_heads, f"must divide {self.heads} query heads", cure)
        self._check_rope()
        if not 0 < self.norm_eps < 1:
            raise ConfigError("model.norm_eps", self.norm_eps, "must lie between 0 and 1", "try 1e-5")
        if self.attention not in ATTENTION_BACKENDS:
            known = ", ".join(ATTENTION_BACKENDS)
            raise ConfigError("model.attention", self.attention, "no such attention kernel", f"choose one of {known}")

    def _check_width_of_heads(self) -> None:
        if self.dim % self.heads or self.head_dim % 2:
            # Rotary embedding rotates pairs of a head's elements, so a head needs an even width.
            usable = [n for n in divisors(self.dim) if (self.dim // n) % 2 == 0]
            if not usable:
                raise ConfigError("model.dim", self.dim, "must be even: heads are turned in pairs", "try 256")
            rule = f"must divide dim={self.dim} into heads of even width"
            raise ConfigError("model.heads", self.heads, rule, f"try {nearest(usable, self.heads)}")

    def _check_rope(self) -> None:
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 1):
            cure = "try 10000 (Llama 2) or 500000 (Llama 3)"
            raise ConfigError("model.rope_theta", self.rope_theta, "must be above 1", cure)
        if not (math.isfinite(self.rope_factor) and self.rope_factor >= 1):
            cure = "try 1 (off), 8 (Llama 3.1) or 32 (3.2)"
            raise ConfigError("model.rope_factor", self.rope_factor, "must be at least 1", cure)
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        if not (math.isfinite(low) and low > 0):
            raise ConfigError("model.rope_low_freq_factor", low, "must be above 0", "try 1")
        if not (math.isfinite(high) and high > low):
            rule = f"must be above rope_low_freq_factor={low:g}"
            raise ConfigError("model.rope_high_freq_factor", high, rule, f"try {4 * low:g}")


def nearest(usable: list[int], value: int) -> str:
    """The nearest usable values below and above the given one."""
    below = [n for n in usable if n < value][-1:]
    above = [n for n in usable if n > value][:1]
    return " or ".join(str(n) for n in (*below, *above))


BALANCES = ("bias", "auxiliary_batch", "auxiliary_sequence", "none")


@dataclass(frozen=True, kw_only=True)
class ExpertFields(ModelConfig):
    """The fields of models whose feed-forwards are experts.

    Attributes:
        experts: of each block; ffn_dim is the width of one.
        active_experts: that compute each token.
        balance: how the load of experts is balanced. `bias` adds a bias to the probabilities for the choice of experts
            only; after each step it grows for experts with fewer tokens than the mean, and shrinks for the others
            (arXiv 2408.15664). `auxiliary_batch` adds a loss with the shares of tokens in the step before, over all
            ranks; `auxiliary_sequence` one with the shares in each sequence (arXiv 2101.03961, 2412.19437).
        bias_rate: how much a bias changes in a step.
        auxiliary_weight: of the auxiliary loss of each block.
    """

    experts: int
    active_experts: int
    balance: str = "bias"
    bias_rate: float = 1e-3
    auxiliary_weight: float = 1e-3

    @property
    def routed(self) -> RoutedExperts:
        return RoutedExperts(
            count=self.experts,
            active=self.active_experts,
            balance=self.balance,
            bias_rate=self.bias_rate,
            auxiliary_weight=self.auxiliary_weight,
        )

    def check(self, setting: Setting) -> None:
        super().check(setting)
        layout, rule = setting.layout, ""
        if layout.context > 1:
            rule = f"counts by sequence, of which context={layout.context} gives each process a part"
        elif layout.expert > 1 and layout.tensor > 1:
            rule = "counts by sequence, and with tensor > 1 and expert > 1 each process routes a part of the tokens"
        if rule and self.balance == "auxiliary_sequence":
            raise ConfigError("model.balance", self.balance, rule, "try auxiliary_batch or bias")

    def check_routing(self) -> None:
        """Raise ConfigError if one of the fields above breaks a rule."""
        count, active = self.experts, self.active_experts
        if count < 2:
            rule = "must be at least 2: one expert is a dense feed-forward"
            raise ConfigError("model.experts", count, rule, "try 8, or a dense model")
        if active < 2:
            rule = "must be at least 2: the weight of a single expert is always 1, so that its router learns nothing"
            raise ConfigError("model.active_experts", active, rule, "try 2")
        if active > count:
            raise ConfigError("model.active_experts", active, f"is more than the {count} experts", f"try {count}")
        if self.balance not in BALANCES:
            raise ConfigError("model.balance", self.balance, "no such balance", f"choose one of {', '.join(BALANCES)}")
        for name, cure in (("bias_rate", "try 0.001"), ("auxiliary_weight", "try 0.001")):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"model.{name}", value, "must be finite and at least 0", cure)


@option("model", "mixtral")
@dataclass(frozen=True, kw_only=True)
class Mixtral(ExpertFields, Llama):
    """A Mixtral (arXiv 2401.04088): a Llama whose feed-forwards are experts.

    Mixtral takes the top k logits and then a softmax over these. titanlab takes a softmax over all and divides the top
    k by their sum: the numbers are the same.

    Attributes:
        ffn_dim: width of one expert.
    """

    kind: str = "mixtral"
    rope_theta: float = 1_000_000.0
    experts: int = 8
    active_experts: int = 2

    @classmethod
    def hugging_face(cls) -> MixtralFamily:
        return MixtralFamily(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_routing()


@option("model", "qwen3")
@dataclass(frozen=True, kw_only=True)
class Qwen3(Llama):
    """A dense Qwen3 (arXiv 2505.09388, section 2): a Llama whose queries and keys are normalised in each head.

    Attributes:
        head_dim: width of a head; heads · head_dim need not be dim.
    """

    has_head_norms: ClassVar[bool] = True

    kind: str = "qwen3"
    head_dim: int = 128  # a field here, derived for a Llama
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    def reduced(self, sizes: ReducedSizes) -> Qwen3:
        """As for a Llama; heads that are wider or narrower than the stream stay so."""
        attention_dim, unit = sizes.heads * sizes.head_dim, sizes.unit
        if self.attention_dim > self.dim:
            dim = max(unit, attention_dim // 2 // unit * unit)
        else:
            dim = attention_dim if self.attention_dim == self.dim else 2 * attention_dim
        made = replace(self, head_dim=sizes.head_dim)
        return replace(Llama.reduced(made, sizes), dim=dim)  # type: ignore[return-value]

    @classmethod
    def hugging_face(cls) -> Qwen3Family:
        return Qwen3Family(cls)

    def _check_width_of_heads(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            rule = "must be an even number of at least 2: heads are turned in pairs"
            raise ConfigError("model.head_dim", self.head_dim, rule, "try 128")


@option("model", "qwen3_moe")
@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(ExpertFields, Qwen3):
    """A Qwen3 whose feed-forwards are experts (arXiv 2505.09388, section 2); every block has them, none is shared.

    Attributes:
        ffn_dim: width of one expert.
        active_experts: number of experts for each token; their probabilities are divided by their sum.
    """

    kind: str = "qwen3_moe"
    experts: int = 128
    active_experts: int = 8

    @classmethod
    def hugging_face(cls) -> Qwen3MoeFamily:
        return Qwen3MoeFamily(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_routing()
