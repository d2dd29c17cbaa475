"""Builds from a recipe the model and one function that trains a step. Only this module combines techniques.

The order of building a model, or a stage of a pipeline, matters: meta → precision → tensor → context → expert → ac →
compile → shard → materialise → initial values.

`SkipBadSteps` skips the update of a step whose loss or gradient is not finite, on all ranks: the flag is computed on
the device from totals that are reduced over all ranks. Fused Adam and AdamW read the flag there; for another optimizer
the host waits for the flag once a step.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlab.checkpoint import Position
from titanlab.costs import account_for, block_name, hidden_shape
from titanlab.data import Batch, source
from titanlab.distributed import Mesh, World
from titanlab.parallelism import (
    IGNORE,
    ChunkedLoss,
    Columns,
    ExpertModules,
    Loss,
    Sharded,
    SplitLoss,
    TensorParallel,
    check_attention,
    fully_shard_model,
    join_products,
    keep_whole,
    loss_sum,
    of_logits,
    parallelise,
    positions,
    replicate_model,
    scale_gradients,
    spread_attention,
    spread_experts,
    sum_gradients,
)
from titanlab.recipe import Recipe, pieces_by_stage
from titanlab.records import Messages
from titanlab.techniques.compile.compiler import GraphMemory
from titanlab.techniques.model.attention import HostStarts, Packed
from titanlab.techniques.model.language_model import LanguageModel, shapes_only
from titanlab.techniques.precision.cast import LossScale, dtype_named, keep_in_fp32, step_if
from titanlab.techniques.precision.product import take_over
from titanlab.techniques.profiler.contract import Phase, nothing
from titanlab.train.initialise import initialise
from titanlab.train.totals import Balance


class Sums(NamedTuple):
    """What one rank adds to a step's totals; both numbers are 0 on a rank whose loss another rank reports.

    loss_sum: float32 scalar, cross-entropy summed over the valid labels
    tokens: number of those labels
    """

    loss_sum: torch.Tensor
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A model ready to train.

    Attributes:
        model: a module that has all parameters of this rank, named as in the model's account.
        to_device: takes the batch of a data-parallel rank, and copies the part that this rank computes to the device.
        forward_backward: runs all microbatches of a step; the gradients are those of
            loss_sum / recipe.tokens_per_step · loss scale, summed over data-parallel ranks.
        loss_scale: the loss scale; it also runs the optimizer's step, or skips it.
        evaluate: returns the `Sums` of up to `evaluation_rows` sequences, without computing gradients.
        after_update: has to be called when parameters have changed, and before the first step.
        after_first_step: has to be called by all ranks after the process's first `forward_backward`; raises
            ConfigError if a technique of the recipe did not take effect.
        balance: counts and balances the load of experts.
        messages: returns the state of the pipeline's sends and receives; None without a pipeline.
    """

    model: nn.Module
    to_device: Callable[[Batch], StepBatch]
    forward_backward: Callable[[StepBatch], Sums]
    loss_scale: LossScale
    balance: Balance
    evaluate: Callable[[StepBatch], Sums]
    evaluation_rows: int
    after_update: Callable[[], None] = lambda: None
    after_first_step: Callable[[], None] = lambda: None
    messages: Callable[[], Messages | None] = lambda: None

    def restore(self, position: Position) -> None:
        """Continue from a position; the model must have the parameters of that position already."""
        self.loss_scale.restore(position.loss_scale)
        self.balance.restore(position.routing)
        self.after_update()


class _Runner(NamedTuple):
    """This rank's stages of the model, and functions that run a step on these stages and return its sum of losses.

    scale: the loss is multiplied by it before the backward pass
    """

    model: nn.Module
    stages: Sequence[Stage]
    scale: float | Tensor
    reports_loss: bool
    forward_backward: Callable[[StepBatch], Tensor]
    evaluate: Callable[[StepBatch], Tensor]
    evaluation_rows: int
    messages: Callable[[], Messages | None] = lambda: None


