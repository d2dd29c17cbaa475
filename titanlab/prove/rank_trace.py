"""Runs one step of one rank on tensors without data; the other ranks of its world do not exist."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from titanlab.costs import BLOCKS
from titanlab.distributed import World, axis_groups, build_mesh, traced
from titanlab.dtensor import local_part
from titanlab.parallelism import STANDS_FOR_NCCL, Gradients
from titanlab.prove.declared import RankAccount
from titanlab.recipe import Recipe
from titanlab.train import Reduction, StepBatch, plain_name
from titanlab.train.assemble import assemble


@contextlib.contextmanager
def fake_world(rank: int, ranks: int, *, nccl: bool) -> Iterator[tuple[World, FakeTensorMode]]:
    """A rank on CPU, and the mode in which its tensors have shapes but no data.

    Modules are built and sharded outside the mode, because torch reads values of small tensors when it builds and
    shards; parameters get their storage inside the mode.

    Args:
        nccl: the process group stands for NCCL, which has a reduce-scatter; otherwise for gloo.
    """
    if nccl and not hasattr(dist.Backend, STANDS_FOR_NCCL.upper()):
        dist.Backend.register_backend(STANDS_FOR_NCCL, fake_pg._create_fake_pg, extended_api=True, devices=["cpu"])
    # Allowed, because small tensors that were made outside the mode take part in operations.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    backend = STANDS_FOR_NCCL if nccl else "fake"
    dist.init_process_group(backend, store=fake_pg.FakeStore(), rank=rank, world_size=ranks)
    try:
        yield World(rank=rank, world=ranks, local_rank=0, device=torch.device("cpu"), without_data=mode), mode
    finally:
        dist.destroy_process_group()
        # DTensor has cached meshes whose groups no longer exist.
        _clear_sharding_prop_cache()


Storages = dict[int, "weakref.ref[torch.UntypedStorage]"]


def watch_saved_bytes(blocks: Mapping[int, nn.Module]) -> dict[int, int]:
    """For each block, the bytes that it keeps of the first microbatch; filled in when the block's backward begins.

    Hooks on saved tensors do not see tensors that selective checkpointing keeps. So this counts storages: those that a
    block's forward has made, and the block's input, if they still exist when its backward begins. The block's output
    counts as the next block's input. FSDP's gathers do not count: they run before and after the hooks here.
    """
    saved: dict[int, int] = {}

    def watch(number: int, block: nn.Module) -> None:
        made = _Made()
        kept: list[weakref.ref[torch.UntypedStorage]] = []

        def begin(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            kept.append(weakref.ref(inputs[0].untyped_storage()))
            made.__enter__()  # type: ignore[no-untyped-call]

        def end(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
            made.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            before.remove()
            after.remove()
            made.storages.pop(output.untyped_storage()._cdata, None)
            kept.extend(made.storages.values())
            if output.requires_grad:
                output.register_hook(count)

        def count(_: Tensor) -> None:
            saved[number] = sum(storage.nbytes() for ref in kept if (storage := ref()) is not None)

        before, after = block.register_forward_pre_hook(begin), block.register_forward_hook(end, prepend=True)

    for number, block in blocks.items():
        watch(number, block)
    return saved


class _Made(TorchDispatchMode):
    """Records the storages that operators create."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: Storages = {}

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(is_traceable_wrapper_subclass(tensor) for tensor in inputs):
            # The subclass runs its own code first; that code's operators on plain tensors are dispatched here later.
            return NotImplemented
        results = func(*args, **kwargs)
        old = {tensor.untyped_storage()._cdata for tensor in inputs}
        for leaf in tree_leaves(results):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in old:
                self.storages[storage._cdata] = weakref.ref(storage)
        return results


def trace_rank(recipe: Recipe, rank: int) -> RankAccount:
    """What a rank stores, keeps and sends: assembles its part of a recipe on tensors without data, and runs one step.

    Args:
        recipe: resolved, and runs in eager mode; see `titanlab.prove.traced_step.for_tracing`.
    """
    layout = recipe.layout
    with fake_world(rank, layout.world, nccl=recipe.cluster.accelerator == "cuda") as (world, mode):
        mesh = build_mesh(layout, "cpu")
        assembled = assemble(recipe, world, mesh)
        parameters = {plain_name(name): parameter for name, parameter in assembled.model.named_parameters()}
        blocks = dict(assembled.model.named_children()).get(BLOCKS, nn.Module())
        saved = watch_saved_bytes({int(name): block for name, block in blocks.named_children()})
        axes = axis_groups(mesh)
        with mode:
            trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            optimizer = recipe.optimizer.implementation().build(trained)
            gradients = Gradients(trained.values(), world.world // layout.pipeline)
            assembled.after_update()
            tokens = torch.zeros(recipe.local_batch, recipe.training.seq_len // layout.context, dtype=torch.int64)
            with traced(axes) as step:
                sums = assembled.forward_backward(StepBatch(tokens, tokens, tokens.numel()))
                Reduction(
                    world,
                    squared_norm=gradients.squared_norm(),
                    loss_sum=sums.loss_sum,
                    tokens=sums.tokens,
                    stop=0,
                    nominal_tokens=recipe.tokens_per_step,
                    balance=assembled.balance,
                )
            with traced(axes) as update:
                optimizer.step()
                assembled.after_update()
        kept = (value for values in optimizer.state.values() for value in values.values())
        return RankAccount(
            rank=rank,
            parameters=sum(parameter.numel() for parameter in parameters.values()),
            parameter_bytes=_bytes(parameters.values()),
            optimizer_bytes=_bytes(value for value in kept if isinstance(value, Tensor)),
            saved=saved,
            traffic=tuple(step.rows()),
            update_traffic=tuple(update.rows()),
        )


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of this rank's parts of tensors, with FSDP2's padding."""
    storages = {}
    for tensor in tensors:
        own: Any = local_part(tensor)
        # A subclass consists of plain tensors.
        parts = (
            [getattr(own, name) for name in own.__tensor_flatten__()[0]]
            if hasattr(own, "__tensor_flatten__")
            else [own]
        )
        for part in parts:
            storages[part.untyped_storage()._cdata] = part.untyped_storage().nbytes()
    return sum(storages.values())
