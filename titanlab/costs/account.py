"""Accounts: torch-free data that a model declares about its parameters, operations and activations.

The planner, the trainer and the tests read the same account; tests compare it with the real modules.
"""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from titanlab.costs.layout import Layout

OperationKind = Literal["matmul", "attention", "norm", "pointwise", "lookup", "exchange"]
# Which part of a tensor a tensor-parallel rank has. `stream`: its tokens if the residual stream is cut, else all.
# `part`: the rank's heads or columns. `whole`: the whole tensor, for this rank's tokens. `all`: the whole tensor,
# whatever tokens the rank has.
Cut = Literal["stream", "part", "whole", "all"]
# Name of a block's input, which the previous block has computed.
HIDDEN = "hidden"


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A tensor of a block's forward pass that may have to be kept until the backward.

    Attributes:
        name: name of the tensor in its block; activations with the same name are the same tensor.
        shape: shape of the tensor over all ranks, for one microbatch.
        cut: which part of the tensor a tensor-parallel rank has.
        element_bytes: bytes of an element, such as 4 for float32 statistics; None: those of the compute precision.
        copy_of: name of the original, if this tensor is a copy in another precision; with equal widths there is no
            copy.
        accelerator: the only accelerator on which the tensor exists; empty: all.
        with_experts: what changes with expert parallelism, where each rank of the tensor axis routes its own tokens.
            `stream`: the cut becomes `stream`; but the cut `all` stays, and covers only this rank's experts. `only`:
            the cut becomes `stream` (`all` stays), and without expert parallelism there is no such tensor.
    """

    name: str
    shape: tuple[int, ...]
    cut: Cut = "stream"
    element_bytes: int | None = None
    copy_of: str = ""
    accelerator: str = ""
    with_experts: Literal["", "stream", "only"] = ""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator of torch inside an operation, which a checkpointing policy can name.

    Attributes:
        names: names of the operator, as torch prints them (`aten.mm.default`); several if the device decides which one
            runs.
        results: the tensors that it returns, with their own memory.
    """

    names: tuple[str, ...]
    results: tuple[Activation, ...]


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's share of a block's activations.

    Attributes:
        element_bytes: bytes of an element in the compute precision.
        accelerator: `cpu` or `cuda`; the kernels of the two keep different tensors.
        sequence_parallel: with tensor > 1, the residual stream is cut too.
    """

    element_bytes: int
    accelerator: str = "cuda"
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = True
    expert: int = 1

    def bytes_of(self, activations: Iterable[Activation]) -> int:
        """Bytes of the activations on one rank; a tensor that appears several times counts once."""
        sizes: dict[str, int] = {}
        for tensor in activations:
            if tensor.accelerator not in ("", self.accelerator):
                continue
            width = tensor.element_bytes or self.element_bytes
            name = tensor.copy_of if tensor.copy_of and width == self.element_bytes else tensor.name
            if tensor.with_experts == "only" and self.expert == 1:
                continue
            is_moved = bool(tensor.with_experts) and self.expert > 1
            cut = "stream" if is_moved and tensor.cut != "all" else tensor.cut
            whole = cut == "whole" or (cut == "stream" and not self.sequence_parallel)
            ranks = self.context * (1 if whole else self.tensor)
            if cut == "all":
                ranks = self.expert if is_moved and tensor.with_experts != "only" else 1
            sizes[name] = math.prod(tensor.shape) * width // ranks
        return sum(sizes.values())


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of a forward pass, for given batch and sequence.

    Attributes:
        name: path in the module: `attention.wq`, `feed_forward.silu`.
        kind: the bound of its time: matrix multiplication, attention, or memory bandwidth. `exchange`: the operation
            exists only with expert parallelism; it communicates, and also moves rows in memory.
        flops: forward floating-point operations (a multiply–add counts as two); attention counts
            the full square, without a causal discount. Zero if memory bandwidth dominates.
        output: shape of its result, `[batch, seq, …]`.
        keeps: tensors that autograd keeps for the backward pass, except parameters and buffers of the model.
        operators: torch's operators inside the operation that allocate results, in the order in which they run.
        passes: for operations that memory bandwidth limits: elements that the forward kernels read and write, divided
            by the elements of the output, in the compute precision. A sum of two tensors has 3: read 2, write 1.
        groups: number of matrices of a grouped product, each for some of the rows; 1: one matrix for all rows.
        layer: for one product of several linear layers: path of the layer whose cut and format count for the product;
            empty: the layer with the operation's name.
    """

    name: str
    kind: OperationKind
    flops: int
    output: tuple[int, ...]
    keeps: tuple[Activation, ...] = ()
    operators: tuple[Operator, ...] = ()
    passes: float = 3.0
    groups: int = 1
    layer: str = ""


