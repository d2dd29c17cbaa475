"""Reduces a recipe to a small copy whose layout and size train in a second on a CPU. Torch-free.

A layout of many processes is folded to layouts of few processes, which together exercise every axis. The schedule and
its stages, activation checkpointing, compiled parts, the optimizer, clipping, tied embeddings, shared key/value heads
and rotary frequencies stay. Layers, widths, vocabulary, sequences and batch shrink to the least that the layouts need.
Features that a CPU lacks are replaced by the nearest ones; `Reduced.notes` names these.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from titanlab.checkpoint import CheckpointConfig, NoCheckpoints
from titanlab.costs import AXES, SHORT, Layout, ModelAccount, with_frozen
from titanlab.data import Synthetic
from titanlab.errors import ConfigError
from titanlab.launch import on_this_host
from titanlab.parallelism import Parallelism
from titanlab.prove.tolerances import LEAST_EPS
from titanlab.ranges import plain
from titanlab.recipe import Cluster, Recipe, check, resolve
from titanlab.records import safe_name
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing
from titanlab.techniques.compile.schema import RECORDING, Compile
from titanlab.techniques.model.contract import ModelConfig, ReducedSizes
from titanlab.techniques.precision.cast_schema import Fp32
from titanlab.techniques.profiler.profilers_schema import NoProfiling
from titanlab.techniques.schedule.published_schema import OneFOneB
from titanlab.techniques.tracker.trackers_schema import Jsonl

MOST_PROCESSES = 16
# Larger degrees are reduced to this degree: an axis of two ranks runs the same code as an axis of many.
_FOLDED = 2
# Pipelines and tensor parallelism come first: most errors appear only with them, alone or with another axis.
_ORDER = ("pipeline", "tensor", "context", "shard", "replicate")


def folded(layout: Layout, *, most: int = MOST_PROCESSES, fixed: Mapping[str, str] | None = None) -> list[Layout]:
    """The layout itself if it has at most `most` processes; else layouts with degrees of 2.

    Every axis of the layout has a degree of at least 2 in at least one result. The first result has as many axes as fit
    together; later results have the axes that did not fit, and as many others as fit.

    Args:
        fixed: axes whose degree cannot be changed, each with the reason.

    Raises:
        ConfigError: an axis whose degree cannot be changed has more ranks than `most`.
    """
    if layout.world <= most:
        return [layout]
    fixed = fixed or {}
    degrees = layout.degrees()
    least = {
        axis: degrees[axis] if axis in fixed else min(degrees[axis], _FOLDED) for axis in _ORDER if degrees[axis] > 1
    }
    for axis, degree in least.items():
        if degree > most:
            why = fixed.get(axis, f"at most {most} processes are started")
            rule = f"cannot be folded to {most} processes: {why}"
            raise ConfigError(f"parallelism.{axis}", degree, rule, "allow more: --processes")
    missing = list(least)
    layouts = []
    while missing:
        chosen: dict[str, int] = {}
        for axis in (*missing, *(axis for axis in least if axis not in missing)):
            if math.prod(chosen.values()) * least[axis] <= most:
                chosen[axis] = least[axis]
        missing = [axis for axis in missing if axis not in chosen]
        layouts.append(Layout(**{axis: chosen.get(axis, 1) for axis in AXES}))
    return layouts


_VOCABULARY = 256
_LEAST_WIDTH = 64
_LEAST_SEQUENCE = 32
_LEAST_HEAD = 8
_MOST_HEAD = 512
_MOST_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that reduced recipes share, so that they train on the same model and data."""

    model: ReducedSizes
    seq_len: int
    global_batch: int


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A resolved recipe, and a layout of few processes in which it is reduced."""

    run: str
    recipe: Recipe
    layout: Layout

    @property
    def label(self) -> str:
        """The small layout and the real one as text: `dp_s2·tp2 of dp_s64·tp8`; only one if they are the same."""
        real = self.recipe.layout
        return self.layout.label if self.layout == real else f"{self.layout.label} of {real.label}"

    @property
    def missing(self) -> tuple[str, ...]:
        """Short names of the axes that this layout lacks."""
        degrees = self.recipe.layout.degrees().items()
        return tuple(SHORT[axis] for axis, degree in degrees if degree > 1 and getattr(self.layout, axis) == 1)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step: as in the real size, at most two a rank; or a number that the schedule allows."""
        ranks, schedule = self.layout.pipeline, self.recipe.schedule
        real: int = self.recipe.microbatches
        if ranks == 1:
            return min(real, 2)
        if schedule.fixed_size() is not None:
            return real
        most = min(real, 2 * ranks)
        for count in (*range(most, 4 * ranks + 1), *range(most, 0, -1)):
            with contextlib.suppress(ConfigError):
                schedule.check_pipeline(ranks=ranks, microbatches=count)
                schedule.actions(ranks=ranks, microbatches=count)
                return int(count)
        return most

    @property
    def unit(self) -> int:
        """The number of rows in every process's part of a matrix must be a multiple of this."""
        precision = self.recipe.precision
        shards = self.layout.fsdp if precision.float8_gathered(self.recipe.model.account()) else 1
        return math.lcm(2, precision.multiple, shards)

    @property
    def layers(self) -> int:
        """Number of blocks: one for each stage; with one or two stages, two for each, so that a stage has several."""
        ranks, schedule = self.layout.pipeline, self.recipe.schedule
        stages = 1 if ranks == 1 else len(schedule.placement(ranks=ranks))
        if stages > _MOST_LAYERS:
            rule = f"makes {stages} stages of {ranks} ranks: more than the {_MOST_LAYERS} blocks of a proof"
            raise ConfigError("schedule", schedule.kind, rule, "prove it with fewer stages a rank")
        return 2 * stages if stages <= 2 else stages