def assemble(recipe: Recipe, world: World, mesh: Mesh, *, phase: Phase = nothing) -> Assembled:
    """Build, parallelise, materialise and initialise the recipe's model; `phase` opens a phase of the profiler."""
    after_first_step: Callable[[], None] = lambda: None  # noqa: E731
    if recipe.parallelism.async_tensor and recipe.compile.blocks:
        from titanlab.techniques.compile.compiler import FusionCheck

        # The check must exist before the model is compiled.
        after_first_step = functools.partial(FusionCheck().check_fused, world.gather)
    precision = recipe.precision.implementation()
    loss_scale = precision.loss_scale(world.device)
    if recipe.training.on_nan == "skip":
        loss_scale = SkipBadSteps(loss_scale, limit=recipe.training.nan_limit, device=world.device)
    run = (_pipelined if recipe.layout.pipeline > 1 else _single)(recipe, world, mesh, loss_scale, phase)
    # Without expert parallelism all ranks of the tensor axis route the same tokens, so only one of them counts tokens.
    routes_own = recipe.layout.expert > 1
    with world.without_data or contextlib.nullcontext():
        balance = Balance(
            [stage.model for stage in run.stages],
            recipe.model.account(),
            world.device,
            counts=mesh.coordinate("tensor") == 0 or routes_own,
            parts=1 if routes_own else recipe.layout.tensor,
            scale=run.scale,
            seq_len=recipe.training.seq_len // recipe.layout.context,
        )

    def sums(total: Tensor, batch: StepBatch) -> Sums:
        return Sums(total if run.reports_loss else torch.zeros_like(total), batch.valid)

    def forward_backward(batch: StepBatch) -> Sums:
        balance.begin()
        total = run.forward_backward(batch)
        with phase("backward"):
            for stage in run.stages:
                stage.finish_gradients()
        return sums(total, batch)

    @torch.no_grad()
    def evaluate(batch: StepBatch) -> Sums:
        return sums(run.evaluate(batch), batch)

    return Assembled(
        model=run.model,
        to_device=to_device_of(recipe, world, mesh, reports_loss=run.reports_loss),
        forward_backward=forward_backward,
        balance=balance,
        loss_scale=loss_scale,
        evaluate=evaluate,
        evaluation_rows=run.evaluation_rows,
        after_update=functools.partial(precision.after_update, run.model),
        after_first_step=after_first_step,
        messages=run.messages,
    )


def _single(recipe: Recipe, world: World, mesh: Mesh, loss_scale: LossScale, phase: Phase) -> _Runner:
    """Build the whole model on this rank (there is no pipeline), and the functions that run a step."""
    stage = build_stage(recipe, world, mesh)
    # A model that gets no positions numbers its tokens 0, 1, …, which is correct for whole sequences.
    positions = positions_of(recipe, world, mesh) if recipe.layout.context > 1 else None
    # All ranks know tokens_per_step. Dividing the loss by it keeps gradients small in low precision. If fewer labels
    # were valid, the training loop corrects the gradients exactly.
    scale = loss_scale.multiplier(stage.sharded.divides_by / recipe.tokens_per_step)
    loss = _loss(recipe, mesh, stage.model, scale)
    size = recipe.microbatch
    graphs = GraphMemory(records=recipe.compile.records_graphs)

    def forward_backward(batch: StepBatch) -> Tensor:
        total: Tensor | None = None
        count = batch.tokens.shape[0]
        for start in range(0, count, size):
            rows = slice(start, start + size)
            graphs.begin()
            with stage.sharded.microbatch(last=start + size >= count):
                with phase("forward"):
                    places = batch.places(rows, positions)
                    forward = functools.partial(stage.sharded.forward, batch.tokens[rows], *places)
                    part = loss(forward, batch.labels[rows])
                with phase("backward"):
                    (part * scale).backward()
            part = graphs.kept(part.detach())
            # Copy the first gradients: the graph's next run overwrites them. Reduced gradients have their own memory.
            if start == 0 and size < count and not recipe.reduces_each:
                graphs.keep_gradients(stage.model.parameters())
            total = part if total is None else total + part
        assert total is not None
        return total

    evaluation_graphs = GraphMemory(records=recipe.compile.records_graphs)

    def evaluate(batch: StepBatch) -> Tensor:
        evaluation_graphs.begin()
        tokens, labels = batch.tokens, batch.labels
        if recipe.layout.tensor > 1 or recipe.compile.compiles:
            # Pad to a full microbatch: compiled code exists for its shape, and its number of tokens is divisible by the
            # tensor degree.
            missing = size - tokens.shape[0]
            tokens, labels = F.pad(tokens, (0, 0, 0, missing)), F.pad(labels, (0, 0, 0, missing), value=IGNORE)
            documents = None if batch.documents is None else batch.documents.padded(missing)
            batch = StepBatch(tokens, labels, batch.valid, documents)
        places = batch.places(slice(None), positions)
        total = evaluation_graphs.kept(loss(functools.partial(stage.sharded.forward, tokens, *places), labels))
        stage.sharded.release()
        return total

    reports_loss = mesh.coordinate("tensor") == 0
    return _Runner(stage.model, [stage], scale, reports_loss, forward_backward, evaluate, evaluation_rows=size)