def block_input(block: Sequence[Operation]) -> Activation:
    """The input of a block, which has the shape of its output and is the output of the previous block."""
    return Activation(name=HIDDEN, shape=block[-1].output)


def kept_activations(block: Iterable[Operation]) -> list[Activation]:
    """All activations that autograd keeps of a block; a tensor that several operations keep appears several times."""
    return [activation for operation in block for activation in operation.keeps]


@dataclass(frozen=True, kw_only=True)
class Init:
    """The distribution of a parameter's initial values; `titanlab.train.initialise` computes the values.

    Attributes:
        kind: `normal` (truncated at three standard deviations), `ones` or `zeros`.
        std: standard deviation of the normal before its truncation (which lowers it by 1.3 %).
    """

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """The experts of each block's feed-forward; a router chooses some of them for each token.

    Attributes:
        count: number of experts, which is the first dim of each of their parameters.
        active: number of experts that compute a token.
        module: path in a block of the module with all parameters of experts.
        balance: `bias`, `auxiliary_batch`, `auxiliary_sequence` or `none`; see `techniques.model.llama_schema`.
        bias_rate, auxiliary_weight: rate of the balance `bias`, and weight of the auxiliary loss.
    """

    count: int
    active: int
    module: str = "feed_forward.experts"
    balance: str = "none"
    bias_rate: float = 0.0
    auxiliary_weight: float = 0.0


class TensorPlan(dict[str, str]):
    """Path of a module → name of its style; `*` matches one step of a path. Do not change a plan: it caches answers."""

    def __init__(self, styles: Iterable[tuple[str, str]]) -> None:
        super().__init__(styles)
        # Cached: the planner asks for the same modules for every layout.
        self.style_of = functools.cache(self._style_of)
        self.styles_in = functools.cache(self._styles_in)

    def _style_of(self, module: str) -> str:
        for pattern, style in self.items():
            # Compare the number of dots too, because fnmatch's `*` also matches several steps.
            if pattern.count(".") == module.count(".") and fnmatch.fnmatchcase(module, pattern):
                return style
        return ""

    def _styles_in(self, piece: str) -> tuple[str, ...]:
        """Styles of the modules of a piece."""
        steps = piece.count(".") + 1
        begins = ((".".join(pattern.split(".")[:steps]), style) for pattern, style in self.items())
        return tuple(style for begin, style in begins if fnmatch.fnmatchcase(piece, begin))


# New accounts of a model have equal plans: they share one TensorPlan, with its cached answers.
@functools.lru_cache(maxsize=256)
def _tensor_plan(styles: tuple[tuple[str, str], ...]) -> TensorPlan:
    return TensorPlan(styles)


