"""The matrix products of a step, by recipe. Torch-free.

A product is named by what it computes: `forward`, `inputs` (the gradient of the input) or `weights`; then tokens ×
columns × inner of its linear layer, and its format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_session.prediction import of_layers
from titanlab.recipe import Recipe

FLOAT8 = "float8"


class Product(NamedTuple):
    """One product of a linear layer with a weight [columns, inner].

    Attributes:
        kind: `forward`, `inputs` or `weights`.
        tokens, columns, inner: sizes.
        format: of its operands: `bfloat16`, `float8_tensorwise` (one scale a tensor) or `float8_rowwise`.
    """

    kind: str
    tokens: int
    columns: int
    inner: int
    format: str

    @property
    def flops(self) -> int:
        """Of one product."""
        return 2 * self.tokens * self.columns * self.inner

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens}x{self.columns}x{self.inner} {self.format}"


def products_of(recipe: Recipe, *, layers: int | None = None) -> Counter[Product]:
    """The products of one step of a recipe without recomputation, and how often each runs.

    Args:
        layers: of the model; None: as the recipe has them.
    """
    model = of_layers(recipe, layers)
    account, seq = model.account(), recipe.training.seq_len
    formats = recipe.precision.products(account)
    compute = recipe.precision.formats().compute
    scaled = f"{FLOAT8}_rowwise" if "rowwise" in recipe.precision.kind else f"{FLOAT8}_tensorwise"
    counts: Counter[Product] = Counter()
    parts = [(model.block_operations(batch=recipe.microbatch, seq_len=seq), "layers.0.", account.layers)]
    parts.append((model.edge_operations(batch=recipe.microbatch, seq_len=seq), "", 1))
    for operations, prefix, times in parts:
        for operation in operations:
            if operation.kind != "matmul":
                continue
            path = f"{prefix}{operation.layer or operation.name}"
            tokens, columns = recipe.microbatch * seq, operation.output[-1]
            inner = operation.flops // (2 * tokens * columns)
            chunk = recipe.loss_chunk if path == account.head else 0
            count = times * recipe.microbatches * (-(-tokens // chunk) if chunk else 1)
            how = formats.get(path)
            kinds = {
                "forward": how.forward if how else compute,
                "inputs": how.input_gradient if how else compute,
                "weights": how.weight_gradient if how else compute,
            }
            for kind, dtype in kinds.items():
                form = scaled if dtype.startswith(FLOAT8) else dtype
                counts[Product(kind, chunk or tokens, columns, inner, form)] += count
    return counts


def attention_of(recipe: Recipe) -> tuple[int, int, int, int, int]:
    """Shape of a microbatch's attention: batch, heads, key/value heads, tokens, width of a head."""
    model = recipe.model
    return recipe.microbatch, model.heads, model.kv_heads, recipe.training.seq_len, model.head_dim


def seconds_of(products: Mapping[Product, int], rates: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Seconds of products, each as often as it runs; None: one of them was not measured, or not as a number."""
    if any(rates.get(str(product), {}).get("seconds") is None for product in products):
        return None
    return sum(count * float(rates[str(product)]["seconds"]) for product, count in products.items())
