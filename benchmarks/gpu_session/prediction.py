"""What the planner says of a row's recipe, before it runs. It needs no torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from titanlab.cli.compose import compose
from titanlab.costs import Share, hardware, training_flops_per_token
from titanlab.errors import ConfigError
from titanlab.plan import explain, reserved_bytes
from titanlab.plan.memory import added, saved_bytes, stored_pieces
from titanlab.recipe import Recipe, check, resolve


@dataclass(frozen=True)
class Facts:
    """What a child that imports torch says of this machine (facts.py).

    Attributes:
        device: the accelerator's name, or `cpu`.
        torch: its version.
        memory_bytes: of the device; 0: not known.
        capability: compute capability; None: a CPU.
        packages: names → versions of the packages that rows may need; None: not installed.
        uuid: of the GPU that rows use, as nvidia-smi names it; None: a CPU.
        gpus: how many torch sees; rows use the first.
    """

    device: str
    torch: str
    memory_bytes: int = 0
    capability: tuple[int, int] | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    uuid: str | None = None
    gpus: int = 0


def composed(keys: Sequence[str], facts: Facts) -> Recipe:
    """The resolved recipe that these keys describe on this machine.

    Raises:
        ConfigError: they break a rule.
    """
    return _composed(tuple(keys), facts.device)


@functools.lru_cache(maxsize=256)
def _composed(keys: Sequence[str], device: str) -> Recipe:
    (recipe,) = compose(keys)
    recipe = resolve(recipe, world=None, accelerator="cpu" if device == "cpu" else "cuda", device=device)
    check(recipe)
    return recipe


def predicted(recipe: Recipe) -> dict[str, Any]:
    """The planner's figures, in bytes and seconds, by the names of the measured ones; or why there are none."""
    try:
        account = explain(recipe)
    except ConfigError as error:
        return {"reason": str(error)}
    rank = account.ranks[0]
    return {
        "tokens_per_second": account.time.tokens_per_second,
        "step_seconds": account.time.seconds,
        "parts": {name: seconds for name, seconds in account.time.parts.items() if seconds},
        "mfu_percent": None if math.isnan(account.time.mfu) else 100 * account.time.mfu,
        "allocated_bytes": rank.allocated,
        "reserved_bytes": reserved_bytes(recipe, account.machine, rank),
        "moment": rank.moment,
        "items": {name: size for name, size in rank.items.items() if size},
        "activation_bytes": activation_bytes(recipe),
        "checkpoint_bytes": checkpoint_bytes(recipe),
        "notes": list(account.machine.notes),
    }


def activation_bytes(recipe: Recipe) -> int:
    """What the blocks keep of a microbatch between forward and backward, as the policy of checkpointing declares it."""
    share = Share(element_bytes=recipe.precision.formats().compute_bytes, accelerator=recipe.cluster.accelerator)
    return saved_bytes(recipe.ac, recipe.model, share, recipe.microbatch, recipe.training.seq_len)


def checkpoint_bytes(recipe: Recipe) -> int:
    """Bytes of one checkpoint: parameters and optimizer state."""
    saved = added(stored_pieces(recipe.model, recipe.precision, recipe.optimizer, 1, 1).values())
    return saved.parameters + saved.optimizer


def flops_per_token(recipe: Recipe, *, layers: int | None = None) -> int:
    """By the usual convention, of the model or of one like it with other layers."""
    return training_flops_per_token(of_layers(recipe, layers).account(), seq_len=recipe.training.seq_len)


def peak_of(recipe: Recipe, facts: Facts) -> float | None:
    """The peak by which an MFU divides: dense, in the precision of the activations; None: not known."""
    return hardware.peak_flops(facts.device, recipe.precision.formats().compute)


def of_layers(recipe: Recipe, layers: int | None) -> Any:
    """The recipe's model with another number of layers; None: as it is."""
    return recipe.model if layers is None else replace(recipe.model, layers=layers)