def style_of(plan: Mapping[str, str], module: str) -> str:
    return _tensor_plan(tuple(plan.items())).style_of(module)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Linear layers of one input, which the trainer computes as one product (`parallelism/pipeline_weights.py`).

    Attributes:
        caller: path of the `Projections` that calls them; `layers.*` matches every block.
        layers: names of the linear layers beside it, without biases.
        copied: layers whose output is copied, because the backward pass keeps it longer than the other outputs.
    """

    caller: str
    layers: tuple[str, ...]
    copied: tuple[str, ...] = ()

    def paths(self, layers: int) -> list[tuple[str, ...]]:
        """For each block of a model of `layers` blocks, the paths of the linear layers that its product joins."""
        owner = self.caller.rpartition(".")[0]
        return [
            tuple(f"{owner.replace('*', str(number), 1)}.{name}" for name in self.layers) for number in range(layers)
        ]


@dataclass(frozen=True, kw_only=True)
class ModelAccount:
    """All that a model declares about itself for costs, planning and parallelism.

    Attributes:
        parameters: name of every stored parameter → its shape; a tied parameter has only its owner's name.
        tied: names that share another parameter's storage: alias → owner.
        heads, head_dim: number and width of the queries' heads, for attention's FLOPs.
        lookups: names of tables other than the embedding whose rows are looked up, such as learned positions.
        pieces: top-level modules in the order of the forward pass, `layers.0` for a block: a pipeline may cut
            between them. The output of a piece is the input of the next. Empty: the model cannot be cut.
        attention: path in a block of the module that context parallelism replaces: (q, k, v) → output, for q
            [batch, heads, seq, head_dim]. Empty: there is none.
        tensor_plan: path of a module → name of its style in `titanlab.parallelism.tensor`; `layers.*` matches
            every block. Empty: no tensor parallelism.
        experts: the blocks' experts; None: every token uses every parameter.
        joined: groups of linear layers, each computed as one product.
        head: path of the last module, a linear layer whose output the model returns unchanged as logits. The head gets
            the hidden state, and with tied embeddings also the table. Empty: unknown; logits then always exist whole.
        frozen: names of parameters that a recipe does not train (`training.freeze`); no model declares any.
    """

    parameters: Mapping[str, tuple[int, ...]]
    embedding: str
    tied: Mapping[str, str]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dim: int
    vocab_size: int
    lookups: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    attention: str = ""
    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    experts: RoutedExperts | None = None
    joined: tuple[Joined, ...] = ()
    head: str = ""
    frozen: frozenset[str] = frozenset()

    @functools.cached_property
    def plan(self) -> TensorPlan:
        return _tensor_plan(tuple(self.tensor_plan.items()))

    @functools.cached_property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters.values())

    @functools.cached_property
    def active_count(self) -> int:
        """Number of parameters that one token uses; of the experts, only the chosen ones count."""
        if self.experts is None:
            return self.parameter_count
        idle = self.experts.count - self.experts.active
        return self.parameter_count - self.expert_count // self.experts.count * idle

    @functools.cached_property
    def expert_count(self) -> int:
        """Number of parameters of experts."""
        return sum(math.prod(shape) for name, shape in self.parameters.items() if self.is_of_experts(name))

    def is_of_experts(self, name: str) -> bool:
        return self.experts is not None and f".{self.experts.module}." in name

    @functools.cached_property
    def embedding_count(self) -> int:
        """Number of parameters that are only looked up: all tables except a table that is shared with the head."""
        tables = {self.embedding, *self.lookups} - set(self.tied.values())
        return sum(math.prod(self.parameters[name]) for name in tables)

    @functools.cached_property
    def idle(self) -> tuple[str, ...]:
        """The pieces before the first trained parameter. They have no backward pass, and keep no activations."""
        # A router counts its tokens in the backward pass, so every block with experts has a backward pass.
        if not self.frozen or self.experts is not None:
            return ()
        trained = [name for name in self.parameters if name not in self.frozen]
        # A tied table has the embedding's name: if it is trained, the first piece has a backward pass.
        begins = (any(name.startswith(f"{piece}.") for name in trained) for piece in self.pieces)
        return self.pieces[: next((place for place, is_trained in enumerate(begins) if is_trained), 0)]

    @functools.cached_property
    def linear_layers(self) -> dict[str, tuple[int, ...]]:
        return linear_layers(self)


BLOCKS = "layers"
"""The module whose children are the blocks."""


def block_name(number: int | str) -> str:
    return f"{BLOCKS}.{number}"


def is_in_block(name: str) -> bool:
    return name.startswith(f"{BLOCKS}.")


def linear_layers(model: ModelAccount) -> dict[str, tuple[int, ...]]:
    """Path of every linear layer → shape of its weight, [out, in].

    Linear layers have the style `colwise`, `rowwise` or `head`; without a plan, all matrices but lookup tables count.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter, shape in model.parameters.items():
        name, _, leaf = parameter.rpartition(".")
        multiplies = not model.tensor_plan or model.plan.style_of(name) in ("colwise", "rowwise", "head")
        if leaf == "weight" and len(shape) == 2 and multiplies and parameter not in (model.embedding, *model.lookups):
            shapes[name] = shape
    return shapes


