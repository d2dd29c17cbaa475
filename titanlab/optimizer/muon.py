"""optimizer=muon: torch's Muon for the matrices of blocks, its AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import _muon as torch_muon

from titanlab.dtensor import local_part
from titanlab.optimizer.groups import groups_by_decay
from titanlab.optimizer.muon_schema import Muon
from titanlab.optimizer.whole import map_whole, sharing_ranks


class MuonFactory:
    """Muon and AdamW as one optimizer, for checkpoints and for the schedule."""

    def __init__(self, config: Muon) -> None:
        self._config = config

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """See `OptimizerFactory`."""
        config = self._config
        matrices = [p for name, p in parameters.items() if config.applies_to(name, p.ndim)]
        chosen = set(matrices)
        others = [p for p in parameters.values() if p not in chosen]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(
                WholeMuon(
                    matrices,
                    lr=config.lr,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    nesterov=config.nesterov,
                    ns_steps=config.newton_schulz_steps,
                    adjust_lr_fn=config.adjust_lr,
                )
            )
        if others:
            groups = groups_by_decay(others, config.weight_decay)
            betas = (config.betas[0], config.betas[1])
            parts.append(torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True))
        return Together(parts)


class WholeMuon(torch.optim.Muon):
    """torch's Muon, but it orthogonalises full matrices.

    torch's Muon computes with DTensors: every product needs collectives, and adds in another order. Here each rank of
    FSDP2 gathers some of the equally sharded matrices, in bfloat16 like the orthogonalisation.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            groups: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    placements = parameter.placements if isinstance(parameter, DTensor) else None
                    groups.setdefault((parameter.shape, placements), []).append(parameter)
            for parameters in groups.values():
                size = sharing_ranks(parameters[0])
                for start in range(0, len(parameters), size):
                    self._step(parameters[start : start + size], group)

    def _step(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters that are sharded equally."""

        def orthogonalise(update: Tensor) -> Tensor:
            orthogonal: Tensor = torch_muon._zeropower_via_newtonschulz(
                update, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            return orthogonal

        updates = map_whole([self._update(parameter, group) for parameter in parameters], orthogonalise)
        rate = torch_muon._adjust_lr(group["lr"], group["adjust_lr_fn"], parameters[0].shape)
        for parameter, update in zip(parameters, updates, strict=True):
            local_part(parameter).mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-rate)

    def _update(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """The average of a parameter's gradients: bfloat16, sharded like the parameter."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        average: Tensor = state["momentum_buffer"]
        average.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        # The Newton-Schulz iteration divides in place, so a bfloat16 gradient must be copied.
        return update.to(torch.bfloat16, copy=True)


class Together(torch.optim.Optimizer):
    """Several optimizers over different parameters as one optimizer: param groups, state and steps."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            self.state.update(part.state)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let the parts use this optimizer's groups and state."""
        start = 0
        for part in self._parts:
            part.param_groups = self.param_groups[start : start + len(part.param_groups)]
            part.state = self.state
            start += len(part.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every part."""
        for part in self._parts:
            part.step()
