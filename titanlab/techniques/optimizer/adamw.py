"""optimizer=adamw, adamw_8bit, adamw_4bit and adamw_fp8: torch's fused AdamW, or torchao's arithmetic.

torchao's optimizer class is not used: it cuts the flattened shard of a rank into blocks, which share a scale. Here each
block lies in one row, so its scale does not depend on the layout; codes and scales are sharded like their parameter.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlab.dtensor import local_part
from titanlab.system import import_quietly
from titanlab.techniques.optimizer.contract import groups_by_decay
from titanlab.techniques.optimizer.optimizers_schema import CODES, SCALE, Averaged, LowBit, Rounded, packs

AVERAGES = {"exp_avg": True, "exp_avg_sq": False}  # name → has a sign


@dataclass(frozen=True)
class Format:
    """The storage format of an average of gradients or of squared gradients.

    Attributes:
        per_code: number of elements in one code.
        wrap: `wrap(codes, scale, shape, signed=)` makes torchao's tensor from `codes` [rows, columns / per_code] and
            `scale` [rows, columns / block]; it shares their storage.
    """

    dtype: torch.dtype
    per_code: int
    wrap: Callable[..., Tensor]


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW for this rank's parameters, by name: plain tensors or DTensors.

    Args:
        states: format of the averages of matrices; None: the dtype of the parameter.
    """

    def __init__(
        self,
        config: Rounded,
        parameters: Mapping[str, nn.Parameter],
        *,
        states: Format | None = None,
        block_size: int = 1,
    ) -> None:
        defaults = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps, "weight_decay": 0.0}
        super().__init__(groups_by_decay(parameters.values(), config.weight_decay), defaults)
        self._format, self._block_size = states, block_size
        self._stochastic = config.rounding != "nearest"
        self._names = {parameter: name for name, parameter in parameters.items()}
        self._update = import_quietly("torchao.optim.adam").single_param_adam

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        devices = sorted({p.device.index or 0 for p in self._names if p.device.type == "cuda"})
        with torch.random.fork_rng(devices=devices, enabled=self._stochastic):
            for group in self.param_groups:
                lr = torch.tensor(group["lr"], dtype=torch.float32)
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step(parameter, group, lr)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, but keep the dtypes of codes and scales: torch would cast them."""
        super().load_state_dict(state_dict)
        keys = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(keys, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name.endswith((CODES, SCALE)):
                    self.state[parameter][name] = value.to(parameter.device)

    def _step(self, parameter: nn.Parameter, group: dict[str, Any], lr: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state.update(self._begin(parameter))
        state["step"] += 1
        local, gradient = local_part(parameter), local_part(parameter.grad)
        if not local.numel():
            return
        stochastic = self._stochastic and parameter.dtype == torch.bfloat16
        if stochastic:
            torch.manual_seed(self._seed(parameter, int(state["step"])))
        averages = [self._view(state, name, local) for name in AVERAGES]
        rates = (lr, *group["betas"], group["weight_decay"], group["eps"])
        values = (local.detach(), gradient, state["step"], *averages, None, *rates, True, stochastic)
        if local.device.type == "cpu":
            # On a CPU, compilation would take longer than the training of the small models that fit there.
            self._update(*values)
            return
        from torch._dynamo import config as dynamo

        # The update is compiled for every shape of a parameter, so torch's limit of recompilations must be high.
        with dynamo.patch(recompile_limit=10_000):
            update: Any = torch.compile(self._update, fullgraph=True, dynamic=False)
            update(*values)

    def _begin(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = {"step": torch.tensor(0.0)}
        # Every rank must decide the same, so the decision depends on the full shape.
        few_bits = packs(parameter.shape, block_size=self._block_size, cuts_of_rows=_cuts_of_rows(parameter))
        for name in AVERAGES:
            if self._format is not None and few_bits:
                columns = parameter.shape[-1]
                state[f"{name}{CODES}"] = _zeros(parameter, columns // self._format.per_code, self._format.dtype)
                state[f"{name}{SCALE}"] = _zeros(parameter, columns // self._block_size, torch.float32)
            else:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _view(self, state: dict[str, Tensor], name: str, local: Tensor) -> Tensor:
        if name in state:
            view: Tensor = local_part(state[name])
            return view
        assert self._format is not None
        codes, scale = local_part(state[f"{name}{CODES}"]), local_part(state[f"{name}{SCALE}"])
        return self._format.wrap(codes, scale.view(-1), local.shape, signed=AVERAGES[name])

    def _seed(self, parameter: nn.Parameter, step: int) -> int:
        """The seed of one update's rounding, from the parameter's name, the step, and the offsets of this rank's part.

        So ranks with copies of a part round equally, and a resumed run rounds like an uninterrupted run.
        """
        begins: tuple[int, ...] = (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            _, begins = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
        text = f"{self._names[parameter]}/{step}/{begins}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _cuts_of_rows(parameter: Tensor) -> int:
    """Number of ranks over which each row is sharded."""
    if not isinstance(parameter, DTensor) or parameter.ndim < 2:
        return 1
    axes = enumerate(parameter.placements)
    return math.prod(parameter.device_mesh.size(axis) for axis, each in axes if each.is_shard(parameter.ndim - 1))


def _zeros(parameter: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Zeros with another number of columns than the parameter, sharded like the parameter."""
    local = local_part(parameter)
    part = columns // _cuts_of_rows(parameter)
    zeros = torch.zeros((*local.shape[:-1], part), dtype=dtype, device=local.device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size((*parameter.shape[:-1], columns))
    stride = torch.empty(shape, device="meta").stride()
    sharded = DTensor.from_local(
        zeros, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )
    # `from_local` moves the zeros to the mesh's device, but offloaded parameters are on the CPU.
    return sharded.to(parameter.device)


# Optimizer → module and class of torchao's tensor for its averages.
_PACKED = {
    "adamw_8bit": ("subclass_8bit", "OptimState8bit"),
    "adamw_4bit": ("subclass_4bit", "OptimState4bit"),
    "adamw_fp8": ("subclass_fp8", "OptimStateFp8"),
}


def format_of(kind: str, block_size: int, device: torch.device) -> Format:
    module, name = _PACKED[kind]
    packed = getattr(import_quietly(f"torchao.optim.{module}"), name)
    if kind == "adamw_fp8":
        return Format(torch.float8_e4m3fn, 1, lambda codes, scale, shape, *, signed: packed(codes, scale))
    # Tables with the value of every code, one for averages with a sign (True) and one for those without (False).
    tables = {signed: packed.zeros((block_size,), signed, block_size, device).qmap for signed in (True, False)}

    def wrap(codes: Tensor, scale: Tensor, shape: torch.Size, *, signed: bool) -> Tensor:
        if kind == "adamw_8bit":
            tensor: Tensor = packed(codes, scale, tables[signed], signed)
        else:
            tensor = packed(codes.view(-1), scale, tables[signed], signed, shape)
        return tensor

    return Format(torch.uint8, 1 if kind == "adamw_8bit" else 2, wrap)


class AdamWFactory:
    """AdamW; matrices decay, vectors do not."""

    def __init__(self, config: Rounded) -> None:
        self._config = config

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        config, device = self._config, next(iter(parameters.values())).device
        if isinstance(config, LowBit):
            states = format_of(config.kind, config.block_size, device)
            return LowBitAdamW(config, parameters, states=states, block_size=config.block_size)
        in_bf16 = any(parameter.dtype == torch.bfloat16 for parameter in parameters.values())
        if in_bf16 and config.rounding != "nearest":
            return LowBitAdamW(config, parameters)
        return fused_adamw(config, parameters.values())


def fused_adamw(config: Averaged, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    groups, betas = groups_by_decay(parameters, config.weight_decay), (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