def common_sizes(group: Sequence[Folded]) -> Sizes:
    """Sizes with which all of these recipes can be reduced; their models must be equal.

    Raises:
        ConfigError: there are no such sizes.
    """
    account = group[0].recipe.model.account()
    tensor = math.lcm(*(case.layout.tensor for case in group))
    # Key/value heads of a process in the real size.
    own_heads = [case.recipe.model.account().kv_heads // case.recipe.layout.tensor for case in group]
    kv_heads = tensor * (2 if max(own_heads) >= 2 else 1)
    shared = account.heads // account.kv_heads
    heads = kv_heads * (shared if shared <= 2 else 4 if kv_heads <= 2 else 2)

    def fits(head_dim: int) -> bool:
        width = heads * head_dim
        return width >= _LEAST_WIDTH and all(
            kv_heads // case.layout.tensor * head_dim % case.unit == 0
            and (case.layout.tensor == 1 or width % (case.layout.fsdp * case.unit) == 0)
            for case in group
        )

    head_dim = next((dim for dim in range(_LEAST_HEAD, _MOST_HEAD + 1, 2) if fits(dim)), None)
    if head_dim is None:
        rule = "has no small head that all these layouts can cut"
        raise ConfigError("model", group[0].recipe.model.kind, rule, "prove fewer of them at once")
    unit = math.lcm(*(case.unit * case.layout.tensor * case.layout.fsdp for case in group))
    # Rows of the embedding: divisible by the degree of tensor parallelism only if the original's rows are.
    rows = -(-_VOCABULARY // unit) * unit
    accounts = [(case.recipe.precision, case.recipe.model.account()) for case in group]
    converts_head = any(own.pieces and own.pieces[-1] in precision.products(own) for precision, own in accounts)
    if not converts_head and any(case.recipe.model.vocab_size % case.recipe.layout.tensor for case in group):
        rows += 1
    sizes = ReducedSizes(
        layers=max(case.layers for case in group),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_dim=-(-2 * heads * head_dim // unit) * unit,
        vocab_size=rows,
        unit=math.lcm(*(case.unit for case in group), *(case.layout.fsdp for case in group)),
    )
    # A sequence needs two chunks for each context-parallel process, and equal parts for tensor parallelism.
    parts = [(2, case.layout.tensor, case.recipe.precision.multiple) for case in group]
    chunk = math.lcm(*(case.layout.context * math.lcm(*part) for case, part in zip(group, parts, strict=True)))
    batch = math.lcm(*(case.layout.data * case.microbatches for case in group))
    # At least four sequences: `Synthetic.gaps` gives four consecutive ones different numbers of valid labels.
    batch *= max(1, 4 // batch)
    return Sizes(model=sizes, seq_len=-(-_LEAST_SEQUENCE // chunk) * chunk, global_batch=batch)


# A model without a reduced form is used unchanged if it has at most this many parameters.
_SMALL = 5_000_000
# Less than the gradient norm of a new model, so that every step is clipped.
_NORM = 0.1
_RATE = 1e-3
# Attention kernels that a CPU has.
_CPU_KERNELS = ("auto", "flash", "math")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A resolved recipe in its real size, and the name of its run."""

    run: str
    recipe: Recipe


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A recipe reduced to one layout of few processes."""

    run: str  # name of the run in its real size
    layout: str  # the folded layout and the real one, as text
    missing: tuple[str, ...] = ()  # axes that this layout lacks; another layout of this run has them
    recipe: Recipe | None = None  # reduced, resolved and checked; None: it cannot be reduced
    error: ConfigError | None = None
    notes: tuple[str, ...] = ()  # differences from the original, apart from sizes


def reduce_all(
    candidates: Sequence[Candidate],
    *,
    steps: int,
    runs: str,
    most: int,
    inductor: bool = False,
    alike: bool = False,
    saves: bool = False,
) -> list[Reduced]:
    """Fold and reduce recipes; a recipe whose axes do not fit into one layout of `most` processes gets several.

    Args:
        inductor: keep inductor, which writes and compiles kernels; otherwise compiled parts are traced only.
        alike: recipes that train the same model on the same data get the same sizes, if there are such sizes.
        saves: save and validate in the second step if the originals do; otherwise do neither.
    """
    cases: list[Reduced] = []
    groups: dict[str, list[Folded]] = {}
    for candidate in candidates:
        run, recipe = candidate.run, candidate.recipe
        key, schedule = json.dumps(comparable(recipe), sort_keys=True, default=str), recipe.schedule
        is_fixed = schedule.fixed_size() is not None
        fixed = {"pipeline": f"schedule={schedule.kind} is for exactly this number of ranks"} if is_fixed else {}
        try:
            for layout in folded(recipe.layout, most=most, fixed=fixed):
                case = Folded(run=run, recipe=recipe, layout=layout)
                groups.setdefault(key if alike else f"{run} {layout}", []).append(case)
        except ConfigError as error:
            cases.append(Reduced(run=run, layout=recipe.layout.label, error=error))
    for group in groups.values():
        try:
            shared = common_sizes(group)
        except ConfigError:
            shared = None
        for case in group:
            try:
                sizes = shared or common_sizes([case])
                cases.append(_reduce(case, sizes, steps=steps, runs=runs, inductor=inductor, saves=saves))
            except ConfigError as error:
                cases.append(Reduced(run=case.run, layout=case.label, error=error))
    order = {candidate.run: number for number, candidate in enumerate(candidates)}
    return sorted(cases, key=lambda case: order[case.run])


def _reduce(case: Folded, sizes: Sizes, *, steps: int, runs: str, inductor: bool, saves: bool) -> Reduced:
    """The recipe in these sizes. ConfigError: it cannot be reduced."""
    recipe, layout = case.recipe, case.layout
    notes: list[str] = []
    model = _model(recipe, sizes, notes)
    microbatch = sizes.global_batch // layout.data // case.microbatches
    training = replace(
        recipe.training,
        steps=steps,
        seq_len=sizes.seq_len,
        global_batch=sizes.global_batch,
        microbatch=microbatch,
        # If the original computes the loss in chunks, use about three in a microbatch.
        loss_chunk=-(-microbatch * sizes.seq_len // layout.context // 3) if recipe.loss_chunk else 0,
        max_grad_norm=None if recipe.training.max_grad_norm is None else min(recipe.training.max_grad_norm, _NORM),
        validate_every=2 if saves and recipe.training.validate_every else 0,
        validation_sequences=sizes.global_batch,
        log_every=1,
        unmeasured_steps=0,
        freeze=_frozen(recipe.training.freeze, model.account(), notes),
        compare_ranks_every=0,
        check_every=0,
        on_nan="stop",
        step_timeout_seconds=120.0,
        first_step_timeout_seconds=600.0 if inductor else 300.0,
    )
    for name, note in (
        ("async_tensor", "needs GPUs: the same collectives, not interleaved with products"),
        ("symmetric_memory", "needs GPUs: the same collectives in other memory"),
        ("split", "is for the real number of layers: stages are balanced"),
    ):
        if getattr(recipe.parallelism, name):
            notes.append(f"parallelism.{name} {note}")
    parallelism = replace(recipe.parallelism, async_tensor=False, symmetric_memory=False, split=None)
    if recipe.reduces_each:
        # Keep the choice of the real size: with so few bytes of gradients `auto` would choose `last`.
        parallelism = replace(parallelism, reduce_gradients="each")
    data = Synthetic(vocab_size=model.vocab_size, gaps=True)
    if recipe.data.document_mask:
        # A few documents in each sequence: some of one token, some cut by the sequence's end.
        data = replace(data, document_mask=True, document_tokens=sizes.seq_len // 4)
    optimizer = recipe.optimizer.reduced(least_eps=LEAST_EPS)
    made = replace(
        recipe,
        name=f"{safe_name(case.run, longest=60)}-{layout.label.replace('·', '-')}",
        sweep="reduced",
        runs=runs,
        repeat=0,
        world=layout.world,
        init_from=None,
        init_from_exclude=(),
        training=training,
        model=model,
        parallelism=parallelism.with_degrees(layout.degrees()),
        precision=recipe.precision.reduced(layers=model.account().layers, note=notes.append),
        ac=recipe.ac.reduced(note=notes.append),
        compile=_compiled(recipe.compile, notes, inductor=inductor),
        optimizer=replace(optimizer, lr=_RATE, schedule=replace(optimizer.schedule, warmup_steps=min(1, steps - 1))),
        data=data,
        checkpoint=_checkpoint(recipe, notes) if saves else NoCheckpoints(),
        cluster=Cluster(accelerator="cpu", device="cpu", peak_tflops=1.0),
        tracker=Jsonl(),
        profiler=NoProfiling(),
        launch=on_this_host(threads=1),
    )
    try:
        made = resolve(made, world=None, accelerator="cpu", device="cpu")
        check(made)
    except ConfigError as error:
        rule = f"cannot be reduced to {layout.label}: {error.problem}"
        cure = "prove it in its own size: titanlab train, with few steps"
        raise ConfigError("recipe", case.run, rule, cure) from error
    return Reduced(run=case.run, layout=case.label, missing=case.missing, recipe=made, notes=tuple(notes))


def in_fp32(recipe: Recipe) -> Recipe:
    """A reduced recipe in fp32."""
    return replace(recipe, precision=Fp32())


def on_one_process(recipe: Recipe) -> Recipe:
    """The reference of a reduced recipe: one process, the whole batch at once, nothing recomputed, nothing compiled."""
    plain = replace(
        recipe,
        name="reference",
        world=1,
        training=replace(recipe.training, microbatch=None, loss_chunk=0),
        parallelism=Parallelism(),
        schedule=OneFOneB(),
        ac=NoCheckpointing(),
        compile=Compile(),
        checkpoint=NoCheckpoints(),
    )
    return resolve(plain, world=None, accelerator="cpu", device="cpu")


def comparable(recipe: Recipe) -> dict[str, Any]:
    """The facts that must be equal for equal training: model, data, batch, optimizer, clipping, order of data."""
    training = recipe.training
    return {
        **{f"model.{key}": value for key, value in plain(recipe.model).items() if key != "attention"},
        "training.seq_len": training.seq_len,
        "training.global_batch": training.global_batch,
        "training.max_grad_norm": training.max_grad_norm,
        "training.freeze": training.freeze,
        **{f"optimizer.{key}": value for key, value in plain(recipe.optimizer).items()},
        **{f"data.{key}": value for key, value in plain(recipe.data).items()},
        "seed": recipe.seed,
    }


def check_same(first: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], cure: str) -> None:
    """Check that two recipes have the same facts.

    Raises:
        ConfigError: the second recipe has another value than the first, whose name is `first`.
    """
    for key in {**ours, **theirs}:
        if ours.get(key) != theirs.get(key):
            rule = f"cannot be compared with {first}, which has {key}={ours.get(key)}"
            raise ConfigError(key, theirs.get(key), rule, cure)


def _model(recipe: Recipe, sizes: Sizes, notes: list[str]) -> ModelConfig:
    model = recipe.model
    reduced = model.reduced(sizes.model)
    if reduced is None:
        count = model.account().parameter_count
        if count > _SMALL:
            rule = f"has {count:,} parameters, and its config has no method that reduces them"
            raise ConfigError("model", model.kind, rule, "add `reduced` to it (docs/models-of-your-own.md)")
        notes.append(f"model={model.kind} is not reduced, and keeps {count:,} parameters")
        reduced = model
    if reduced.attention not in _CPU_KERNELS:
        notes.append(f"model.attention={reduced.attention} needs a GPU, and becomes auto")
        reduced = replace(reduced, attention="auto")
    return reduced


def _frozen(patterns: tuple[str, ...], account: ModelAccount, notes: list[str]) -> tuple[str, ...]:
    """The patterns that match parameters of the reduced model; none if no parameter would be left to train."""
    chosen = tuple(pattern for pattern in patterns if with_frozen(account, (pattern,)).frozen)
    if len(with_frozen(account, chosen).frozen) == len(account.parameters):
        chosen = ()
    if chosen != patterns:
        notes.append(f"training.freeze names blocks that the reduced model lacks: {len(chosen)} of its patterns stay")
    return chosen


def _compiled(config: Compile, notes: list[str], *, inductor: bool) -> Compile:
    if not config.compiles:
        return config
    backend, mode = config.backend, config.mode
    if backend == "cudagraphs" or (backend == "inductor" and not inductor):
        notes.append(f"compile.backend={backend}: traced and compiled by aot_eager, without new kernels")
        backend = "aot_eager"
    if mode in RECORDING or backend != "inductor":
        mode = "default"
    return replace(config, backend=backend, mode=mode)


def _checkpoint(recipe: Recipe, notes: list[str]) -> CheckpointConfig:
    config = recipe.checkpoint
    if not (config.every or config.minutes or config.at_end):
        return NoCheckpoints()
    config = config.reduced(note=notes.append)
    if config.folder is not None:
        notes.append("checkpoint.folder is not used: the checkpoint is written beside the run")
    return replace(config, every=2, minutes=0.0, keep=1, keep_every=0, load_from=None, folder=None)
