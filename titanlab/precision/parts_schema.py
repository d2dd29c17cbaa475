"""Fields and checks that configs of precisions share: the dtype of reductions, and parts in float32."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from titanlab.costs.account import BLOCKS, is_in_block
from titanlab.costs.hardware import compute_capability
from titanlab.costs.setting import Setting
from titanlab.errors import ConfigError
from titanlab.precision.account import EMBEDDING, HEAD, matched
from titanlab.precision.contract import PrecisionConfig

KEY = "precision.fp32_parts"
# A block's number in a name, or a pattern of numbers.
_LAYER = re.compile(r"layers\.([^.]+)")


def check_reduce(reduce: str, known: tuple[str, ...], why: str) -> None:
    """Check that the precision supports a dtype of reductions.

    Raises:
        ConfigError: it does not.
    """
    if reduce not in known:
        raise ConfigError("precision.reduce", reduce, why, f"try {' or '.join(known)}")


@dataclass(kw_only=True)
class Parts(PrecisionConfig):
    """The config field of pieces that compute in float32 while the rest computes in 16 bits.

    Attributes:
        fp32_parts: pieces of the model that compute in float32: `embedding`, `head`, names such as `norm` or
            `layers.0`, and patterns such as `layers.*`. Their inputs and outputs are cast; logits stay in float32.
    """

    fp32_parts: list[str] = field(default_factory=list, metadata={"before": []})

    def check(self, setting: Setting) -> None:
        """Check that the model has every part, and that a tied table does not need two dtypes.

        Raises:
            ConfigError: the model lacks a part, or embedding and head are tied and only one of them is named.
        """
        if not self.fp32_parts:
            return
        account, shown = setting.model, f"[{','.join(self.fp32_parts)}]"
        if not account.pieces:
            raise ConfigError(KEY, shown, "the model does not say what its pieces are", "try []")
        for part in self.fp32_parts:
            if not matched(account, [part]):
                names = (EMBEDDING, HEAD, *dict.fromkeys(_family(piece) for piece in account.pieces))
                rule = f"no piece of the model is called {part or 'nothing'}"
                raise ConfigError(KEY, shown, rule, f"choose from {', '.join(names)}")
        if account.tied:
            chosen = matched(account, self.fp32_parts)
            pair = set(matched(account, [EMBEDDING, HEAD]))
            if pair & set(chosen) and not pair <= set(chosen):
                rule = "the head is the embedding's table, which cannot be gathered in two dtypes"
                raise ConfigError(KEY, shown, rule, f"name both, {EMBEDDING} and {HEAD}, or neither")

    def reduced(self, *, layers: int, note: Callable[[str], None]) -> PrecisionConfig:
        """See `PrecisionConfig`."""
        return replace(self, fp32_parts=parts_within(layers, self.fp32_parts, key=KEY, note=note))


def parts_within(layers: int, names: list[str], *, key: str, note: Callable[[str], None]) -> list[str]:
    """The names of parts without those of blocks that a model of `layers` blocks lacks.

    Args:
        key: the config key of the names.
        note: is called with a line if the model lacks one.
    """
    numbers = [str(number) for number in range(layers)]
    kept = [part for part in names if (match := _LAYER.search(part)) is None or fnmatch.filter(numbers, match[1])]
    if kept != names:
        note(f"{key} names blocks that the reduced model lacks")
    return kept


def check_bf16(setting: Setting, kind: str) -> None:
    """Check that the GPU multiplies in bfloat16: NVIDIA's do from compute capability 8.0 (Ampere) on.

    Raises:
        ConfigError: the GPU is known to be older.
    """
    capability = compute_capability(setting.device) if setting.accelerator == "cuda" else None
    if capability is not None and capability < (8, 0):
        rule = f"{setting.device} has no units for bfloat16: they came with compute capability 8.0"
        raise ConfigError("precision", kind, rule, "try precision=fp16 or precision=fp32")


def _family(piece: str) -> str:
    return f"{BLOCKS}.*" if is_in_block(piece) else piece
