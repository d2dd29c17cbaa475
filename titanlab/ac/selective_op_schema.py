"""Config of ac=selective_op."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.options import implementation, option

# torch prints operators so: namespace, name, overload.
NAME = re.compile(r"\w+\.\w+\.\w+")
KEY = "ac.saved"
# Products of matrices, of which every other one may be left out.
MATMULS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.baddbmm.default",
    "aten._scaled_mm.default",
)
# TorchTitan's list (arXiv 2410.06511, and its code): what is dear to compute, or to send, again.
PAPER = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "titanlab.context_attention.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "aten.max.default",
    "aten.amax.default",
)


@option("ac", "selective_op")
@dataclass(kw_only=True)
class SelectiveOp:
    """Every block keeps its input and the results of some operators; the others are computed again.

    Attributes:
        saved: operators whose results are kept, as torch prints them: `aten.mm.default`.
        every_other_matmul: of the products of matrices among them, in the order in which a block computes them, only
            the first, third, … are kept. False: all.
    """

    kind: str = "selective_op"
    saved: list[str] = field(default_factory=lambda: list(PAPER))
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
        """Operators of others may be unknown until the model has been imported; they are looked up again then."""
        if not set(self.saved) <= set(PAPER):
            # The one question that needs torch to be imported, and only for a list of one's own.
            self.refuse_unknown(implementation(self).known_operators(), final=False)

    def refuse_unknown(self, known: frozenset[str], *, final: bool) -> None:
        """Refuse names that are not in `known`; unless `final`, only those of namespaces that it knows."""
        known = known | set(PAPER)
        spaces = {name.partition(".")[0] for name in known}
        for name in self.saved:
            space = name.partition(".")[0]
            # A namespace that is nearly a known one is a slip.
            if name not in known and (final or space in spaces or nearest(space, spaces)):
                rule = f"torch has no operator {name}"
                raise ConfigError(KEY, self._typed(), rule, f"try {nearest(name, known) or PAPER[0]}")

    def _typed(self) -> str:
        return f"[{','.join(self.saved)}]"


def _respelled(name: str) -> str:
    """An operator as others write it (`aten::mm`, `torch.ops.aten.mm`), as torch prints it."""
    parts = name.replace("::", ".").removeprefix("torch.ops.").split(".")
    found = ".".join([*parts, "default"] if len(parts) == 2 else parts)
    return found if NAME.fullmatch(found) else PAPER[0]


def nearest(name: str, among: frozenset[str] | set[str] | tuple[str, ...]) -> str:
    """What a person may have meant, or nothing."""
    return next(iter(difflib.get_close_matches(name, sorted(among), n=1, cutoff=0.7)), "")
