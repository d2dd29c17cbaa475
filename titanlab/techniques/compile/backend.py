"""A backend of `torch.compile` with a budget for activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Private in torch 2.11 to 2.13: returns a backend by name, also a backend of another package.
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config


@dataclass(frozen=True)
class Budgeted:
    """A backend that keeps at most a share of a graph's activations and recomputes the others.

    torch's budget is a setting of the process; here it applies only while this graph is split into forward and
    backward. torch compares backends to reuse compilations, so equal instances have to compare equal.

    Attributes:
        name: of the backend.
        options: of inductor.
        budget: 1 keeps all activations, 0 only the inputs.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    budget: float

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Compile a graph."""
        patches = {"config_patches": dict(self.options)} if self.options else {}
        # The mesh of tensor parallelism is an input too; torch 2.13 cannot compute its size, which is zero.
        known = hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size")
        objects: dict[str, Any] = {"unsafe_treat_script_objects_as_zero_size": True} if known else {}
        with functorch_config.patch(activation_memory_budget=self.budget, **objects):
            return lookup_backend(self.name)(graph, inputs, **patches)
