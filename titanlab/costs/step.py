"""What the communication of a step depends on: the model, the layout, sizes, the order of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from titanlab.costs.account import ModelAccount
from titanlab.costs.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """A rank's numbers on the axes whose ranks have different communication.

    Attributes:
        fsdp: the number of its shard of FSDP2; the last shards may be smaller.
    """

    pipeline: int = 0
    context: int = 0
    tensor: int = 0
    fsdp: int = 0


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """The communication of a block's forward pass that recomputation in its backward pass repeats.

    Attributes:
        gathers, sums: of the residual stream, by tensor parallelism.
        context: of keys and values, by context parallelism.
        exchange: of tokens, by expert parallelism.
    """

    gathers: bool = False
    sums: bool = False
    context: bool = False
    exchange: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """The inputs of the formulas.

    Attributes:
        account, layout: of the model, and its degrees.
        seq_len: tokens of a sequence, over all its ranks.
        microbatch: sequences of one forward pass.
        microbatches: forward passes of one rank in a step.
        compute_bytes: of an element of gathered parameters and of activations.
        reduce_bytes: of an element of a gradient while it is summed over ranks.
        master_bytes: of an element of a stored parameter, and of its summed gradient.
        fp32_parts: pieces that compute and reduce in float32 even if the rest does not.
        float8_gathered: names of the parameters that FSDP2 gathers in one byte per element.
        mixed: parameters are cast before they compute: then FSDP2 does the replication, not DDP.
        reshards: blocks free gathered parameters between forward and backward.
        sequence_parallel, loss_parallel, context_method: as in the config of parallelism.
        loss_chunk: tokens for which the loss is computed at once; 0: all of a microbatch.
        pads_chunks: the last chunk is as large as the others.
        accelerator: `cpu` or `cuda`. On CPU an all-to-all replaces gloo's reduce-scatter, which has twice the traffic.
        stages: by stage of a pipeline, the pieces of the model; empty: one stage has all.
        placement: by stage, its rank on the pipeline axis.
        orders: by stage, its actions in order: `F` forward, `B` or `I` backward; other letters are ignored. Empty: one
            microbatch after another.
        repeats: by block, what its recomputation repeats; other blocks repeat nothing.
    """

    account: ModelAccount
    layout: Layout
    seq_len: int
    microbatch: int
    microbatches: int = 1
    compute_bytes: int = 4
    reduce_bytes: int = 4
    master_bytes: int = 4
    fp32_parts: Sequence[str] = ()
    float8_gathered: Collection[str] = ()
    mixed: bool = False
    reshards: bool = True
    sequence_parallel: bool = True
    loss_parallel: bool = True
    loss_chunk: int = 0
    pads_chunks: bool = False
    context_method: str = "ring"
    accelerator: str = "cuda"
    stages: Sequence[Sequence[str]] = ()
    placement: Sequence[int] = (0,)
    orders: Sequence[Sequence[str]] = ()
    repeats: Mapping[str, Repeats] = field(default_factory=dict)

    def element_bytes(self, piece: str) -> int:
        """Bytes of an element of a piece's activations."""
        return 4 if piece in self.fp32_parts else self.compute_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank, before sequence parallelism cuts them."""
        return self.microbatch * self.seq_len // self.layout.context

    @property
    def scatter(self) -> str:
        """The operation that implements reduce-scatter."""
        return "all_to_all" if self.accelerator == "cpu" else "reduce_scatter"

    @property
    def replicas_by_ddp(self) -> bool:
        """Whether DDP sums the gradients."""
        return self.layout.data_parallelism(mixed=self.mixed) == "ddp"

    def stages_of(self, rank: Coordinate) -> Iterator[tuple[int, Sequence[str]]]:
        """The stages of a rank, by number, with their pieces."""
        stages = self.stages or (self.account.pieces,)
        return ((number, pieces) for number, pieces in enumerate(stages) if self.placement[number] == rank.pipeline)

    def axis(self, name: str) -> str:
        """The name of an axis's group in the traced table; a group of all ranks has the name of the axis with all."""
        return _axis_name(self.layout, name)


@functools.lru_cache(maxsize=16384)
def _axis_name(layout: Layout, name: str) -> str:
    degrees = {**layout.degrees(), layout.fsdp_name: layout.fsdp}
    degrees |= {"expert_shard": layout.expert_shard, "expert": layout.expert} if layout.expert > 1 else {}
    whole = next((axis for axis, degree in degrees.items() if degree == layout.world > 1), None)
    name = layout.fsdp_name if name == "fsdp" else name
    ranks = layout.world if name == "world" else degrees[name]
    return whole if whole is not None and ranks == layout.world else name