def _pipelined(recipe: Recipe, world: World, mesh: Mesh, loss_scale: LossScale, phase: Phase) -> _Runner:
    """Build this rank's stages of the pipeline, and the schedule that runs them."""
    # Imported here, because the import takes 0.5 s and only pipelines need it.
    from titanlab.parallelism import Pipeline

    ranks, this_rank = recipe.layout.pipeline, mesh.coordinate("pipeline")
    placement = recipe.schedule.placement(ranks=ranks)
    pieces = pieces_by_stage(recipe)
    built = {
        number: build_stage(recipe, world, mesh, pieces=pieces[number])
        for number, rank in enumerate(placement)
        if rank == this_rank
    }
    divides_by = next(iter(built.values())).sharded.divides_by
    scale = loss_scale.multiplier(divides_by / recipe.tokens_per_step)
    last = built.get(len(placement) - 1)
    pipeline = Pipeline(
        {number: stage.model for number, stage in built.items()},
        actions=recipe.schedule.actions(ranks=ranks, microbatches=recipe.microbatches),
        placement=placement,
        group=mesh.axis("pipeline").get_group(),
        device=world.device,
        loss=_loss(recipe, mesh, None if last is None else last.model, scale),
        scale=scale,
        hidden_shape=hidden_shape(
            recipe.layout,
            microbatch=recipe.microbatch,
            seq_len=recipe.training.seq_len,
            dim=recipe.model.account().dim,
            sequence_parallel=recipe.parallelism.sequence_parallel,
        ),
        hidden_dtype=dtype_named(recipe.precision.formats().compute),
        microbatch=recipe.microbatch,
        reduces_each=recipe.reduces_each,
        phase=phase,
    )
    positions = positions_of(recipe, world, mesh)
    return _Runner(
        model=together({piece: stage.model for number, stage in built.items() for piece in pieces[number]}),
        stages=list(built.values()),
        scale=scale,
        reports_loss=mesh.coordinate("tensor") == 0 and placement[-1] == this_rank,
        forward_backward=lambda batch: pipeline.forward_backward(
            batch.tokens, batch.labels, positions, batch.documents
        ),
        evaluate=lambda batch: pipeline.evaluate(batch.tokens, batch.labels, positions, batch.documents),
        evaluation_rows=recipe.local_batch,
        messages=pipeline.messages,
    )


