"""Conformance: for tests of new models, compares a model's module with the model's account.

    assert faults(MyModel(dim=64, layers=3, …)) == []

The comparison starts no processes; `titanlab.prove.parity` shows whether a model trains equally in every layout.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from titanlab.costs import (
    ModelAccount,
    Operation,
    block_name,
    forward_flops,
    is_in_block,
    style_of,
    training_flops_per_token,
)
from titanlab.parallelism import STYLES
from titanlab.techniques.model.contract import ModelConfig
from titanlab.techniques.model.language_model import LanguageModel, shapes_only
from titanlab.train.assemble import thin
from titanlab.train.initialise import initialise

# Largest relative difference of logits between two calls of one model that add the same numbers in the same order.
_ROUNDING = 1e-6
# The same limit for calls that add the numbers in another order.
_SUMS = 1e-5


def faults(config: ModelConfig, *, batch: int = 2, seq_len: int = 16) -> list[str]:
    """The differences between a model's module and its account, one line each.

    Args:
        config: schema of a small model with two blocks or more; the model runs on the CPU.
        batch, seq_len: shape of its input tokens.
    """
    account, builder = config.account(), config.implementation()
    with shapes_only():
        model = builder.build(seq_len=seq_len)
    sizes = {"batch": batch, "seq_len": seq_len}
    block, edges = config.block_operations(**sizes), config.edge_operations(**sizes)
    values = config.initial_values()

    def make_model(kept: tuple[str, ...]) -> LanguageModel:
        """Build the model, or some pieces of it; every call gives the same initial values."""
        with shapes_only():
            made: LanguageModel = builder.build(seq_len=seq_len)
        if kept != account.pieces:
            thin(made, account.pieces, kept)
        made.to_empty(device="cpu")
        made.init_buffers("cpu")
        initialise(made, values, 0)
        return made

    lines = [*_parameters(model, account, values), *_pieces(model, account), *_plan(model, account)]
    if not lines:
        # These checks need the parameters, pieces and plan to be correct.
        lines += [*_operations(model, account, block, edges, **sizes), *_per_token(account, block, edges, **sizes)]
        lines += _stages(make_model, account, **sizes)
        if config.masks_documents:
            lines += _documents(make_model(account.pieces), account, **sizes)
    return lines


def _parameters(model: nn.Module, account: ModelAccount, values: Any) -> Iterator[str]:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name in (*shapes, *(set(account.parameters) - set(shapes))):
        shape, declared = shapes.get(name), account.parameters.get(name)
        if shape != declared:
            yield f"parameters: {name} is {shape} in the module, {declared} in the account"
    if list(shapes) != list(account.parameters) and not shapes.keys() ^ account.parameters.keys():
        yield "parameters: the account has them in another order than the module"
    for name in model.state_dict().keys() - shapes.keys():
        yield f"parameters: checkpoints would hold {name} too; a buffer should not be persistent"
    for name in shapes.keys() ^ values.keys():
        yield f"initial_values: {name} is in only one of initial_values and module"
    for name in (account.embedding, *account.lookups, *account.tied.values()):
        if name not in shapes:
            yield f"account: {name} is named, but the model has no such parameter"
    for name in account.tied.keys() & shapes.keys():
        yield f"tied: {name} has storage of its own"


def _pieces(model: LanguageModel, account: ModelAccount) -> Iterator[str]:
    blocks = [block_name(index) for index in range(account.layers)]
    if [block_name(name) for name in model.layers] != blocks:
        yield f"layers: the module has {list(model.layers)}, the account {account.layers}"
    modules = dict(model.named_modules())
    if account.pieces:
        if [piece for piece in account.pieces if is_in_block(piece)] != blocks:
            yield "pieces: blocks are missing, or not in order"
        for piece in set(account.pieces) - set(modules):
            yield f"pieces: there is no module {piece}"
        for name in account.parameters:
            if not any(name.startswith(f"{piece}.") for piece in account.pieces):
                yield f"pieces: none of them has {name}"
    for joined in account.joined:
        callers = [joined.caller.replace("*", str(number), 1) for number in range(account.layers)]
        for path, layers in zip(callers, joined.paths(account.layers), strict=True):
            for name in {path, *layers} - set(modules):
                yield f"joined: there is no module {name}"
    if account.attention:
        for piece in blocks:
            if f"{piece}.{account.attention}" not in modules:
                yield f"attention: there is no module {piece}.{account.attention}"


def _plan(model: nn.Module, account: ModelAccount) -> Iterator[str]:
    if not account.tensor_plan:
        return
    modules = [name for name, _ in model.named_modules()]
    for path, style in account.tensor_plan.items():
        if style not in STYLES:
            yield f"tensor_plan: {path} has the style {style}; known: {', '.join(STYLES)}"
        if not any(path.count(".") == name.count(".") and fnmatch.fnmatchcase(name, path) for name in modules):
            yield f"tensor_plan: there is no module {path}"
    for name in account.parameters:
        if style_of(account.tensor_plan, name.rpartition(".")[0]) in ("", "gathered"):
            yield f"tensor_plan: nothing is said about {name}"


def _operations(
    model: nn.Module,
    account: ModelAccount,
    block: list[Operation],
    edges: list[Operation],
    *,
    batch: int,
    seq_len: int,
) -> Iterator[str]:
    """Compare FLOPs and output shape of each operation that is named after a module, and the total FLOPs."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, __, output, name=name: (
                shapes.update({name: tuple(output.shape)}) if isinstance(output, Tensor) else None
            )
        )
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(batch, seq_len, dtype=torch.int64, device="meta"))
    root = type(model).__name__
    counted = {name.removeprefix(f"{root}."): sum(c.values()) for name, c in counter.get_flop_counts().items()}
    declared = {
        f"{block_name(index)}.{operation.name}": operation for index in range(account.layers) for operation in block
    }
    declared.update({operation.name: operation for operation in edges})
    for name, operation in declared.items():
        if name not in shapes:
            continue
        # The output of a grouped product has a single dim for the rows of all sequences.
        rows = (math.prod(operation.output[:-1]), operation.output[-1])
        if shapes[name] != (operation.output if operation.groups == 1 else rows):
            yield f"operations: {name} gives {shapes[name]}, not {operation.output}"
        if counted.get(name, 0) != operation.flops:
            yield f"operations: {name} takes {counted.get(name, 0)} FLOPs, not {operation.flops}"
    for name, number in Counter(operation.name for operation in (*block, *edges)).items():
        if number > 1:
            yield f"operations: {name} is there {number} times"
    for edge in edges:
        if account.pieces and edge.name not in account.pieces:
            yield f"operations: {edge.name} is outside of the blocks, but not one of the pieces"
    total, expected = counter.get_total_flops(), account.layers * forward_flops(block) + forward_flops(edges)
    if total != expected:
        yield f"operations: a forward pass takes {total} FLOPs, not {expected}"


