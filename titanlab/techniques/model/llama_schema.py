"""The Llama family (Llama, Mixtral, Qwen3 with and without experts): configs, and what such a model declares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

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
    Setting,
    block_name,
    divisors,
)
from titanlab.errors import ConfigError
from titanlab.options import OUTSIDE_STEP, option
from titanlab.techniques.model.contract import ModelBuilder, ModelConfig, ReducedSizes
from titanlab.techniques.model.llama_huggingface import (
    EMBEDDING,
    HEAD,
    LlamaFamily,
    MixtralFamily,
    Qwen3Family,
    Qwen3MoeFamily,
)

# Kernels of attention; `auto` is the fastest one on the device that supports the inputs.
ATTENTION_BACKENDS = ("auto", "flash", "cudnn", "efficient", "math", "flash3", "flash_attn")
BALANCES = ("bias", "auxiliary_batch", "auxiliary_sequence", "none")
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
# Models with experts use this in place of the lines for a dense feed-forward.
EXPERTS_PLAN = {
    "layers.*.feed_forward": "experts",
    "layers.*.feed_forward.router": "router",
    "layers.*.feed_forward.experts.w1": "expert_colwise",
    "layers.*.feed_forward.experts.w3": "expert_colwise",
    "layers.*.feed_forward.experts.w2": "expert_rowwise",
}
# Operators of fused attention: device and precision decide which runs; all return output and log-sum-exp of scores.
FUSED_ATTENTION = (
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    CONTEXT_ATTENTION,
)
_SELECT, _SUM, _MUL = "aten.index_select.default", "aten.sum.dim_IntList", "aten.mul.Tensor"


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
    family: ClassVar[type[LlamaFamily]] = LlamaFamily

    kind: str = "llama"
    dim: int = field(metadata={"least": 1, "cure": "try 256"})
    # `most`, because rules and plans loop over all blocks; no known model has more than 1,000.
    layers: int = field(metadata={"least": 1, "most": 10_000, "cure": "try 6"})
    heads: int = field(metadata={"least": 1, "cure": "try 8"})
    kv_heads: int
    ffn_dim: int
    vocab_size: int = field(metadata={"least": 2, "cure": "try 2048, or what the tokenizer has"})
    norm_eps: float = field(default=1e-5, metadata=OUTSIDE_STEP)
    rope_theta: float = field(default=10000.0, metadata=OUTSIDE_STEP)
    rope_factor: float = field(default=1.0, metadata=OUTSIDE_STEP)
    rope_low_freq_factor: float = field(default=1.0, metadata=OUTSIDE_STEP)
    rope_high_freq_factor: float = field(default=4.0, metadata=OUTSIDE_STEP)
    rope_original_context: int = field(default=8192, metadata={"least": 1, **OUTSIDE_STEP})
    tied_embeddings: bool = False
    attention: str = field(default="auto", metadata={"choices": ATTENTION_BACKENDS, "not_priced": ("math",)})
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
        plan = {**TENSOR_PLAN, **(HEAD_NORMS_PLAN if self.has_head_norms else {})}
        if self.routed is not None:
            plan = {**{path: style for path, style in plan.items() if ".feed_forward" not in path}, **EXPERTS_PLAN}
        blocks = [block_name(layer) for layer in range(self.layers)]
        of_block = self._block_parameters()
        parameters: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.dim)}
        for block in blocks:
            parameters.update({f"{block}.{name}": shape for name, shape in of_block.items()})
        parameters["norm.weight"] = (self.dim,)
        if not self.tied_embeddings:
            parameters[HEAD] = (self.vocab_size, self.dim)
        joined = []
        if self.fused:
            # `copied`: without norms of heads, the backward needs the fused product's values, but not its queries and
            # keys: it uses the rotated ones.
            copied = () if self.has_head_norms else ("wv",)
            joined = [Joined(caller="layers.*.attention.projections", layers=("wq", "wk", "wv"), copied=copied)]
            if self.routed is None:
                joined.append(Joined(caller="layers.*.feed_forward.projections", layers=("w1", "w3")))
        return ModelAccount(
            parameters=parameters,
            embedding=EMBEDDING,
            tied={HEAD: EMBEDDING} if self.tied_embeddings else {},
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dim=self.dim,
            vocab_size=self.vocab_size,
            pieces=("tok_embeddings", *blocks, "norm", "output"),
            attention="attention.inner",
            tensor_plan=plan,
            experts=self.routed,
            joined=tuple(joined),
            head="output",
        )

    def _block_parameters(self) -> dict[str, tuple[int, ...]]:
        dim, q_dim, kv_dim = self.dim, self.attention_dim, self.kv_heads * self.head_dim
        head_norms = {f"attention.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        feed_forward: dict[str, tuple[int, ...]] = dict.fromkeys(("w1", "w2", "w3"), (self.ffn_dim, dim))
        feed_forward["w2"] = (dim, self.ffn_dim)
        if self.routed is not None:
            count = self.routed.count
            stacks = {f"experts.{name}": (count, *shape) for name, shape in feed_forward.items()}
            feed_forward = {"router": (count, dim), **stacks}
        return {
            "attention_norm.weight": (dim,),
            "attention.wq.weight": (q_dim, dim),
            "attention.wk.weight": (kv_dim, dim),
            "attention.wv.weight": (kv_dim, dim),
            "attention.wo.weight": (dim, q_dim),
            **(head_norms if self.has_head_norms else {}),
            "ffn_norm.weight": (dim,),
            **{f"feed_forward.{name}.weight": shape for name, shape in feed_forward.items()},
        }

    def initial_values(self) -> dict[str, Init]:
        """The initial value of every parameter, by name.

        Matrices: normal with std 0.02. The std of wo and w2, which write into the residual stream, is divided by
        sqrt(2·layers), so that its variance does not grow with depth (GPT-2; Megatron-LM, arXiv 1909.08053, section 4).
        Norms: ones. The output head, also a tied one, has a std of at most 1/(2·sqrt(dim)): logits of a normalised
        stream then have a std of at most 1/2, and the first loss is at most 1/8 above ln(vocab_size).
        """
        head = EMBEDDING if self.tied_embeddings else HEAD
        values: dict[str, Init] = {}
        for name in self.account().parameters:
            std = 0.02
            if name == head:
                std = min(0.02, 0.5 / math.sqrt(self.dim))
            elif name.endswith((".wo.weight", ".w2.weight")):
                std = 0.02 / math.sqrt(2 * self.layers)
            values[name] = Init(kind="ones") if "norm." in name else Init(kind="normal", std=std)
        return values

    def edge_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        hidden = Activation(name=HIDDEN, shape=(batch, seq_len, self.dim))
        normed = Activation(name="norm", shape=hidden.shape, cut="whole")
        return [
            Operation(name="tok_embeddings", kind="lookup", flops=0, output=hidden.shape),
            norm("norm", hidden),
            matmul("output", normed, self.vocab_size, "part"),
        ]

    def block_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        """The operations of one block's forward pass, in the order in which the module runs them.

        Names are paths in the block. Shapes: `[batch, seq, width]`; `attention.rope_*` give
        `[batch, seq, heads, head_dim]`, `attention.inner` gives `[batch, heads, seq, head_dim]`.

        The rotations save only the table of angles, which all blocks share. Casts are not declared as operators:
        without mixed precision there are none.
        """
        stream = Activation(name=HIDDEN, shape=(batch, seq_len, self.dim))
        attended = replace(stream, name="attention_residual")
        normed, fed = (replace(stream, name=name, cut="whole") for name in ("attention_norm", "ffn_norm"))
        if self.routed is None:
            feed_forward = _feed_forward_operations(self, fed)
        else:
            feed_forward = _experts_operations(self.routed, replace(fed, with_experts="stream"), ffn_dim=self.ffn_dim)
        return [
            norm("attention_norm", stream),
            *_attention_operations(self, normed),
            _pointwise(attended, "aten.add.Tensor"),
            norm("ffn_norm", attended),
            *feed_forward,
            # The result is not declared as saved here: it is the input of the next block, which counts it.
            Operation(name="ffn_residual", kind="pointwise", flops=0, output=stream.shape),
        ]

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
        return cls.family(cls)

    def __post_init__(self) -> None:
        # Two thirds of 4·dim, rounded up to a multiple of 256 (arXiv 2302.13971, section 2.2).
        usual_ffn = max(math.ceil(8 * self.dim / 3 / 256), 1) * 256
        for name, cure in (("kv_heads", f"try {self.heads} (no sharing)"), ("ffn_dim", f"try {usual_ffn}")):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}", getattr(self, name), "must be at least 1", cure)
        self._check_width_of_heads()
        if self.heads % self.kv_heads:
            cure = f"try {nearest(divisors(self.heads), self.kv_heads)}"
            raise ConfigError("model.kv_heads", self.kv_heads, f"must divide {self.heads} query heads", cure)
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        rules = {
            "rope_theta": (1 < self.rope_theta < math.inf, "above 1", "10000 (Llama 2) or 500000 (Llama 3)"),
            "rope_factor": (1 <= self.rope_factor < math.inf, "at least 1", "1 (off), 8 (Llama 3.1) or 32 (3.2)"),
            "rope_low_freq_factor": (0 < low < math.inf, "above 0", "1"),
            "rope_high_freq_factor": (low < high < math.inf, f"above rope_low_freq_factor={low:g}", f"{4 * low:g}"),
        }
        for name, (holds, rule, example) in rules.items():
            if not holds:
                raise ConfigError(f"model.{name}", getattr(self, name), f"must be {rule}", f"try {example}")
        if not 0 < self.norm_eps < 1:
            raise ConfigError("model.norm_eps", self.norm_eps, "must lie between 0 and 1", "try 1e-5")

    def _check_width_of_heads(self) -> None:
        if self.dim % self.heads or self.head_dim % 2:
            # Rotary embedding rotates pairs of a head's elements, so a head needs an even width.
            usable = [n for n in divisors(self.dim) if (self.dim // n) % 2 == 0]
            if not usable:
                raise ConfigError("model.dim", self.dim, "must be even: heads are turned in pairs", "try 256")
            rule = f"must divide dim={self.dim} into heads of even width"
            raise ConfigError("model.heads", self.heads, rule, f"try {nearest(usable, self.heads)}")


def nearest(usable: list[int], value: int) -> str:
    """The nearest usable values below and above the given one."""
    below = [n for n in usable if n < value][-1:]
    above = [n for n in usable if n > value][:1]
    return " or ".join(str(n) for n in (*below, *above))


@dataclass(frozen=True, kw_only=True)
class LlamaOfExperts(Llama):
    """A Llama whose feed-forwards are experts.

    Attributes:
        ffn_dim: width of one expert.
        experts: of each block.
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
    balance: str = field(default="bias", metadata={"choices": BALANCES})
    bias_rate: float = field(default=1e-3, metadata={"least": 0, **OUTSIDE_STEP})
    auxiliary_weight: float = field(default=1e-3, metadata={"least": 0, **OUTSIDE_STEP})

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
            rule = f"counts by sequence, and context={layout.context} splits each sequence"
        elif layout.expert > 1 and layout.tensor > 1:
            rule = "counts by sequence, and with tensor > 1 and expert > 1 each process routes a part of the tokens"
        if rule and self.balance == "auxiliary_sequence":
            raise ConfigError("model.balance", self.balance, rule, "try auxiliary_batch or bias")

    def __post_init__(self) -> None:
        super().__post_init__()
        count, active = self.experts, self.active_experts
        if count < 2:
            rule = "must be at least 2: one expert is a dense feed-forward"
            raise ConfigError("model.experts", count, rule, "try 8, or a dense model")
        if active < 2:
            rule = "must be at least 2: the weight of a single expert is always 1, so that its router learns nothing"
            raise ConfigError("model.active_experts", active, rule, "try 2")
        if active > count:
            raise ConfigError("model.active_experts", active, f"is more than the {count} experts", f"try {count}")


