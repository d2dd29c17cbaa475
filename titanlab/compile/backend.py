"""What turns a traced graph into something that runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# The one place where backends are found by name, those of other packages too; torch 2.11 as 2.13.
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config


@dataclass(frozen=True)
class Budgeted:
    """A backend that keeps no more than a share of a graph's activations and computes the others again.

    The budget is a setting of the process for torch. Here it holds while a graph is cut into forward and backward, so
    that no other graph is cut by it. Two of these that say the same are the same for torch, which compares the
    backends of what it has compiled.

    Attributes:
        name: of the backend.
        options: of inductor.
        budget: 1 keeps all, 0 the inputs only.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    budget: float

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Compile a graph."""
        patches = {"config_patches": dict(self.options)} if self.options else {}
        # The mesh of tensor parallelism is an input too; torch 2.13 does not know that it holds no activations.
        known = hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size")
        objects: dict[str, Any] = {"unsafe_treat_script_objects_as_zero_size": True} if known else {}
        with functorch_config.patch(activation_memory_budget=self.budget, **objects):
            return lookup_backend(self.name)(graph, inputs, **patches)
