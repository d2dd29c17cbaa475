"""Texts about a run: the table at its start, the panel at its end."""

from __future__ import annotations

import shlex

import torch

from titanlab.checkpoint.folders import latest
from titanlab.checkpoint.position import Position
from titanlab.checkpoint.remote.address_schema import StorePath
from titanlab.checkpoint.remote.run_place import checkpoints_of
from titanlab.costs import meter
from titanlab.costs import meter as flops
from titanlab.costs.account import ModelAccount
from titanlab.costs.meter import Work
from titanlab.precision.dtypes import Dtypes
from titanlab.recipe.recipe import Recipe
from titanlab.records.outcome import Outcome, OutcomeKind
from titanlab.records.run_folder import RunFolder
from titanlab.terminal.numerals import counted, duration, grouped, short, trimmed
from titanlab.terminal.paths import shown_path
from titanlab.training.peak import peak_flops

CONVENTION = "6(N−N_emb)+12·L·H·Q·T"


def model_account(recipe: Recipe) -> ModelAccount:
    """The account of the recipe's model."""
    return recipe.model.account()


def work(recipe: Recipe, device: torch.device) -> Work:
    """The constants for computing TFLOP/s and MFU from throughput."""
    compute, note = Dtypes.of(recipe.precision.formats()).compute, recipe.precision.mfu_note
    peak, source = peak_flops(recipe.cluster, device, compute)
    return Work(
        devices=recipe.layout.world,
        flops_per_token=flops.per_token(model_account(recipe), seq_len=recipe.training.seq_len),
        convention=CONVENTION,
        peak_flops=peak,
        peak_source=f"{source}; {note}" if note else source,
        may_exceed_peak=bool(note),
    )


def start_rows(
    recipe: Recipe, run: RunFolder, device: torch.device, constants: Work, position: Position
) -> list[tuple[str, object]]:
    """The rows of the table at the start."""
    account = model_account(recipe)
    training = recipe.training
    vocabulary = grouped(account.vocab_size)
    accumulation = recipe.local_batch // recipe.microbatch
    batch = f"{counted(training.global_batch, 'sequence')} of {grouped(training.seq_len)}"
    if accumulation > 1:
        batch += f", in {accumulation} microbatches of {recipe.microbatch}"
    processes = f"{recipe.layout.world} process" + ("es" if recipe.layout.world > 1 else "")
    rows: list[tuple[str, object]] = [
        ("model", f"{recipe.model.kind}, {account.layers} layers of {grouped(account.dim)}, vocabulary {vocabulary}"),
        ("parameters", _parameters(account)),
        ("layout", f"{recipe.layout.label}, {processes} on {device.type}"),
        ("precision", _precision(recipe, account)),
        *_techniques(recipe),
        ("tokens per step", f"{grouped(recipe.tokens_per_step)} ({batch})"),
        ("FLOPs per token", f"{short(constants.flops_per_token)} ({CONVENTION})"),
        ("peak per device", _peak(constants)),
        ("data", recipe.data.kind),
        ("steps", grouped(training.steps)),
        ("folder", shown_path(run.path)),
    ]
    if position.step:
        rows.insert(0, ("resumes at step", grouped(position.step)))
    return rows


def _parameters(account: ModelAccount) -> str:
    count = grouped(account.parameter_count)
    return count if account.experts is None else f"{count}, of which {grouped(account.active_count)} compute a token"


def _techniques(recipe: Recipe) -> list[tuple[str, object]]:
    """Rows about activation checkpointing and compilation, if the recipe has them."""
    compiled = " and ".join(name for name in ("blocks", "loss") if getattr(recipe.compile, name))
    rows: list[tuple[str, object]] = []
    if checkpointing := recipe.ac.describe():
        rows.append(("checkpointing", checkpointing))
    if compiled:
        rows.append(("compiled", f"{compiled}, by {recipe.compile.backend}"))
    return rows


def end_rows(outcome: Outcome, run: RunFolder) -> list[tuple[str, object]]:
    """The rows of the panel at the end."""
    figures = outcome.metrics
    rows: list[tuple[str, object]] = [("steps", f"{grouped(outcome.step)} of {grouped(outcome.steps or 0)}")]
    if outcome.cause:
        rows.append(("cause", outcome.cause))
    if figures.get("first_loss") is not None and figures.get(meter.LOSS) is not None:
        rows.append(("loss", f"{figures['first_loss']:.4f} → {figures[meter.LOSS]:.4f}"))
    if figures.get(meter.VALIDATION_LOSS) is not None:
        rows.append(("validation loss", f"{figures[meter.VALIDATION_LOSS]:.4f}"))
    if figures.get(meter.SKIPPED_STEPS):
        skipped = grouped(figures[meter.SKIPPED_STEPS])
        rows.append(("skipped steps", f"{skipped}: their gradients were not finite, and they updated nothing"))
    if figures.get(meter.TOKENS_PER_SECOND):
        speed = f"{grouped(figures[meter.TOKENS_PER_SECOND])} tokens/s per device"
        if figures.get(meter.MFU) is not None:
            speed += f", MFU {figures[meter.MFU]:.1f}% ({figures['peak_source']})"
        rows.append(("median speed", speed))
    rows.append(("time in steps", duration(figures.get(meter.TRAIN_SECONDS) or 0.0)))
    rows.append(("folder", shown_path(run.path)))
    return rows


def next_steps(outcome: Outcome, run: RunFolder) -> list[str]:
    """Suggested commands after this outcome."""
    folder = shlex.quote(shown_path(run.path))
    if outcome.kind is OutcomeKind.DONE:
        sample = [f'titanlab generate {folder} --prompt "def "'] if _can_generate(run) else []
        return [*sample, f"less {folder}/metrics.jsonl"]
    if outcome.kind.may_continue:
        return [f"titanlab resume {folder}"]
    return [f"less {folder}/logs/rank-0.log"]


def _can_generate(run: RunFolder) -> bool:
    """Whether the run has a tokenizer and a checkpoint. A remote store is not asked again."""
    place = checkpoints_of(run)
    return run.tokenizer.is_dir() and (isinstance(place, StorePath) or latest(place) is not None)


def _peak(constants: Work) -> str:
    if constants.peak_flops is None:
        return "unknown: no MFU"
    return f"{trimmed(constants.peak_flops / 1e12)} TFLOP/s ({constants.peak_source})"


def slow_precision(recipe: Recipe, device: torch.device) -> str | None:
    """A line about a CPU that has no units for the dtype of the products; None: it has them."""
    compute = Dtypes.of(recipe.precision.formats()).compute
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(compute)
    if device.type != "cpu" or name is None:
        return None
    # Private: whether oneDNN multiplies in that dtype, the same in torch 2.11 to 2.13.
    supported = torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
    rule = f"this CPU has no units for {name}, and multiplies tens of times more slowly than in fp32"
    return None if supported else f"precision={recipe.precision.kind}: {rule}; try precision=fp32"


def _precision(recipe: Recipe, account: ModelAccount) -> str:
    cluster = recipe.cluster
    return recipe.precision.describe(account, accelerator=cluster.accelerator, device=str(cluster.device))