def _loss(recipe: Recipe, mesh: Mesh, model: nn.Module | None, scale: float | torch.Tensor) -> Loss:
    """The loss function; `model` None: the model's last piece is on another rank, so this rank never calls the loss."""
    compiled = recipe.compile.implementation().compile_loss
    if recipe.loss_chunk and model is not None:
        columns, gathered = Columns(), None
        if recipe.layout.tensor > 1:
            columns = Columns.of(mesh.axis("tensor").get_group(), recipe.model.vocab_size)
            gathered = tensor_cut(recipe, mesh).whole
        return ChunkedLoss(
            model.get_submodule(recipe.model.account().head),
            tokens=recipe.loss_chunk,
            scale=scale,
            columns=columns,
            gathered=gathered,
            compiled=compiled if recipe.compile.loss else None,
            writes_gradient=recipe.layout.pipeline > 1,
        )
    if recipe.layout.tensor > 1 and recipe.parallelism.loss_parallel:
        columns = Columns.of(mesh.axis("tensor").get_group(), recipe.model.vocab_size)
        return of_logits(SplitLoss(columns, compiled=compiled if recipe.compile.loss else None))
    return of_logits(compiled(loss_sum))


class StepBatch(NamedTuple):
    """One rank's share of a step, on its device.

    tokens: [sequences, seq of this rank] int64
    labels: [sequences, seq of this rank] int64; -100 does not count
    valid: number of labels that count; 0 on ranks whose loss another rank reports
    documents: the documents of this rank's part of the sequences; None without document masks
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    valid: int
    documents: Packed | None = None

    def places(self, rows: slice, positions: torch.Tensor | None) -> tuple[torch.Tensor | HostStarts | None, ...]:
        """The arguments of a model's forward after the tokens: `positions`, or those of the batch's documents."""
        return (positions,) if self.documents is None else self.documents.arguments(rows)


def positions_of(recipe: Recipe, world: World, mesh: Mesh) -> torch.Tensor:
    """The positions of this rank's tokens in their sequence: [seq of this rank] int64."""
    layout, seq_len = recipe.layout, recipe.training.seq_len
    if layout.context == 1:
        return torch.arange(seq_len, device=world.device)
    return positions(seq_len, ranks=layout.context, rank=mesh.coordinate("context")).to(world.device)


def to_device_of(recipe: Recipe, world: World, mesh: Mesh, *, reports_loss: bool) -> Callable[[Batch], StepBatch]:
    """The function that copies this rank's part of a batch to its device."""
    chosen = positions_of(recipe, world, mesh).cpu() if recipe.layout.context > 1 else None
    # Read the separators at their first use: if a step is only traced, there is no data.
    separators = functools.cache(functools.partial(source.separators, recipe.data))

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if world.device.type == "cpu" else tensor.pin_memory().to(world.device, non_blocking=True)

    def to_device(batch: Batch) -> StepBatch:
        tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
        documents = None
        if recipe.data.document_mask:
            starts = torch.from_numpy(separators().starts(batch.tokens))
            places = torch.arange(starts.shape[1]) - starts
            if chosen is None:
                documents = Packed(moved(places), moved(starts))
            else:
                documents = Packed(moved(places[:, chosen]), starts[:, chosen], stays_on_host=True)
        if chosen is not None:
            tokens, labels = tokens[:, chosen], labels[:, chosen]
        valid = int((labels != IGNORE).sum()) if reports_loss else 0
        return StepBatch(moved(tokens), moved(labels), valid, documents)

    return to_device


_ROW, _SKIPPED = "bad_row", "bad_skipped"


