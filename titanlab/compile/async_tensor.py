"""AsyncTP: inductor fuses matrix products with adjacent collectives of tensor parallelism."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

from titanlab.errors import ConfigError

KEY = "parallelism.async_tensor"
# A private option of inductor; torch 2.11 to 2.13 have no public one.
OPTIONS = {"_micro_pipeline_tp": True}
_CALL = re.compile(r"= torch\.ops\.symm_mem\.fused_\w+")


def register(group: dist.ProcessGroup) -> None:
    """Enable symmetric memory for a group; without it, inductor does not fuse the group's collectives.

    torch calls the function deprecated and unnecessary, but inductor's pass
    (`torch/_inductor/fx_passes/micro_pipeline_tp.py`) needs it in 2.11 to 2.13. Delete this when the pass does not.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`enable_symm_mem_for_group` is deprecated", category=FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)


class FusionCheck:
    """Checks that inductor fuses products in the blocks that this process compiles from now on.

    It reads the generated code, because inductor's pass does not run for code from torch's cache.
    """

    def __init__(self) -> None:
        """Code that was generated before does not count."""
        self._before = set(map(id, _generated()))

    def count(self) -> int:
        """Number of calls of fused operators in code that was generated or taken from the cache."""
        files = [module.__file__ for module in _generated() if id(module) not in self._before]
        return sum(len(_CALL.findall(Path(file).read_text())) for file in files if file)

    def check_fused(self, gather: Callable[[int], list[int]]) -> None:
        """Check that every rank has fused a product. All ranks call this together, after the first step.

        Args:
            gather: takes this rank's count and returns those of all ranks.

        Raises:
            ConfigError: a rank has fused nothing. Every rank raises the same.
        """
        counts = gather(self.count())
        without = [rank for rank, count in enumerate(counts) if count == 0]
        if without:
            named = ", ".join(map(str, without[:4])) + (", …" if len(without) > 4 else "")
            where = "every rank" if len(without) == len(counts) else f"rank{'s' if len(without) > 1 else ''} {named}"
            rule = f"inductor has fused no product with its collective on {where}"
            raise ConfigError(KEY, True, rule, "try false, or an empty folder as TORCHINDUCTOR_CACHE_DIR")


def _generated() -> list[ModuleType]:
    from torch._inductor.codecache import PyCodeCache

    return list(PyCodeCache.modules)
