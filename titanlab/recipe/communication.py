"""Makes from a recipe the input of the formulas for communication in `titanlab.costs.traffic_account`."""

from __future__ import annotations

from titanlab.costs import EXCHANGE, ModelAccount, Repeats, Step, account_for, is_in_block
from titanlab.recipe.recipe import Recipe, pieces_by_stage
from titanlab.techniques.ac.contract import ACConfig
from titanlab.techniques.precision.contract import matched


def step_of(recipe: Recipe, *, account: ModelAccount | None = None) -> Step:
    """The values on which the communication of a resolved recipe's step depends.

    Args:
        account: account of some pieces of the model: these are one stage, without recomputation. None: the whole model,
            in the stages of the recipe's pipeline.
    """
    config, layout = recipe.parallelism, recipe.layout
    model = account_for(account or recipe.account, layout)
    formats = recipe.precision.formats()
    stages: list[tuple[str, ...]] = []
    placement: list[int] = [0]
    orders: list[list[str]] = []
    if layout.pipeline > 1 and account is None:
        stages = pieces_by_stage(recipe)
        placement = recipe.schedule.placement(ranks=layout.pipeline)
        actions = recipe.schedule.actions(ranks=layout.pipeline, microbatches=recipe.microbatches)
        orders = [
            [action.kind.value for action in actions[rank] if action.stage == stage]
            for stage, rank in enumerate(placement)
        ]
    return Step(
        account=model,
        layout=layout,
        seq_len=recipe.training.seq_len,
        microbatch=recipe.microbatch,
        microbatches=recipe.microbatches,
        compute_bytes=formats.compute_bytes,
        reduce_bytes=formats.reduce_bytes,
        master_bytes=formats.master_bytes,
        fp32_parts=matched(model, formats.fp32_parts),
        float8_gathered=recipe.precision.float8_gathered(model),
        mixed=formats.mixed,
        reshards=config.frees_after_forward,
        gathered_blocks=config.gathered_blocks,
        prefetch=config.prefetch,
        reduces_each=recipe.reduces_each,
        sequence_parallel=config.sequence_parallel,
        loss_parallel=config.loss_parallel,
        loss_chunk=recipe.loss_chunk,
        pads_chunks=recipe.compile.loss,
        context_method=config.context_method,
        accelerator=recipe.cluster.accelerator,
        stages=stages,
        placement=placement,
        orders=orders,
        repeats=_repeats(recipe, model) if account is None else {},
    )


# Operators with which torch gathers and reduces: those of compiled code, on every device; and those of eager mode.
_COMPILED = ("_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.reduce_scatter_tensor.default")
_GATHERS = "c10d._allgather_base_.default"
_SCATTERS = {"cuda": "c10d._reduce_scatter_base_.default", "cpu": "c10d.alltoall_base_.default"}
_ALL_REDUCES = {True: "_c10d_functional.all_reduce.default", False: "c10d.allreduce_.default"}


def repeats_in_block(recipe: Recipe, ac: ACConfig, number: int) -> tuple[bool, bool]:
    """Whether recomputing a block repeats the gathers and the sums of its tensor parallelism."""
    gather, total = _collectives(recipe)
    return ac.repeats_collective(gather, number=number), ac.repeats_collective(total, number=number)


def _collectives(recipe: Recipe) -> tuple[str, str]:
    """The operators with which a recipe's tensor parallelism gathers and sums."""
    compiled = recipe.compile.blocks
    gather, scatter = _COMPILED if compiled else (_GATHERS, _SCATTERS[recipe.cluster.accelerator])
    return gather, scatter if recipe.parallelism.sequence_parallel else _ALL_REDUCES[compiled]


def _repeats(recipe: Recipe, model: ModelAccount) -> dict[str, Repeats]:
    """Name of a block → the communication that its recomputation repeats; blocks that repeat none are left out."""
    layout, ac = recipe.layout, recipe.ac
    if layout.tensor == 1 and layout.context == 1 and layout.expert == 1:
        return {}
    block = recipe.model.block_operations(batch=recipe.microbatch, seq_len=recipe.training.seq_len)
    attention = {operation.name for operation in block if operation.kind == "attention"}
    gather, total = _collectives(recipe)
    by_treatment: dict[object, Repeats] = {}
    blocks = {}
    for piece in (piece for piece in model.pieces if is_in_block(piece)):
        number = int(piece.rpartition(".")[2])
        treatment = ac.treatment(number)
        if treatment not in by_treatment:
            by_treatment[treatment] = Repeats(
                gathers=ac.repeats_collective(gather, number=number),
                sums=ac.repeats_collective(total, number=number),
                exchange=layout.expert > 1 and ac.repeats_collective(EXCHANGE, number=number),
                context=bool(attention.intersection(ac.recomputed(block, number=number))),
            )
        if by_treatment[treatment] != Repeats():
            blocks[piece] = by_treatment[treatment]
    return blocks