class SkipBadSteps(LossScale):
    """A loss scale that takes no step if the gradient is not finite, up to `limit` times in a row.

    If the precision's own loss scale tolerates an overflow, and the loss is finite, the step is not bad: the
    precision's loss scale skips the step, and the step does not count towards `limit`.
    """

    def __init__(self, inner: LossScale, *, limit: int, device: torch.device) -> None:
        self._inner, self._limit = inner, limit
        self._row, self._skipped = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._is_lost = torch.zeros((), dtype=torch.bool, device=device)
        self._inner_skips = False

    def multiplier(self, constant: float) -> float | Tensor:
        return self._inner.multiplier(constant)

    def unscaled(self, tensor: Tensor) -> Tensor:
        return self._inner.unscaled(tensor)

    def learn_loss(self, loss: Tensor) -> None:
        self._inner.learn_loss(loss)
        self._is_lost = ~loss.isfinite()

    def judge(self, norm: Tensor) -> Tensor:
        fields, finite = self._inner.judge(norm), norm.isfinite()
        self._inner_skips = fields is not None
        if fields is None:
            fields = torch.tensor([math.nan, 0.0, 0.0], dtype=torch.float64, device=norm.device)
        # A smaller scale can cure gradients that overflow, but not a loss that is not finite.
        self._bad = ~finite & ((fields[2] == 0) | self._is_lost)
        self._row = torch.where(self._bad, self._row + 1, torch.where(finite, 0, self._row))
        self._skipped = self._skipped + self._bad
        skipped = fields[1] if self._inner_skips else self._skipped.double()
        return torch.stack([fields[0], skipped, fields[2], (self._row <= self._limit).double()])

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._inner_skips:
            self._inner.step(optimizer)
        else:
            step_if(optimizer, ~self._bad)

    def state(self) -> dict[str, float]:
        return {**self._inner.state(), _ROW: self._row.item(), _SKIPPED: self._skipped.item()}

    def restore(self, state: Mapping[str, float]) -> None:
        self._inner.restore({name: value for name, value in state.items() if name not in (_ROW, _SKIPPED)})
        self._row = torch.full_like(self._row, int(state.get(_ROW, 0)))
        self._skipped = torch.full_like(self._skipped, int(state.get(_SKIPPED, 0)))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A model, or some pieces of it, ready to compute.

    Attributes:
        sharded: the model distributed over data-parallel ranks.
        summands: parameters whose gradients have to be summed over the tensor axis after the backward.
        experts: parameters whose gradients have to be multiplied by `expert_factor` after the backward.
    """

    model: LanguageModel
    sharded: Sharded
    summands: Sequence[nn.Parameter]
    summed_in: torch.dtype
    mesh: Mesh
    experts: Sequence[nn.Parameter] = ()

    @property
    def expert_factor(self) -> float:
        """FSDP2's divisor of other parameters' gradients, divided by its divisor of experts' gradients.

        FSDP2 divides by the number of ranks over which it sums: replicate · shard · context, and for experts
        replicate · shard · context · tensor / expert.
        """
        return self.mesh.layout.tensor / self.mesh.layout.expert

    def finish_gradients(self) -> None:
        """Sum the gradients of `summands` and scale those of `experts`, after a step's backward passes."""
        if self.summands:
            sum_gradients(self.summands, self.mesh.axis("tensor").get_group(), self.summed_in)
        if self.experts and self.expert_factor != 1:
            scale_gradients(self.experts, self.expert_factor)


def build_stage(recipe: Recipe, world: World, mesh: Mesh, *, pieces: Sequence[str] | None = None) -> Stage:
    """Build, cut, shard, materialise and initialise the recipe's model, or some pieces of it."""
    layout, config = recipe.layout, recipe.parallelism
    account = recipe.model.account()
    precision, formats = recipe.precision.implementation(), recipe.precision.formats()
    with shapes_only(), default_dtype(dtype_named(formats.master)):
        model = recipe.model.implementation().build(seq_len=recipe.training.seq_len)
    if pieces is not None:
        thin(model, account.pieces, pieces)
    precision.convert(model, world.device)
    if recipe.loss_chunk and (pieces is None or account.head in pieces):
        setting: Any = {"key": "training.loss_chunk", "value": recipe.loss_chunk, "cure": "try 0"}
        take_over(model.get_submodule(account.head), account.head, **setting)
    summands: frozenset[str] = frozenset()
    cut = None
    if layout.tensor > 1:
        cut = tensor_cut(recipe, mesh)
        summands = parallelise(model, account_for(account, layout).tensor_plan, cut)
    join_products(model, account.joined, cut)
    if layout.context > 1:
        check_attention(model, account, seq_len=recipe.training.seq_len, context=layout.context)
        spread_attention(model, account.attention, method=config.context_method, group=mesh.axis("context").get_group())
    experts = spread_experts(model, mesh.expert_axis) if layout.expert > 1 else []
    # Idle blocks have no backward pass: they need no checkpointing of activations, and a compiler would refuse it.
    trained = {index: block for index, block in model.layers.items() if block_name(index) not in recipe.account.idle}
    recipe.ac.implementation().apply({int(index): block for index, block in trained.items()})
    recipe.compile.implementation().compile_blocks(
        model.layers.values(),
        async_group=mesh.axis("tensor").get_group() if config.async_tensor else None,
        memory_budget=recipe.ac.compiler_budget(),
    )
    # Freeze here: the steps above replace parameters, and FSDP2 and DDP below read which parameters are trained.
    for name in recipe.account.frozen.intersection(named := dict(model.named_parameters())):
        named[name].requires_grad = False
    sharded = _apply_data_parallelism(model, recipe, world, mesh, experts)
    scaled = [parameter for module in experts for parameter in module.parameters()]
    summed = [parameter for name, parameter in model.named_parameters() if name in summands]
    # These gradients have few elements: a wide dtype costs little and avoids another rounding.
    summed_in = torch.promote_types(dtype_named(formats.master), dtype_named(formats.reduce))
    return Stage(model=model, sharded=sharded, summands=summed, summed_in=summed_in, mesh=mesh, experts=scaled)


