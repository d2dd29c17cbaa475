"""`Recipe`, the whole configuration of one run; the split of its model into stages; conversion to plain values."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titanlab.checkpoint import check_address, is_address
from titanlab.costs import (
    AUTO,
    Layout,
    ModelAccount,
    Operation,
    automatic_chunk,
    is_in_block,
    resolve_layout,
    with_frozen,
)
from titanlab.errors import ConfigError
from titanlab.options import OUTSIDE_STEP, discover, schema_of
from titanlab.parallelism import Parallelism
from titanlab.ranges import plain, ranged
from titanlab.recipe.schema import NEITHER, Cluster, Training
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.optimizer.contract import WARMUP_STEPS
from titanlab.techniques.schedule.split import split as balanced

if TYPE_CHECKING:
    from titanlab.checkpoint import CheckpointConfig
    from titanlab.data import DataConfig
    from titanlab.recipe.schema import LaunchSettings
    from titanlab.techniques.ac.contract import ACConfig
    from titanlab.techniques.model.contract import ModelConfig
    from titanlab.techniques.optimizer.contract import OptimizerConfig
    from titanlab.techniques.precision.contract import PrecisionConfig
    from titanlab.techniques.profiler.contract import ProfilerConfig
    from titanlab.techniques.schedule.contract import PipelineSchedule
    from titanlab.techniques.tracker.contract import TrackerConfig
else:
    # OmegaConf accepts dataclasses and Any as types of fields, but no Protocol.
    ACConfig = CheckpointConfig = DataConfig = ModelConfig = OptimizerConfig = Any
    LaunchSettings = PrecisionConfig = PipelineSchedule = ProfilerConfig = TrackerConfig = Any

_COMPARE = "compare it with `titanlab train --cfg job`"
# Cached configs of options, by their schema and the text of their content.
_OPTIONS: dict[tuple[type, str], Any] = {}
_MOST_OPTIONS = 1024
# Most bytes of unsharded gradients that FSDP2 keeps between microbatches with `parallelism.reduce_gradients=auto`: as
# many as for a billion parameters in float32, which take a twentieth of a GPU with 80 GB.
MOST_WHOLE_GRADIENTS = 4 * 2**30
MOST_NOTES = 2000
# Notes may not have control characters (except tab and line feed), nor lone surrogates, which UTF-8 cannot encode.
_NOT_IN_NOTES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@ranged("")
@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Root of a configuration; each field after `init_from_exclude` is a config group.

    Attributes:
        name: label of the run, in its folder's name.
        sweep: label of the sweep that the run belongs to, the name of a folder in `runs`.
        runs: folder of all runs.
        notes: what a person wants to remember of the run; null: nothing.
        seed: of initial values and of the order of data.
        repeat: number of this repetition of an otherwise equal run.
        world: number of processes; null: the product of the degrees.
        init_from: source of a new run's starting weights: a folder that `titanlab import` made, a Hugging Face
            folder, or a run; null: the seed makes them. Only the weights are read from there.
        init_from_exclude: parameters that are not read from there and keep the values that the seed makes, by steps of
            their paths, such as `output`, `layers.0` or `attention.w*`.
    """

    name: str = field(default="run", metadata=NEITHER)
    sweep: str = field(default="single", metadata=NEITHER)
    runs: str = field(default="runs", metadata=NEITHER)
    notes: str | None = field(default=None, metadata=NEITHER)
    # `recipe_rules` checks the upper limit.
    seed: int = field(default=0, metadata={"most": None, **OUTSIDE_STEP})
    repeat: int = field(default=0, metadata=OUTSIDE_STEP)
    world: int | None = None
    # The identity has the fingerprint of the weights, not their path.
    init_from: str | None = field(default=None, metadata=NEITHER)
    init_from_exclude: tuple[str, ...] = field(default=(), metadata={"before": (), **OUTSIDE_STEP})
    training: Training = MISSING
    model: ModelConfig = MISSING
    parallelism: Parallelism = MISSING
    schedule: PipelineSchedule = MISSING
    precision: PrecisionConfig = MISSING
    ac: ACConfig = field(default=MISSING, metadata={"before": {"kind": "none"}})
    compile: Compile = MISSING
    optimizer: OptimizerConfig = MISSING
    data: DataConfig = field(default=MISSING, metadata=OUTSIDE_STEP)
    checkpoint: CheckpointConfig = field(default=MISSING, metadata=OUTSIDE_STEP)
    cluster: Cluster = MISSING
    tracker: TrackerConfig = field(default=MISSING, metadata=NEITHER)
    profiler: ProfilerConfig = field(default=MISSING, metadata=NEITHER)
    launch: LaunchSettings = field(default=MISSING, metadata=NEITHER)

    def __post_init__(self) -> None:
        # OmegaConf gives a list of its own type.
        object.__setattr__(self, "init_from_exclude", tuple(self.init_from_exclude))
        if self.init_from not in (None, MISSING) and is_address(self.init_from):
            check_address("init_from", self.init_from)
        if self.notes and len(self.notes) > MOST_NOTES:
            rule = f"has {len(self.notes):,} characters, and notes have at most {MOST_NOTES:,}"
            raise ConfigError("notes", f"{self.notes[:40]}…", rule, "shorten it")
        if self.notes and (found := _NOT_IN_NOTES.search(self.notes)) is not None:
            raise ConfigError("notes", self.notes, f"has the character {found[0]!r}, which is no text", "take it out")

    @property
    def layout(self) -> Layout:
        return self.parallelism.layout

    @property
    def account(self) -> ModelAccount:
        """The model's account, with the parameters that this recipe does not train."""
        return with_frozen(_account(self.model), self.training.freeze)

    @property
    def local_batch(self) -> int:
        """Sequences of one data-parallel process in one step."""
        return self.training.global_batch // self.layout.data

    @property
    def microbatch(self) -> int:
        """Sequences of one forward pass: the given number; by default 1 in a pipeline, else all of the local batch."""
        return self.training.microbatch or (1 if self.layout.pipeline > 1 else self.local_batch)

    @property
    def microbatches(self) -> int:
        """Forward passes of one process in one step."""
        return self.local_batch // self.microbatch

    @property
    def loss_chunk(self) -> int:
        """Number of tokens for which head and loss are computed at once; 0: all tokens of a microbatch at once."""
        if self.training.loss_chunk != AUTO:
            return int(self.training.loss_chunk or 0)
        tokens = self.microbatch * self.training.seq_len // self.layout.context
        chunk = automatic_chunk(tokens=tokens, columns=-(-self.model.vocab_size // self.layout.tensor))
        return 0 if chunk and needs_whole_logits(self) is not None else chunk

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced after each microbatch, instead of only after the last microbatch."""
        choice, layout = self.parallelism.reduce_gradients, self.layout
        if choice == "last":
            return False
        formats = self.precision.formats()
        if layout.data_parallelism(mixed=formats.mixed) == "none":
            return False
        if choice != "auto" or layout.pipeline > 1 or layout.fsdp == 1 or self.microbatches == 1:
            return choice == "each"
        account = _account(self.model)
        experts = account.expert_count
        elements = (account.parameter_count - experts) / layout.tensor + experts / max(layout.tensor, layout.expert)
        return elements * formats.reduce_bytes > MOST_WHOLE_GRADIENTS

    def leaves_node(self, per_node: int | None) -> bool:
        """Whether tensor parallelism of a resolved recipe sends between nodes that have `per_node` processes each."""
        devices = (per_node or 0) * self.cluster.linked_nodes
        return 0 < devices < self.layout.world and devices % self.layout.tensor > 0

    @property
    def tokens_per_step(self) -> int:
        return self.training.global_batch * self.training.seq_len


def needs_whole_logits(recipe: Recipe) -> tuple[str, str] | None:
    """Why the head and the loss of a resolved recipe cannot be computed in chunks, and the cure; None: they can be."""
    account = _account(recipe.model)
    if not account.head:
        return "the model does not name its head", "try 0, or name it in the model's account"
    if recipe.layout.tensor > 1 and not recipe.parallelism.loss_parallel:
        return "loss_parallel=false gathers whole logits", "try 0, or parallelism.loss_parallel=true"
    if not recipe.precision.splits_products and _multiplies_head(recipe.model, recipe.precision):
        rule = f"the head multiplies in {recipe.precision.kind}, which computes both of its gradients at once"
        return rule, f"try 0, or precision.skip=[{account.head}]"
    return None


@functools.lru_cache(maxsize=256)
def _account(model: ModelConfig) -> ModelAccount:
    return model.account()


@functools.lru_cache(maxsize=256)
def _multiplies_head(model: ModelConfig, precision: PrecisionConfig) -> bool:
    """Whether a precision has its own product for the head. Cached: listing all products takes a millisecond."""
    account = _account(model)
    return account.head in precision.products(account)


def pieces_by_stage(recipe: Recipe) -> list[tuple[str, ...]]:
    """Pieces of the model in every stage of a resolved recipe's pipeline, as `stage_pieces` makes them."""
    # Relative costs do not depend on the microbatch: with a batch of 1, equal models share one cached split.
    model, sizes = recipe.model, {"batch": 1, "seq_len": recipe.training.seq_len}
    return stage_pieces(
        model.account(),
        split=recipe.parallelism.split,
        placement=recipe.schedule.placement(ranks=recipe.layout.pipeline),
        block=model.block_operations(**sizes),
        edges=model.edge_operations(**sizes),
    )


def from_mapping(mapping: Mapping[str, Any]) -> Recipe:
    """The recipe that `to_mapping` wrote, checked field by field.

    Raises:
        ConfigError: an option is not installed, a key is unknown, a value has the wrong type, or a group or a key is
        missing whose default would make this version compute something else.
    """
    groups = discover()
    options = {group: _option(group, content) for group, content in mapping.items() if group in groups}
    others = {key: value for key, value in mapping.items() if key not in groups}
    merged = _merged(schema_node(Recipe), others, "")
    for item in dataclasses.fields(Recipe):
        if item.default is MISSING and item.name not in options:
            raise ConfigError(item.name, None, "is missing: every config has this group", _COMPARE)
    return Recipe(**options, **{str(key): merged[key] for key in merged if key not in options})


def _option(group: str, content: Any) -> Any:
    """A group's config. It is cached: a sweep's runs share most options, and checking an option takes milliseconds."""
    if not isinstance(content, Mapping):
        raise ConfigError(group, content, "must be a mapping", _COMPARE)
    kinds = discover()[group]
    kind = content.get("kind") if None not in kinds else None
    schema = schema_of(group, kind)
    known = schema, repr(content)
    if known in _OPTIONS:
        return _OPTIONS[known]
    node = schema_node(schema)
    # In a combination, each option has its own schema.
    for name in map(str, node) if kind not in kinds else ():
        if name != "kind" and isinstance(content.get(name), Mapping):
            node[name] = schema_node(schema_of(group, content[name].get("kind")))
    # A run that began before a field existed keeps what it did then: the field's value `begun`.
    begun = {item.name: item.metadata["begun"] for item in dataclasses.fields(schema) if "begun" in item.metadata}
    content = {**begun, **content}
    made = _merged(node, content, group)
    for item in dataclasses.fields(schema):
        default = getattr(made, item.name)
        if item.name not in content and item.metadata.get("before", default) != default:
            rule = f"is not in this config, and the default of this version, {default}, would make another recipe"
            raise ConfigError(f"{group}.{item.name}", None, rule, "use the version that made it")
    if len(_OPTIONS) >= _MOST_OPTIONS:
        _OPTIONS.clear()
    _OPTIONS[known] = made
    return made


def _merged(node: DictConfig, content: Mapping[str, Any], group: str) -> Any:
    """A schema with the values of a mapping: as a dataclass for a group; as a node for the recipe (`group` is empty).

    Raises:
        ConfigError: a key is unknown, or a value does not fit.
    """
    try:
        merged: Any = OmegaConf.merge(node, OmegaConf.create(literal(content)))
        return OmegaConf.to_object(merged) if group else merged
    except OmegaConfBaseException as error:
        inner = str(error.full_key or "")
        # For a key that no schema has, OmegaConf's error has no value.
        value = error.value if error.value is not None else content.get(inner)
        key = ".".join(filter(None, (group, inner))) or "config"
        raise ConfigError(key, value, str(error.msg).splitlines()[0].rstrip("."), _COMPARE) from error


def schema_node(schema: Any) -> DictConfig:
    """A schema's defaults as a node that accepts values: OmegaConf makes nodes of frozen dataclasses read-only."""
    root: DictConfig = OmegaConf.structured(schema)
    nodes = [root]
    while nodes:
        node = nodes.pop()
        OmegaConf.set_readonly(node, None)
        # `_get_node` is private, but the public methods resolve a value, or refuse a missing value.
        nodes += [inner for name in node if isinstance(inner := node._get_node(name), DictConfig)]
    return root


def to_mapping(recipe: Recipe) -> dict[str, Any]:
    mapping: dict[str, Any] = plain(recipe)
    return mapping


def resolve(recipe: Recipe, *, world: int | None, accelerator: str, device: str) -> Recipe:
    """The recipe with all open values filled in: degrees of -1, world, accelerator, device, warm-up, loss_chunk.

    Args:
        world: number of processes that torchrun or Slurm have started; None: the recipe decides.
        accelerator: what this host has, `cpu` or `cuda`; used if the recipe says `auto`.
        device: the accelerator's name, used if the recipe gives none.

    Raises:
        ConfigError: the degrees or the recipe's `world` do not fit the number of processes.
    """
    if world is not None and recipe.world not in (None, world):
        raise ConfigError("world", recipe.world, f"{world} processes were started", f"try world={world}, or null")
    if recipe.world is not None and recipe.world < 1:
        raise ConfigError("world", recipe.world, "must be at least 1", "try 1, or null for the product of the degrees")
    try:
        layout = resolve_layout(recipe.parallelism.degrees(), world if world is not None else recipe.world)
    except ConfigError as error:
        if world is None or error.key != "world":
            raise
        # The processes run already: the cure is to start another number of them, not to override `world`.
        cure = "start as many processes as the degrees make, or let one degree be -1"
        raise ConfigError("WORLD_SIZE", world, error.rule, cure) from error
    cluster = recipe.cluster
    if cluster.accelerator == "auto":
        cluster = dataclasses.replace(cluster, accelerator=accelerator)
    if cluster.device is None:
        cluster = dataclasses.replace(cluster, device=device if cluster.accelerator == accelerator else "cpu")
    schedule = recipe.optimizer.schedule
    schedule = dataclasses.replace(schedule, warmup_steps=schedule.warmup(recipe.training.steps))
    resolved = dataclasses.replace(
        recipe,
        world=layout.world,
        optimizer=dataclasses.replace(recipe.optimizer, schedule=schedule),
        parallelism=recipe.parallelism.with_degrees(layout.degrees()),
        cluster=cluster,
    )
    if recipe.training.global_batch < layout.data:
        # The processes cannot divide the batch, which `recipe_rules` reports.
        return resolved
    return dataclasses.replace(resolved, training=dataclasses.replace(recipe.training, loss_chunk=resolved.loss_chunk))


def shortened_warmup(recipe: Recipe) -> str:
    """The notice that a short run shortens the default warm-up; empty: the warm-up is not shortened."""
    steps, schedule = recipe.training.steps, recipe.optimizer.schedule
    if schedule.warmup_steps is not None or steps >= WARMUP_STEPS:
        return ""
    return (
        f"optimizer.schedule.warmup_steps={schedule.warmup(steps)}, a tenth of the steps: "
        f"the default of {WARMUP_STEPS} is more than the run has"
    )


KEY = "parallelism.split"
# Number of FLOPs that take as long as reading and writing one element. A CPU core moves about 1e9 elements a second and
# computes 5e10 to 1e11 FLOP/s; for a GPU the ratio is a little higher.
ELEMENT_FLOPS = 100


def stage_pieces(
    account: ModelAccount,
    *,
    split: Sequence[Any] | None,
    placement: Sequence[int],
    block: Sequence[Operation],
    edges: Sequence[Operation],
) -> list[tuple[str, ...]]:
    """The pieces of the model in each stage.

    Args:
        split: see `Parallelism.split`.
        placement: rank of every stage.
        block: the operations of a transformer block of the model.
        edges: the operations outside of blocks; each has the name of its piece.

    Raises:
        ConfigError: the split does not fit the model or the number of stages.
    """
    pieces, stages = account.pieces, len(placement)
    if split is None:

        def cost(operations: Sequence[Operation]) -> float:
            return sum(operation.flops + ELEMENT_FLOPS * math.prod(operation.output) for operation in operations)

        costs = {operation.name: cost([operation]) for operation in edges}
        of_pieces = (cost(block) if is_in_block(piece) else costs.get(piece, 0.0) for piece in pieces)
        first = list(_balanced(tuple(of_pieces), tuple(placement)))
    elif all(isinstance(item, int) for item in split):
        first = _by_counts(account, list(split), stages)
    else:
        first = _by_names(account, [str(item) for item in split], stages)
    return [pieces[begin:end] for begin, end in zip(first, [*first[1:], len(pieces)], strict=True)]


@functools.cache
def _balanced(costs: tuple[float, ...], placement: tuple[int, ...]) -> tuple[int, ...]:
    """Index of each stage's first piece. Cached: a sweep asks often, and a search can take tenths of a second."""
    return tuple(balanced(costs, stages=len(placement), placement=placement))


def _by_counts(account: ModelAccount, counts: list[int], stages: int) -> list[int]:
    """Index of each stage's first piece, from the numbers of blocks; other pieces are in the first or last stage."""
    if len(counts) != stages:
        rule = f"has {len(counts)} numbers of blocks, and the schedule has {stages} stages"
        raise ConfigError(KEY, as_typed(counts), rule, f"try null for a balanced split, or give {stages} numbers")
    if min(counts) < 0 or sum(counts) != account.layers or 0 in counts[1:-1]:
        rule = f"must add up to the model's {account.layers} blocks"
        if 0 in counts[1:-1] or min(counts) < 0:
            rule += ", with one at least for each stage between first and last"
        raise ConfigError(KEY, as_typed(counts), rule, "try null for a balanced split")
    blocks = [place for place, piece in enumerate(account.pieces) if is_in_block(piece)]
    begins = [sum(counts[:stage]) for stage in range(1, stages)]
    first = [0, *(blocks[begin] if begin < len(blocks) else blocks[-1] + 1 for begin in begins)]
    return _increasing(account, counts, first)


def _by_names(account: ModelAccount, names: list[str], stages: int) -> list[int]:
    if len(names) != stages - 1:
        rule = f"must name a piece for each of the {stages - 1} stages after the first, and names {len(names)}"
        raise ConfigError(KEY, as_typed(names), rule, "try null for a balanced split")
    unknown = [name for name in names if name not in account.pieces]
    if unknown:
        rule = f"the model has no piece {unknown[0]}"
        shown = account.pieces
        shown = (*shown[:2], "…", *shown[-3:]) if len(shown) > 6 else shown
        raise ConfigError(KEY, as_typed(names), rule, f"its pieces are {', '.join(shown)}")
    return _increasing(account, names, [0, *(account.pieces.index(name) for name in names)])


def _increasing(account: ModelAccount, split: Sequence[object], first: list[int]) -> list[int]:
    ends = [*first[1:], len(account.pieces)]
    for stage, (begin, end) in enumerate(zip(first, ends, strict=True)):
        if begin >= end:
            rule = f"stage {stage} would begin with {account.pieces[begin]} and end before {account.pieces[end]}"
            cure = "name pieces in the order of the forward pass, each once, or null for a balanced split"
            raise ConfigError(KEY, as_typed(split), rule, cure)
    return first


def as_typed(split: Sequence[object]) -> str:
    return f"[{','.join(map(str, split))}]"


# Text that needs no quotes in Hydra's grammar: it has a slash, so it is neither a number nor a constant.
_PLAIN = re.compile(r"[\w.+@%-]*/[\w./+@%-]*", re.ASCII)


def literal(value: Any) -> Any:
    """The values with `${` escaped: their interpolations are resolved already, so OmegaConf must not find others."""
    if isinstance(value, Mapping):
        return {key: literal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [literal(inner) for inner in value]
    # OmegaConf halves only those backslashes that stand before `${`.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def path_override(key: str, path: Path) -> str:
    """The override `key=path`, with quotes if Hydra's grammar needs them."""
    text = str(path)
    if _PLAIN.fullmatch(text):
        return f"{key}={text}"
    # Imported here: the import takes 0.1 s, and most paths need no quotes.
    from hydra.core.override_parser.types import Quote, QuotedString

    return f"{key}={QuotedString(text=literal(text), quote=Quote.double).with_quotes()}"