def _per_token(
    account: ModelAccount, block: list[Operation], edges: list[Operation], *, batch: int, seq_len: int
) -> Iterator[str]:
    """The convention's FLOPs must be those of three forward passes, plus six for each element of a vector parameter."""
    forward = account.layers * forward_flops(block) + forward_flops(edges)
    vectors = sum(math.prod(shape) for shape in account.parameters.values() if len(shape) < 2)
    from_operations = 3 * forward // (batch * seq_len) + 6 * vectors
    from_sizes = training_flops_per_token(account, seq_len=seq_len)
    if from_sizes != from_operations:
        cause = "is a table missing in lookups?"
        yield f"FLOPs: the sizes in the account make {from_sizes} a token, its operations {from_operations}; {cause}"


def _documents(model: LanguageModel, account: ModelAccount, *, batch: int, seq_len: int) -> Iterator[str]:
    """Two documents in a sequence must give the same results as each document alone."""
    tokens = torch.arange(batch * seq_len).view(batch, seq_len) % account.vocab_size
    cut = seq_len // 3
    starts = torch.where(torch.arange(seq_len) < cut, 0, cut).expand(batch, -1)
    with torch.no_grad():
        packed = model(tokens, torch.arange(seq_len) - starts, starts)
        alone = torch.cat([model(piece.contiguous()) for piece in (tokens[:, :cut], tokens[:, cut:])], dim=1)
    if not _equal(alone, packed, _SUMS):
        yield "documents: with starts, a document's logits are not those of the document alone"


def _stages(make_model: Any, account: ModelAccount, *, batch: int, seq_len: int) -> Iterator[str]:
    """The model must give the same logits if it is cut in two before any piece. Models with a tied head are not cut."""
    tokens = torch.arange(batch * seq_len).view(batch, seq_len) % account.vocab_size
    positions = torch.arange(seq_len)
    with torch.no_grad():
        whole = make_model(account.pieces)(tokens)
        if tuple(whole.shape) != (batch, seq_len, account.vocab_size):
            yield f"forward: logits are {tuple(whole.shape)}, not {(batch, seq_len, account.vocab_size)}"
        if not _equal(whole, make_model(account.pieces)(tokens, positions)):
            yield "forward: positions 0, 1, … give another result than no positions"
        cuts = range(1, len(account.pieces)) if not account.tied else ()
        for cut in cuts:
            name = account.pieces[cut]
            try:
                hidden = make_model(account.pieces[:cut])(tokens, positions)
                after = make_model(account.pieces[cut:])(hidden, positions)
            # A stage that needs a missing piece may raise any exception.
            except Exception as error:
                yield f"pieces: cut before {name}, the model fails ({type(error).__name__}: {error})"
                continue
            if hidden.shape != (batch, seq_len, account.dim):
                yield f"pieces: before {name} the stream is {tuple(hidden.shape)}"
            if not _equal(whole, after):
                yield f"pieces: cut before {name}, the model computes something else"


def _equal(reference: Tensor, other: Tensor, rounding: float = _ROUNDING) -> bool:
    return reference.shape == other.shape and bool((reference - other).norm() <= rounding * reference.norm())