def tensor_cut(recipe: Recipe, mesh: Mesh) -> TensorParallel:
    """How tensor parallelism cuts the recipe's model."""
    return TensorParallel(
        mesh=mesh.axis("tensor"),
        seq_len=recipe.training.seq_len // recipe.layout.context,
        sequence_parallel=recipe.parallelism.sequence_parallel,
        loss_parallel=recipe.parallelism.loss_parallel,
    )


def _apply_data_parallelism(
    model: LanguageModel, recipe: Recipe, world: World, mesh: Mesh, experts: Sequence[nn.Module]
) -> Sharded:
    """Apply DDP or FSDP2, allocate storage and compute initial values."""
    layout, formats = recipe.layout, recipe.precision.formats()
    method = layout.data_parallelism(mixed=formats.mixed)
    sharded = keep_whole(model)
    if method == "fsdp2":
        units = keep_in_fp32(model, recipe.model.account(), formats)
        sharded = fully_shard_model(
            model,
            list(model.layers.values()),
            mesh.data_parallel,
            formats,
            freed=recipe.parallelism.freed_blocks(len(model.layers)),
            prefetch=recipe.parallelism.prefetch,
            cpu_offload=recipe.parallelism.cpu_offload,
            whole=units.whole,
            apart=units.apart,
            experts=ExpertModules(modules=experts, mesh=mesh.expert_data_parallel) if experts else None,
            symmetric_memory=recipe.parallelism.symmetric_memory,
            reduces_each=recipe.reduces_each,
        )
    with world.without_data or contextlib.nullcontext():
        model.to_empty(device="cpu" if recipe.parallelism.cpu_offload else world.device)
        model.init_buffers(world.device)
        if world.without_data is None:
            initialise(model, recipe.model.initial_values(), recipe.seed)
        if method == "ddp":
            sharded = replicate_model(model, mesh.axis("replicate"), reduces_each=recipe.reduces_each)
    return sharded


def thin(model: LanguageModel, pieces: Sequence[str], kept: Sequence[str]) -> None:
    """Remove the pieces of other stages from a model on the meta device."""
    for piece in pieces:
        if piece not in kept:
            container, _, key = piece.rpartition(".")
            owner = model.get_submodule(container)
            if isinstance(owner, nn.ModuleDict):
                del owner[key]
            else:
                setattr(owner, key, None)


def together(owners: Mapping[str, LanguageModel]) -> nn.Module:
    """A module with pieces of several stages, named as in the whole model; `owners`: piece → the stage that has it."""
    whole = nn.Module()
    for piece, stage in owners.items():
        container, _, key = piece.rpartition(".")
        if container and container not in dict(whole.named_children()):
            whole.add_module(container, nn.Module())
        whole.get_submodule(container).add_module(key, stage.get_submodule(piece))
    return whole


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside the `with` statement, new floating-point tensors have this dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
