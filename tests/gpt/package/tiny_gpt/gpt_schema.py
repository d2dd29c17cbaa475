"""Config of GPT models, and what such a model is, as data. Torch-free, as every schema."""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlab.costs import Init, ModelAccount, Operation, Setting
from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.model.contract import ModelBuilder, ModelConfig

TENSOR_PLAN = {
    "embedding.tokens": "embedding",
    "embedding.places": "embedding",
    "layers.*.ln_1": "norm",
    "layers.*.attn": "gathered",
    "layers.*.attn.query": "colwise",
    "layers.*.attn.key": "colwise",
    "layers.*.attn.value": "colwise",
    "layers.*.attn.out": "rowwise",
    "layers.*.ln_2": "norm",
    "layers.*.mlp": "gathered",
    "layers.*.mlp.up": "colwise",
    "layers.*.mlp.down": "rowwise",
    "norm": "norm",
    "head": "head",
}


@option("model", "gpt")
@dataclass(frozen=True, kw_only=True)
class Gpt(ModelConfig):
    """A decoder-only transformer like GPT-2: LayerNorm, learned positions, GELU, biases.

    Attributes:
        width: of the residual stream.
        depth: number of blocks.
        heads: attention heads.
        places: positions that the model learns; no sequence is longer.
        vocab_size: rows of the embedding and of the head.
        tied_head: the head multiplies with the embedding's table.
    """

    kind: str = "gpt"
    width: int
    depth: int
    heads: int
    places: int
    vocab_size: int
    tied_head: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError("model.heads", self.heads, f"must divide width={self.width}", "try 1")

    def check(self, setting: Setting) -> None:
        """The rule that reaches beyond the model's own fields."""
        if setting.seq_len > self.places:
            rule = f"is longer than the {self.places} positions that the model learns"
            raise ConfigError("training.seq_len", setting.seq_len, rule, f"try {self.places}")

    def implementation(self) -> ModelBuilder:
        # Here and nowhere else: it imports torch.
        from tiny_gpt.gpt import GptBuilder

        return GptBuilder(self)

    def account(self) -> ModelAccount:
        """Parameters in the order of `named_parameters()`, and the sizes that sums need."""
        width, table = self.width, (self.vocab_size, self.width)
        parameters = {"embedding.tokens.weight": table, "embedding.places.weight": (self.places, width)}
        for index in range(self.depth):
            for name, shape in self._block().items():
                parameters[f"layers.{index}.{name}.weight"] = shape
                if name != "attn.key":
                    parameters[f"layers.{index}.{name}.bias"] = shape[:1]
        parameters.update({"norm.weight": (width,), "norm.bias": (width,)})
        if not self.tied_head:
            parameters["head.weight"] = table
        parameters["head.bias"] = table[:1]
        return ModelAccount(
            parameters=parameters,
            embedding="embedding.tokens.weight",
            lookups=("embedding.places.weight",),
            tied={"head.weight": "embedding.tokens.weight"} if self.tied_head else {},
            layers=self.depth,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=width // self.heads,
            dim=width,
            vocab_size=self.vocab_size,
            pieces=("embedding", *(f"layers.{index}" for index in range(self.depth)), "norm", "head"),
            head="head",
            attention="attn.inner",
            tensor_plan=TENSOR_PLAN,
        )

    def block_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        """One block's forward pass: names are paths of modules where a module does it."""
        width, heads, head_dim = self.width, self.heads, self.width // self.heads
        hidden, scores = (batch, seq_len, width), 2 * batch * heads * seq_len * seq_len * head_dim

        def linear(name: str, inputs: int, outputs: int) -> Operation:
            output = (batch, seq_len, outputs)
            return Operation(name=name, kind="matmul", flops=2 * inputs * math.prod(output), output=output)

        def moved(name: str, kind: str, shape: tuple[int, ...] = hidden) -> Operation:
            return Operation(name=name, kind=kind, flops=0, output=shape)

        return [
            moved("ln_1", "norm"),
            *(linear(f"attn.{name}", width, width) for name in ("query", "key", "value")),
            Operation(name="attn.inner", kind="attention", flops=2 * scores, output=(batch, heads, seq_len, head_dim)),
            linear("attn.out", width, width),
            moved("attn_residual", "pointwise"),
            moved("ln_2", "norm"),
            linear("mlp.up", width, 4 * width),
            moved("mlp.gelu", "pointwise", (batch, seq_len, 4 * width)),
            linear("mlp.down", 4 * width, width),
            moved("mlp_residual", "pointwise"),
        ]

    def edge_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        """What happens before and after the blocks; each is named as its piece."""
        hidden, logits = (batch, seq_len, self.width), (batch, seq_len, self.vocab_size)
        return [
            Operation(name="embedding", kind="lookup", flops=0, output=hidden),
            Operation(name="norm", kind="norm", flops=0, output=hidden),
            Operation(name="head", kind="matmul", flops=2 * self.width * math.prod(logits), output=logits),
        ]

    def initial_values(self) -> dict[str, Init]:
        """GPT-2's: normal with 0.02, less where a block writes into the stream, and norms 1. Biases too are not
        zero: the very first step would tell one that is added twice."""
        values: dict[str, Init] = {}
        for name in self.account().parameters:
            if name.endswith("weight") and ("norm." in name or ".ln_" in name):
                values[name] = Init(kind="ones")
            else:
                writes = name.endswith(("attn.out.weight", "mlp.down.weight"))
                values[name] = Init(kind="normal", std=0.02 / math.sqrt(2 * self.depth) if writes else 0.02)
        return values

    def _block(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's weights; each but the keys' has a bias of its first dim."""
        width = self.width
        return {
            "ln_1": (width,),
            "attn.query": (width, width),
            "attn.value": (width, width),
            "attn.key": (width, width),
            "attn.out": (width, width),
            "ln_2": (width,),
            "mlp.up": (4 * width, width),
            "mlp.down": (width, 4 * width),
        }