def part_shape(model: ModelAccount, name: str, shape: tuple[int, ...], degree: int) -> tuple[int, ...]:
    """Shape of one tensor-parallel rank's part of a linear layer's weight; of the first rank, if parts are uneven."""
    cut = cut_dim(model.plan.style_of(name), len(shape))
    return tuple(-(-size // degree) if dim == cut else size for dim, size in enumerate(shape))


def path_matches(name: str, pattern: str) -> bool:
    """Whether steps of a module's path match a pattern: `wk`, `feed_forward.w*`, `layers.0`, or a whole path."""
    return fnmatch.fnmatchcase(f".{name}.", f"*.{pattern}.*")


def with_frozen(account: ModelAccount, patterns: Sequence[str]) -> ModelAccount:
    """The account in which the parameters that match a pattern are frozen."""
    if not patterns:
        return account
    matching = (name for name in account.parameters if any(path_matches(name, pattern) for pattern in patterns))
    return replace(account, frozen=frozenset(matching))


# Names of titanlab's operators in torch. The text below each name says what the operator does.
CONTEXT_ATTENTION = "titanlab.context_attention.default"
"""Attention of a context-parallel rank."""
GROUPED_PRODUCT = "titanlab.grouped_product.default"
"""The products of all experts of a rank."""
EXCHANGE = "titanlab.exchange.default"
"""The exchange of rows between the ranks of expert parallelism."""


@dataclass(frozen=True, kw_only=True)
class TensorStyle:
    """How a style of the tensor plan cuts a module's parameters, and what its module communicates.

    Attributes:
        cut_dim: the dim along which parameters are cut; None: they stay whole, as do parameters without this dim.
        allows_uneven: whether parts may have different sizes.
        is_stack: whether parameters have one dim before those of a layer: they are stacked matrices of experts.
        gathers: whether the module reads the residual stream: all-gather forward if the stream is cut, sum backward.
        sums: whether the module adds to the residual stream: sum forward, all-gather backward if the stream is cut.
        has_parameters: whether the module itself has parameters.
        treats_part: whether whole parameters act on a rank's part of an activation, so that each rank has only a
            partial gradient of them.
    """

    cut_dim: int | None = None
    allows_uneven: bool = False
    is_stack: bool = False
    gathers: bool = False
    sums: bool = False
    has_parameters: bool = True
    treats_part: bool = False


# `titanlab.parallelism.tensor` implements these styles.
STYLES = {
    "colwise": TensorStyle(cut_dim=0),
    "rowwise": TensorStyle(cut_dim=1, sums=True),
    "gathered": TensorStyle(gathers=True, has_parameters=False),
    "norm": TensorStyle(),
    "head_norm": TensorStyle(treats_part=True),
    # All ranks choose the same experts for all tokens, and each rank has a part of every expert.
    "experts": TensorStyle(gathers=True, sums=True, has_parameters=False),
    "router": TensorStyle(treats_part=True),
    "expert_colwise": TensorStyle(cut_dim=1, is_stack=True),
    "expert_rowwise": TensorStyle(cut_dim=2, is_stack=True),
    # Expert parallelism cuts the stack over a separate group of ranks; see `account_for`.
    "expert_stack": TensorStyle(cut_dim=0, is_stack=True),
    "embedding": TensorStyle(cut_dim=0, allows_uneven=True, sums=True),
    "head": TensorStyle(cut_dim=0, allows_uneven=True, gathers=True),
}


def cut_dim(style: str, dims: int) -> int | None:
    """The dim along which a style cuts a parameter with `dims` dims; None: the parameter stays whole."""
    dim = STYLES[style].cut_dim if style in STYLES else None
    return dim if dim is not None and dim < dims else None


def has_partial_gradient(plan: Mapping[str, str], parameter: str, *, sequence_parallel: bool) -> bool:
    """Whether each tensor-parallel rank has only a partial gradient of a parameter that is not cut."""
    if sequence_parallel:
        return True
    style = style_of(plan, parameter.rpartition(".")[0])
    return style in STYLES and STYLES[style].treats_part


def parameter_style(account: ModelAccount, parameter: str) -> str:
    """The style of the module that has a parameter; empty if the plan does not name the module."""
    return account.plan.style_of(parameter.rpartition(".")[0])


def training_flops_per_token(account: ModelAccount, *, seq_len: int) -> int:
    """FLOPs of forward and backward for one token: 6·(N − N_emb) + 12·L·H·Q·T; N counts only the active experts.

    Every weight that multiplies costs 2 FLOPs forward and 4 backward; attention costs 12·H·Q·T per layer for H heads of
    width Q over T positions, without a discount for causality and without recomputation (PaLM, arXiv 2204.02311,
    appendix B). N_emb counts the tables of tokens and learned positions, which are looked up, not multiplied. A table
    that is tied to the head multiplies and counts in N. Norm weights and biases count in N too, although they need no
    matmul. Frozen weights have no gradient (2 FLOPs less); pieces without a backward pass only compute forward.
    """
    weights = 6 * (account.active_count - account.embedding_count)
    attention = 12 * account.layers * account.heads * account.head_dim * seq_len
    tables = {account.embedding, *account.lookups} - set(account.tied.values())
    idle = tuple(f"{piece}." for piece in account.idle)
    for name in account.frozen - tables:
        size = math.prod(account.parameters[name])
        if account.experts is not None and account.is_of_experts(name):
            size = size // account.experts.count * account.experts.active
        weights -= (4 if name.startswith(idle) else 2) * size
    # Two thirds of attention's FLOPs are in its backward pass.
    attention -= attention // 3 * 2 // account.layers * sum(map(is_in_block, account.idle))
    return weights + attention


def forward_flops(operations: Iterable[Operation]) -> int:
    """FLOPs of a forward pass through the given operations, for their batch and sequence."""
    return sum(operation.flops for operation in operations)


class Cuts(NamedTuple):
    """The two degrees that cut a parameter: `tensor`, of tensor or expert parallelism; `fsdp`, of FSDP2."""

    tensor: int
    fsdp: int


STACK = "expert_stack"


def account_for(account: ModelAccount, layout: Layout) -> ModelAccount:
    """The account with the tensor plan of a layout: expert parallelism divides the experts, and cuts no expert's width.

    With expert parallelism each rank of the tensor axis routes its own tokens: no rank gathers or sums tokens.
    """
    if layout.expert == 1:
        return account
    styles = {"expert_colwise": STACK, "expert_rowwise": STACK}
    plan = {path: styles.get(style, style) for path, style in account.tensor_plan.items() if style != "experts"}
    return replace(account, tensor_plan=plan)


def cuts_of(account: ModelAccount, name: str, layout: Layout, *, sharded: bool = True) -> Cuts:
    if parameter_style(account, name) == STACK:
        return Cuts(layout.expert, layout.expert_shard if sharded else 1)
    return Cuts(layout.tensor, layout.fsdp if sharded else 1)


def tensor_part(account: ModelAccount, name: str, *, tensor: int, number: int = 0) -> tuple[int, ...]:
    """Shape of a parameter on one rank of tensor parallelism, or of expert parallelism for a stack of experts.

    Args:
        number: the rank's number on its axis; the first ranks have the largest parts.
    """
    shape = list(account.parameters[name])
    dim = _cut(account, name, tensor=tensor)
    if dim is not None:
        part = -(-shape[dim] // tensor)
        shape[dim] = max(0, min(part, shape[dim] - number * part))
    return tuple(shape)


def sharded_dim(account: ModelAccount, name: str, *, tensor: int, fsdp: int) -> int:
    return fsdp_dim(account.parameters[name], _cut(account, name, tensor=tensor), tensor=tensor, fsdp=fsdp)


def fsdp_dim(shape: Sequence[int], cut: int | None, *, tensor: int, fsdp: int) -> int:
    """The dim along which FSDP2 shards a parameter.

    It is the rows' dim, or the columns' dim if tensor parallelism has left uneven rows. Stacked matrices are sharded
    along the experts. If the number of experts is not divisible, FSDP2 would pad it: then take another dim, which
    tensor parallelism does not cut, if that dim is divisible.
    """
    if len(shape) == 3 and cut != 0:
        other = 2 if cut == 1 else 1
        return other if shape[0] % fsdp and shape[other] % fsdp == 0 else 0
    return 1 if cut == 0 and shape[0] % (tensor * fsdp) else 0


def gathered_part(account: ModelAccount, name: str, *, tensor: int, fsdp: int, number: int = 0) -> tuple[int, ...]:
    """Shape of a parameter after FSDP2's gather: a tensor-parallel rank's part, padded so that all shards are equal."""
    shape = tensor_part(account, name, tensor=tensor, number=number)
    if sharded_dim(account, name, tensor=tensor, fsdp=fsdp) > 0:
        return shape  # no padding: this dim is divisible (for columns, the rules of layouts require it)
    return (-(-shape[0] // fsdp) * fsdp, *shape[1:])


def stored_part(account: ModelAccount, name: str, *, tensor: int, fsdp: int, number: int = 0) -> tuple[int, ...]:
    """Shape of the shard of a parameter that a rank stores; FSDP2 pads the last shards to an equal size."""
    shape = list(gathered_part(account, name, tensor=tensor, fsdp=fsdp, number=number))
    shape[sharded_dim(account, name, tensor=tensor, fsdp=fsdp)] //= fsdp
    return tuple(shape)


def _cut(account: ModelAccount, name: str, *, tensor: int) -> int | None:
    """The dim that tensor parallelism cuts; None for parameters that stay whole: norms, and biases after a sum."""
    if tensor == 1:
        return None
    return cut_dim(parameter_style(account, name), len(account.parameters[name]))
