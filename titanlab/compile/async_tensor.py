"""AsyncTP: products that inductor has made one operator with the collectives of tensor parallelism beside them."""

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
# A private switch of inductor, in torch 2.11 to 2.13 the only one.
OPTIONS = {"_micro_pipeline_tp": True}
_CALL = re.compile(r"= torch\.ops\.symm_mem\.fused_\w+")


def register(group: dist.ProcessGroup) -> None:
    """Let operators of symmetric memory work on a group; without it, inductor leaves its collectives alone.

    torch marks this function as deprecated and no longer necessary; inductor's pass
    (`torch/_inductor/fx_passes/micro_pipeline_tp.py`) asks for it in 2.11 to 2.13. To be deleted when it does not.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`enable_symm_mem_for_group` is deprecated", category=FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(group.group_name)


class FusionCheck:
    """Whether anything has been fused in the blocks that this process compiles from now on.

    The generated code is read, not the graphs that the pass has seen: code that comes out of torch's cache has passed
    no pass.
    """

    def __init__(self) -> None:
        """What has been generated before does not count."""
        self._before = set(map(id, _generated()))

    def count(self) -> int:
        """Calls of fused operators in the code that was generated, or found in the cache."""
        files = [module.__file__ for module in _generated() if id(module) not in self._before]
        return sum(len(_CALL.findall(Path(file).read_text())) for file in files if file)

    def check_fused(self, gather: Callable[[int], list[int]]) -> None:
        """Hold a run that asks for AsyncTP to have it. All ranks call this together, when the first step is over.

        Args:
            gather: takes this rank's count and returns those of all ranks.

        Raises:
            ConfigError: a rank has fused nothing; the same on every rank.
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