@option("model", "mixtral")
@dataclass(frozen=True, kw_only=True)
class Mixtral(LlamaOfExperts):
    """A Mixtral (arXiv 2401.04088): a Llama whose feed-forwards are experts.

    Mixtral takes the top k logits and then a softmax over these. titanlab takes a softmax over all logits and divides
    the top k probabilities by their sum: the numbers are the same.
    """

    family: ClassVar[type[LlamaFamily]] = MixtralFamily

    kind: str = "mixtral"
    rope_theta: float = 1_000_000.0
    experts: int = 8
    active_experts: int = 2


@option("model", "qwen3")
@dataclass(frozen=True, kw_only=True)
class Qwen3(Llama):
    """A dense Qwen3 (arXiv 2505.09388, section 2): a Llama whose queries and keys are normalised in each head.

    Attributes:
        head_dim: width of a head; heads · head_dim need not be dim.
    """

    has_head_norms: ClassVar[bool] = True
    family: ClassVar[type[LlamaFamily]] = Qwen3Family

    kind: str = "qwen3"
    head_dim: int = 128  # a field here, derived for a Llama
    norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0

    def reduced(self, sizes: ReducedSizes) -> Qwen3:
        """The same as for a Llama, but heads · head_dim stays above, equal to or below dim, as in the full model."""
        attention_dim, unit = sizes.heads * sizes.head_dim, sizes.unit
        if self.attention_dim > self.dim:
            dim = max(unit, attention_dim // 2 // unit * unit)
        else:
            dim = attention_dim if self.attention_dim == self.dim else 2 * attention_dim
        made = replace(self, head_dim=sizes.head_dim)
        return replace(Llama.reduced(made, sizes), dim=dim)  # type: ignore[return-value]

    def _check_width_of_heads(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            rule = "must be an even number of at least 2: heads are turned in pairs"
            raise ConfigError("model.head_dim", self.head_dim, rule, "try 128")


@option("model", "qwen3_moe")
@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Qwen3, LlamaOfExperts):
    """A Qwen3 whose feed-forwards are experts (arXiv 2505.09388, section 2); every block has them, none is shared.

    The probabilities of a token's experts are divided by their sum.
    """

    family: ClassVar[type[LlamaFamily]] = Qwen3MoeFamily

    kind: str = "qwen3_moe"
    experts: int = 128
    active_experts: int = 8


def _attention_operations(config: Llama, normed: Activation) -> list[Operation]:
    """The operations from the projections of the normed stream to the projection of the attention's output."""
    batch, seq_len, dim = normed.shape
    q = Activation(name="attention.wq", shape=(batch, seq_len, config.heads, config.head_dim), cut="part")
    k = replace(q, name="attention.wk", shape=(batch, seq_len, config.kv_heads, config.head_dim))
    kv_dim = config.kv_heads * config.head_dim
    operations = _projections(config, "attention", normed, {"wq": config.attention_dim, "wk": kv_dim, "wv": kv_dim})
    if config.has_head_norms:
        operations += [norm("attention.q_norm", q), norm("attention.k_norm", k)]
    for name, heads in (("attention.rope_q", q), ("attention.rope_k", k)):
        turned = replace(heads, name=f"{name}.turned", element_bytes=4, copy_of=name)
        # passes, in units of a bfloat16 tensor: the cast reads 1 and writes 2, the product reads 2 and writes 2, the
        # cast back reads 2 and writes 1.
        operations.append(_pointwise(turned, _MUL, passes=10.0, name=name))
    inner = _inner_attention(config, batch, seq_len)
    # Fused kernels write their output in the order of tokens; the output of `math` is copied into this order.
    name = f"{inner.name}.by_token" if config.attention == "math" else inner.name
    mixed = Activation(name=name, shape=(batch, seq_len, config.attention_dim), cut="part")
    return [*operations, inner, matmul("attention.wo", mixed, dim, "whole")]


def _inner_attention(config: Llama, batch: int, seq_len: int) -> Operation:
    def heads(name: str, count: int, **changes: Any) -> Activation:
        shape = (batch, count, seq_len, config.head_dim)
        return replace(Activation(name=f"attention.{name}", shape=shape, cut="part"), **changes)

    q, mixed = heads("rope_q", config.heads), heads("inner", config.heads)
    k, v = heads("rope_k", config.kv_heads), heads("wv", config.kv_heads)
    shares_heads = config.heads != config.kv_heads
    if config.attention == "math":
        # The `math` kernel of torch saves scaled q and k, v and the full matrix of weights, all in float32.
        scaled_q, scaled_k = (heads(f"inner.{name}", config.heads, element_bytes=4) for name in "qk")
        wide_v = replace(scaled_q, name="attention.inner.v", copy_of="" if shares_heads else v.name)
        weights = replace(scaled_q, name="attention.inner.weights", shape=(*q.shape[:-1], seq_len))
        scores, masked = (replace(weights, name=f"{weights.name}.{step}") for step in ("product", "masked"))
        kept = [scaled_q, scaled_k, wide_v, weights]
        operators = [
            _operator("aten.mul.Scalar", scaled_q, scaled_k),
            _operator("aten.bmm.default", scores),
            # The sum of the scores and the causal mask.
            _operator("aten.add.Tensor", masked),
            _operator("aten._safe_softmax.default", weights),
            _operator("aten.bmm.default", replace(mixed, name=f"{mixed.name}.product", element_bytes=4)),
        ]
    else:
        lse = Activation(name="attention.inner.lse", shape=q.shape[:-1], cut="part", element_bytes=4)
        kept = [q, k, v, mixed, lse]
        if config.attention == "efficient" and shares_heads:
            # The module repeats key/value heads for every query head before it calls this kernel.
            kept[1:3] = heads("inner.k", config.heads), heads("inner.v", config.heads)
        operators = [Operator(names=FUSED_ATTENTION, results=(mixed, lse))]
    if config.fused and config.has_head_norms:
        # The values are a view of the fused product's whole result: they keep its queries and keys in memory too.
        if config.attention == "math":
            # The math kernel copies the values. On a GPU the norms save their inputs: views of the whole fused result.
            kept.append(replace(v, name="attention.wqkv.values", accelerator="cuda"))
        else:
            before = (("wq", kept[0].shape), ("wk", kept[1].shape))
            kept += (heads(name, 1, shape=(batch, seq_len, *shape[1::2])) for name, shape in before)
    return Operation(
        name="attention.inner",
        kind="attention",
        # Scores and weighted values: two products of 2·seq·seq·head_dim each, for every head.
        flops=2 * 2 * math.prod(q.shape) * seq_len,
        output=q.shape,
        keeps=tuple(kept),
        operators=tuple(operators),
    )


def _feed_forward_operations(config: Llama, fed: Activation) -> list[Operation]:
    gate, up, silu, mul = (
        Activation(name=f"feed_forward.{name}", shape=(*fed.shape[:-1], config.ffn_dim), cut="part")
        for name in ("w1", "w3", "silu", "mul")
    )
    return [
        *_projections(config, "feed_forward", fed, dict.fromkeys(("w1", "w3"), config.ffn_dim)),
        _pointwise(silu, "aten.silu.default", keeps=(gate,), passes=2.0),
        _pointwise(mul, _MUL, keeps=(silu, up)),
        matmul("feed_forward.w2", mul, config.dim, "whole"),
    ]


def _experts_operations(experts: RoutedExperts, fed: Activation, *, ffn_dim: int) -> list[Operation]:
    """The operations of a feed-forward of experts.

    Each token gives one row for each of its experts: the rows of all experts together have the shape
    `[batch, seq · active, width]`.
    """
    batch, seq_len, dim = fed.shape
    whole, rows = (batch, seq_len), (batch, seq_len * experts.active)

    def like(activation: Activation, name: str, **changes: Any) -> Activation:
        return replace(activation, name=f"feed_forward.{name}", **changes)

    # The router computes in float32; torch saves the softmax's result and the indices of the chosen experts.
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
    # The backward pass of the router's tally and balance needs `kept`.
    kept = [Activation(name="feed_forward.entropy", shape=(1,), cut="all", element_bytes=4)]
    if experts.balance.startswith("auxiliary"):
        sequences = batch if experts.balance == "auxiliary_sequence" else 1
        kept.append(like(kept[0], "slope", shape=(sequences, experts.count)))
    ends = like(kept[0], "ends", shape=(experts.count,), with_experts="stream")
    # With expert parallelism only: the order of the rows from other ranks (arrived), the inverse order (returned), and
    # the numbers of rows that the rank sends and gets (counts, theirs), on the host.
    arrived, returned = (like(order, name, with_experts="only") for name in ("arrived", "returned"))
    counts = like(kept[0], "counts", shape=(2, experts.count), element_bytes=8, with_experts="only")
    theirs = like(counts, "theirs", shape=(experts.count,))

    def exchange(name: str, moved: Activation, keeps: Activation, *results: Activation) -> Operation:
        """An operation that sends rows to other ranks, and sorts rows before or after; `results`: what it receives."""
        in_order = like(moved, f"{name}.sorted", with_experts="only")
        return Operation(
            name=f"feed_forward.{name}",
            kind="exchange",
            flops=0,
            output=moved.shape,
            keeps=(counts, keeps),
            operators=(*(_operator(EXCHANGE, result) for result in results), _operator(_SELECT, in_order)),
            passes=2.0,
        )

    def grouped(inputs: Activation, result: Activation) -> Operation:
        product = matmul(result.name, inputs, result.shape[-1], "part")
        operators = (_operator(GROUPED_PRODUCT, result),)
        return replace(product, keeps=(inputs, ends), operators=operators, groups=experts.count)

    return [
        replace(matmul(logits.name, fed, experts.count, "whole"), operators=(_operator("aten.mm.default", logits),)),
        _pointwise(
            scores,
            "aten._softmax.default",
            keeps=(scores, chosen, best, total, *kept),
            passes=6.0,
            name="feed_forward.choose",
            later=(
                _operator("aten.topk.default", like(best, "ranked"), chosen),
                _operator("aten.gather.default", best),
                _operator(_MUL, like(logits, "entropies")),
                _operator(_SUM, total),
                _operator("aten.div.Tensor", weights),
            ),
        ),
        _pointwise(
            spread,
            _SELECT,
            keeps=(order, inverse),
            passes=2.0,
            first=(_operator(_SELECT, like(order, "by_expert")),),
        ),
        exchange("exchange", spread, arrived, theirs, like(spread, "received", with_experts="only")),
        grouped(spread, gate),
        grouped(spread, up),
        _pointwise(silu, "aten.silu.default", keeps=(gate,), passes=2.0),
        _pointwise(mul, _MUL, keeps=(silu, up)),
        grouped(mul, down),
        exchange("return", down, returned, like(spread, "results", with_experts="only")),
        # For each of a token's experts: reads a row, writes the weighted row, and reads that again.
        _pointwise(
            like(fed, "combine"),
            _SUM,
            keeps=(down, weights, order, inverse),
            passes=4.0 * experts.active + 1,
            first=(_operator(_SELECT, like(down, "by_token")), _operator(_MUL, like(down, "weighted"))),
        ),
    ]


def _projections(config: Llama, module: str, inputs: Activation, outputs: Mapping[str, int]) -> list[Operation]:
    """Products of one input with several layers, or one product if they are fused."""
    if not config.fused:
        return [matmul(f"{module}.{name}", inputs, width, "part") for name, width in outputs.items()]
    # The name of the fused product: `wqkv` or `w13`.
    first, *others = outputs
    name = f"{module}.{first}{''.join(other.removeprefix('w') for other in others)}"
    return [replace(matmul(name, inputs, sum(outputs.values()), "part"), layer=f"{module}.{first}")]


def matmul(name: str, inputs: Activation, outputs: int, cut: Cut) -> Operation:
    """A product of inputs [batch, seq, width] with a matrix; autograd saves the inputs."""
    output = (*inputs.shape[:-1], outputs)
    return Operation(
        name=name,
        kind="matmul",
        flops=2 * inputs.shape[-1] * math.prod(output),
        output=output,
        keeps=(inputs,),
        operators=(_operator("aten.mm.default", Activation(name=name, shape=output, cut=cut)),),
    )


def norm(name: str, inputs: Activation) -> Operation:
    """RMSNorm in float32: on a GPU one kernel, which saves its inputs; on a CPU one kernel for each step."""
    rstd = Activation(name=f"{name}.rstd", shape=(*inputs.shape[:-1], 1), cut=inputs.cut, element_bytes=4)
    on_gpu = replace(inputs, accelerator="cuda")
    on_cpu = replace(inputs, accelerator="cpu", element_bytes=4)
    wide = replace(on_cpu, name=f"{name}.wide", copy_of=inputs.name)
    scaled, squares = (replace(on_cpu, name=f"{name}.{step}") for step in ("scaled", "squares"))
    weighted = replace(on_cpu, name=f"{name}.weighted", copy_of=name)
    rstd_on_cpu = replace(rstd, accelerator="cpu")
    return Operation(
        name=name,
        kind="norm",
        flops=0,
        output=inputs.shape,
        keeps=(rstd, on_gpu, wide, scaled),
        operators=(
            _operator("aten._fused_rms_norm.default", replace(on_gpu, name=name), replace(rstd, accelerator="cuda")),
            _operator("aten.pow.Tensor_Scalar", squares),
            _operator("aten.mean.dim", replace(rstd_on_cpu, name=f"{name}.mean")),
            _operator("aten.rsqrt.default", rstd_on_cpu),
            _operator(_MUL, scaled, weighted),
        ),
        passes=2.0,
    )


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
    """An operation that moves its result's bytes `passes` times. `first`, `later` run before and after `operator`."""
    return Operation(
        name=name or result.name,
        kind="pointwise",
        flops=0,
        output=result.shape,
        keeps=keeps,
        operators=(*first, _operator(operator, result), *later),
        passes=passes,
    )


def _operator(name: str, *results: Activation) -> Operator:
    return Operator(names=(name,), results=results)
