"""Configs of ac: none, full and selective_layer (whole blocks), memory_budget (the compiler chooses), selective_op."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from titanlab.costs import (
    CONTEXT_ATTENTION,
    EXCHANGE,
    GROUPED_PRODUCT,
    Activation,
    Operation,
    Operator,
    Setting,
    Share,
    block_input,
    kept_activations,
)
from titanlab.errors import ConfigError
from titanlab.options import option
from titanlab.techniques.ac.contract import ACConfig, needed_again

if TYPE_CHECKING:
    from titanlab.techniques.ac.recomputation import SelectedOperators


# Number of blocks of the smallest model that proofs train.
_LEAST_BLOCKS = 2


@option("ac", "none")
@dataclass(frozen=True, kw_only=True)
class NoCheckpointing(ACConfig):
    """Blocks keep all activations that the backward pass needs."""

    kind: str = "none"

    def describe(self) -> str:
        return ""


@option("ac", "full")
@dataclass(frozen=True, kw_only=True)
class FullCheckpointing(ACConfig):
    """Every block keeps only its input and is recomputed in the backward pass (arXiv 1604.06174)."""

    kind: str = "full"

    def recomputes(self, number: int) -> bool:
        return True


@option("ac", "selective_layer")
@dataclass(frozen=True, kw_only=True)
class SelectiveLayer(ACConfig):
    """Every n-th block is recomputed and the others keep all activations, or the reverse.

    Attributes:
        every: n, for blocks 0, n, 2n, … counted in the full model, not in a pipeline stage.
        keep: the reverse: every n-th block keeps all activations, and the others are recomputed.
    """

    kind: str = "selective_layer"
    every: int = 2
    keep: bool = field(default=False, metadata={"before": False})

    def __post_init__(self) -> None:
        if self.every < 1:
            cure = f"try 2 for every second block, or ac={self._for_none} for none"
            raise ConfigError("ac.every", self.every, "must be at least 1", cure)

    def check(self, setting: Setting) -> None:
        layers = setting.model.layers
        if self.every > layers:
            rule = f"is more than the model's {layers} blocks"
            raise ConfigError("ac.every", self.every, rule, f"try {max(1, layers // 2)}, or ac={self._for_none}")

    def recomputes(self, number: int) -> bool:
        return (number % self.every == 0) is not self.keep

    def reduced(self, *, note: Callable[[str], None]) -> ACConfig:
        if self.every <= _LEAST_BLOCKS:
            return self
        note(f"ac.every={self.every} is more than the reduced model's blocks, and becomes {_LEAST_BLOCKS}")
        return replace(self, every=_LEAST_BLOCKS)

    @property
    def _for_none(self) -> str:
        return "full" if self.keep else "none"


# Backends that use torch's min-cut partitioner, which applies the budget.
BACKENDS = ("inductor", "aot_eager", "aot_eager_decomp_partition")


@option("ac", "memory_budget")
@dataclass(frozen=True, kw_only=True)
class MemoryBudget(ACConfig):
    """torch's compiler chooses the activations that each block keeps, with the least recomputation in the budget.

    Attributes:
        budget: from 0, where blocks keep only their inputs, to 1, where they keep the activations that make them
            fastest.
    """

    kind: str = "memory_budget"
    budget: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.budget <= 1:
            cure = f"try {min(1.0, max(0.0, self.budget))}" if self.budget == self.budget else "try 0.5"
            raise ConfigError("ac.budget", self.budget, "must lie between 0 and 1", cure)

    def saved_bytes(self, block: Sequence[Operation], share: Share, *, number: int) -> int:
        """An upper bound of the bytes that a block keeps.

        The compiler applies the budget to the bytes between a block's input and the activations that make the block
        fastest; its choice depends on torch's version. The bound uses what autograd keeps without a compiler: more.
        """
        least, most = share.bytes_of([block_input(block)]), share.bytes_of(kept_activations(block))
        return round(least + self.budget * (most - least))

    def compiler_budget(self) -> float:
        return self.budget

    def check(self, setting: Setting) -> None:
        if not setting.compiled:
            rule = "is kept by the compiler, and the blocks are not compiled"
            raise ConfigError("ac", self.kind, rule, "try compile=block, or ac=selective_op")
        if setting.compiled not in BACKENDS:
            rule = f"compile.backend={setting.compiled} knows no budget"
            raise ConfigError("ac", self.kind, rule, f"try compile.backend={BACKENDS[0]} or {BACKENDS[1]}")


# The form in which torch prints an operator: namespace.name.overload.
NAME = re.compile(r"\w+\.\w+\.\w+")
KEY = "ac.saved"
# Matrix products; every second one may be recomputed.
MATMULS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten._scaled_mm.default",
)
# Operators that titanlab's models and parallelism register when they are imported.
OWN = (CONTEXT_ATTENTION, GROUPED_PRODUCT, EXCHANGE)
# Operator → torch's kernel that it replaces. If `saved` names the kernel, this operator's results are saved as well.
# Tiles replace the kernel for short sequences, FlexAttention for attention within documents.
SAME = {
    "titanlab.tiled_attention.default": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "flex_attention": "aten._scaled_dot_product_flash_attention.default",
}
# TorchTitan's list (arXiv 2410.06511, and its code): operators that are expensive to compute or communicate again.
PAPER = (
    "aten.mm.default",
    "aten.addmm.default",  # Products with a bias.
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    CONTEXT_ATTENTION,  # Context parallelism would send keys and values again.
    "_c10d_functional.reduce_scatter_tensor.default",  # From compiled tensor parallelism.
    "aten.max.default",  # The largest element of a tensor: float8's scale.
    "aten.amax.default",  # The largest element of each row: float8's scale.
)


@option("ac", "selective_op")
@dataclass(frozen=True, kw_only=True)
class SelectiveOp(ACConfig):
    """Every block keeps its input and the results of some operators; the other results are recomputed.

    Attributes:
        saved: operators whose results are kept, as torch prints them: `aten.mm.default`.
        every_other_matmul: of the matrix products among them, in a block's order, keep only the first, third, …
            False: keep all.
    """

    kind: str = "selective_op"
    saved: tuple[str, ...] = PAPER
    every_other_matmul: bool = True

    def __post_init__(self) -> None:
        if not self.saved:
            raise ConfigError(KEY, "[]", "names no operator, so that nothing is kept", "try ac=full, which says so")
        for name in self.saved:
            if not NAME.fullmatch(name):
                rule = f"{name} is not how torch prints an operator: namespace.name.overload"
                raise ConfigError(KEY, self._typed(), rule, f"try {_respelled(name)}")
            if self.saved.count(name) > 1:
                raise ConfigError(KEY, self._typed(), f"names {name} twice", "name it once")

    def check(self, setting: Setting) -> None:
        # Operators of other packages may be unknown until the model is imported; `apply` checks those.
        if not set(self.saved) <= set(PAPER):
            # `known_operators` imports torch, so it is called only for a list other than the default.
            self.check_known(self.implementation().known_operators(), all_imported=False)

    def saved_bytes(self, block: Sequence[Operation], share: Share, *, number: int) -> int:
        """Bytes of the block's input and of the chosen results, also of the last product, which no backward needs."""
        activations: list[Activation] = [block_input(block)]
        for operator in self._saved_operators(block):
            activations += operator.results
        return share.bytes_of(activations)

    def recomputed(self, block: Sequence[Operation], *, number: int) -> tuple[str, ...]:
        """Names of the operations that run again: all but those with an operator whose result is saved."""
        saved = {id(operator) for operator in self._saved_operators(block)}
        kept = {operation.name for operation in block if any(id(operator) in saved for operator in operation.operators)}
        return tuple(name for name in needed_again(block) if name not in kept)

    def repeats_collective(self, operator: str, *, number: int) -> bool:
        return operator not in self.saved

    def _saved_operators(self, block: Sequence[Operation]) -> list[Operator]:
        operators = [operator for operation in block for operator in operation.operators]
        chosen = [operator for operator in operators if not set(self.saved).isdisjoint(operator.names)]
        counted = set(self.saved).intersection(MATMULS) if self.every_other_matmul else set()
        matmuls = itertools.count()
        return [operator for operator in chosen if counted.isdisjoint(operator.names) or next(matmuls) % 2 == 0]

    def implementation(self) -> SelectedOperators:
        from titanlab.techniques.ac.recomputation import SelectedOperators

        return SelectedOperators(self)

    def check_known(self, known: frozenset[str], *, all_imported: bool) -> None:
        """Raise ConfigError if a name is not a known operator.

        `all_imported`: whether all packages have been imported; otherwise names of unknown namespaces pass.
        """
        known = (known | {*PAPER, *OWN}) - SAME.keys()
        spaces = {name.partition(".")[0] for name in known}
        for name in self.saved:
            space = name.partition(".")[0]
            # A namespace that is similar to a known one is probably a typing error.
            if name not in known and (all_imported or space in spaces or nearest(space, spaces)):
                rule = f"torch has no operator {name}"
                raise ConfigError(KEY, self._typed(), rule, f"try {nearest(name, known) or PAPER[0]}")

    def _typed(self) -> str:
        return f"[{','.join(self.saved)}]"


def _respelled(name: str) -> str:
    """Convert another spelling of an operator (`aten::mm`, `torch.ops.aten.mm`) to the form that torch prints."""
    parts = name.replace("::", ".").removeprefix("torch.ops.").split(".")
    printed = ".".join([*parts, "default"] if len(parts) == 2 else parts)
    return printed if NAME.fullmatch(printed) else PAPER[0]


def nearest(name: str, among: frozenset[str] | set[str] | tuple[str, ...]) -> str:
    """The most similar name; empty if none is similar."""
    return next(iter(difflib.get_close_matches(name, sorted(among), n=1, cutoff=0.7)), "")
