"""Config of parallelism: the degree of each axis, and options of the axes."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

from titanlab.costs import AXES, Layout
from titanlab.options import NOT_PRICED, option


@option("parallelism")
@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """The degrees of a layout, and options of its axes; one degree may be -1 and follows from the world size.

    Attributes:
        pipeline: stages of layers, one after another; see the group `schedule`.
        replicate: copies of the model. Alone this is DDP, with shard > 1 HSDP.
        shard: processes over which FSDP2 shards parameters, gradients and optimizer state.
        context: processes that share every sequence. FSDP2 shards over them too.
        tensor: processes that share every layer.
        expert: processes that share the experts of every block. They are neighbours among those of shard, context and
            tensor, so this degree does not multiply the number of processes.
        sequence_parallel: with tensor > 1, norms and residuals are split along the sequence as well
            (arXiv 2205.05198): less memory for the same bytes sent.
        loss_parallel: with tensor > 1, the loss is computed from logits that stay split over the vocabulary.
        async_tensor: with tensor > 1, products and their collectives run interleaved, in pieces (AsyncTP); in float8
            only products whose sums are scattered.
        context_method: `ring` passes keys and values around while it computes; `all_gather` gathers them first.
        split: null: balance the stages by cost. Otherwise the number of blocks of every stage, `[3,5]`, or the first
            piece of every stage except the first, `[layers.3]`.
        reshard_after_forward: `always` frees a block's parameters after its forward pass and gathers them again
            for the backward; `never` keeps them: more memory, less communication. `auto` is `always`, but
            `never` in a pipeline, where each microbatch would gather them again.
        gathered_blocks: where blocks free their parameters, the last blocks of a stage that keep them: more memory,
            less communication. The last block always does, because its backward follows at once.
        prefetch: blocks that FSDP2 gathers before the block that computes has ended, in both directions; 0: one, when
            the host comes to it.
        reduce_gradients: `each` reduces gradients after each microbatch, so that FSDP2 keeps only its shard of them
            between microbatches; `last` sums whole gradients, and reduces after the last microbatch: less
            communication. `auto` is `last`, but `each` where FSDP2 would keep more than 4 GiB of whole gradients;
            always `last` in a pipeline.
        cpu_offload: sharded parameters, gradients and optimizer state are kept in host memory.
        symmetric_memory: FSDP2 gathers and scatters in buffers that NCCL registers with all ranks (symmetric memory).
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = field(default=1, metadata={"before": 1})
    sequence_parallel: bool = True
    loss_parallel: bool = True
    async_tensor: bool = False
    context_method: str = field(default="ring", metadata={"choices": ("ring", "all_gather")})
    split: tuple[Any, ...] | None = None
    reshard_after_forward: str = field(default="auto", metadata={"choices": ("auto", "always", "never")})
    gathered_blocks: int = field(default=1, metadata={"before": 1, "least": 1})
    prefetch: int = field(default=0, metadata={"before": 0, "least": 0, **NOT_PRICED})
    cpu_offload: bool = field(default=False, metadata=NOT_PRICED)
    symmetric_memory: bool = field(default=False, metadata={"before": False, **NOT_PRICED})
    # Older runs computed the same as `auto`, up to the rounding of sums. An older run that resumes keeps `last`.
    reduce_gradients: str = field(
        default="auto", metadata={"choices": ("auto", "each", "last"), "before": "auto", "begun": "last"}
    )

    @property
    def frees_after_forward(self) -> bool:
        """Whether blocks free their gathered parameters between forward and backward; for resolved degrees."""
        return self.reshard_after_forward == "always" or (self.reshard_after_forward == "auto" and self.pipeline == 1)

    def freed_blocks(self, count: int) -> int:
        """How many of a stage's `count` blocks, counted from the first, free their parameters; for resolved degrees."""
        return max(0, count - self.gathered_blocks) if self.frees_after_forward else 0

    @functools.cached_property
    def layout(self) -> Layout:
        return Layout(**self.degrees(), expert=self.expert)

    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    def with_degrees(self, degrees: dict[str, int]) -> Parallelism:
        return dataclasses.replace(self, **degrees)  # type: ignore[arg-type]
