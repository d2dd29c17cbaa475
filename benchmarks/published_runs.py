"""Recipes of published runs: rows of benchmarks/published/runs.csv, by the rules in the README beside it."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from titanlab.costs import Operation
from titanlab.parallelism import Parallelism
from titanlab.recipe import Cluster, Recipe, Training
from titanlab.techniques.ac.contract import ACConfig
from titanlab.techniques.ac.recomputation_schema import FullCheckpointing, NoCheckpointing, SelectiveLayer, SelectiveOp
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.optimizer.optimizers_schema import AdamW
from titanlab.techniques.precision.cast_schema import Bf16, Bf16Full
from titanlab.techniques.precision.contract import PrecisionConfig
from titanlab.techniques.precision.float8_schema import Float8Rowwise, Float8RowwiseWithGwHp, Float8Tensorwise, Mxfp8
from titanlab.techniques.schedule.contract import PipelineSchedule
from titanlab.techniques.schedule.published_schema import ZBV, Interleaved1F1B, InterleavedZeroBubble, OneFOneB

HERE = Path(__file__).parent
DATA = HERE / "published"
MODELS = HERE.parent / "conf" / "model"
Row = Mapping[str, str]
_CONF = {
    "Llama3.1-8B": "llama3_1_8b",
    "Llama3-7B": "llama3_8b",
    "Llama3.1-70B": "llama3_1_70b",
    "Llama3.1-405B": "llama3_1_405b",
    "Llama2-7B": "llama2_7b",
    "Llama2-13B": "llama2_13b",
    "Llama2-34B": "llama2_34b",
    "Llama2-70B": "llama2_70b",
}
# Width of the heads of the zero-bubble table's models: 24, 32, 40 and 48 heads (arXiv 2401.10241, table 3).
_GPT_HEADS = {2304: 24, 4096: 32, 5120: 40, 6144: 48}


# In units of the two bytes of an element of bfloat16, a norm of separate operators moves 36 bytes: the copy in float32
# reads 2 and writes 4, its square reads 4 and writes 4, the mean reads 4, the product reads 4 and writes 4, the copy
# back reads 4 and writes 2, and the product with the weight reads 2 and writes 2.
_NORM_PASSES = 18.0


@dataclass(frozen=True, kw_only=True)
class SeparateNorms(Llama):
    """The Llama of programs from before torch had a kernel for RMSNorm; compiled code fuses these operators."""

    def block_operations(self, *, batch: int, seq_len: int) -> list[Operation]:
        operations = super().block_operations(batch=batch, seq_len=seq_len)
        return [replace(each, passes=_NORM_PASSES) if each.kind == "norm" else each for each in operations]


@dataclass(frozen=True, kw_only=True)
class GatheredFloat8(Float8Tensorwise):
    """TorchTitan's tensorwise float8 with tensor parallelism: activations are cast before they are gathered."""

    @property
    def gathers_activations(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published run.

    Attributes:
        row: of the file.
        recipe: resolved.
        fitted: whether the fit uses it.
        fsdp: whether it is one of those with FSDP, to which the bars apply.
    """

    row: Row
    recipe: Recipe
    fitted: bool
    fsdp: bool

    @property
    def number(self) -> int:
        """Number in the file."""
        return int(self.row["id"])

    @property
    def table(self) -> tuple[str, str]:
        """Source and table."""
        return self.row["source"], self.row["table"]

    @property
    def memory_bytes(self) -> float | None:
        """Largest memory of a GPU; None: not published. `GB` is read as the source defines it, or as 10⁹ bytes."""
        if not self.row["peak_mem"]:
            return None
        return float(self.row["peak_mem"]) * (2**30 if "GiB" in self.row["mem_def"] else 1e9)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU."""
        return float(self.row["tps_per_gpu"])


def published_runs() -> list[Published]:
    """All rows that have a recipe, in the order of the file."""
    with (DATA / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    excluded = exclusions()
    runs = []
    for row in rows:
        rule = excluded.get(int(row["id"]))
        if rule != "map" and row["tps_per_gpu"]:
            runs.append(Published(row=row, recipe=recipe_of(row), fitted=rule is None and _fsdp(row), fsdp=_fsdp(row)))
    return runs


def exclusions() -> dict[int, str]:
    """Number of each row that is left out → `fit` or `map`."""
    found = {}
    with (DATA / "exclusions.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            first, _, last = row["ids"].partition("-")
            found.update(dict.fromkeys(range(int(first), int(last or first) + 1), row["rule"]))
    return found


def _fsdp(row: Row) -> bool:
    return "FSDP" in row["dp_kind"] or row["dp_kind"] == "HSDP"


def recipe_of(row: Row) -> Recipe:
    """The recipe of a row."""
    sharded = _number(row, "dp")
    replicas = sharded // 8 if row["dp_kind"] == "HSDP" or _is_hsdp(row) else 1
    accumulated = _number(row, "grad_accum_or_microbatches")
    microbatch = _number(row, "micro_batch") if row["micro_batch"] else _number(row, "local_batch")
    return Recipe(
        name=f"published {row['id']}",
        world=_number(row, "gpus"),
        training=Training(
            # The published programs had whole logits.
            loss_chunk=0,
            seq_len=_number(row, "seq_len"),
            global_batch=sharded * microbatch * accumulated,
            microbatch=microbatch,
        ),
        model=_model(row),
        parallelism=Parallelism(
            # As Megatron's distributed optimizer, and as all rows were fitted; the tables do not say it.
            reduce_gradients="last",
            pipeline=_number(row, "pp"),
            replicate=replicas,
            shard=sharded // replicas,
            context=_number(row, "cp"),
            tensor=_number(row, "tp"),
            # That torch did not fuse products with scales by row (pytorch/torchtitan#866, pytorch/pytorch#149247).
            async_tensor=row["async_tp"] == "Y" and "rowwise" not in row["precision"],
            loss_parallel=not _is_kempner(row),
            reshard_after_forward="auto" if _fsdp(row) else "never",
        ),
        schedule=_schedule(row),
        precision=_precision(row),
        ac=_checkpointing(row),
        compile=_compile(row),
        optimizer=AdamW(lr=1e-4),
        cluster=_cluster(row),
    )


def _number(row: Row, name: str) -> int:
    return int(float(row[name])) if row[name] else 1


def _is_kempner(row: Row) -> bool:
    return "KempnerForge" in row["source"]


def _is_hsdp(row: Row) -> bool:
    return row["dp_kind"] == "FSDP1/HSDP" and row["model"] == "Llama2-7B"


def _model(row: Row) -> Llama:
    if row["model"] in _CONF:
        values = yaml.safe_load((MODELS / f"{_CONF[row['model']]}.yaml").read_text())
        values.pop("defaults")
        # TorchTitan and fms have such norms; all other programs with this model were compiled.
        return SeparateNorms(**values, attention=_attention(row))
    if row["model"] == "Llama3-13B":
        # 14.84e9 parameters in all; the width of the feed-forward follows.
        return Llama(dim=5120, layers=40, heads=40, kv_heads=8, ffn_dim=17920, vocab_size=128256, attention="flash")
    width = _number(row, "hidden")
    heads = _GPT_HEADS[width]
    ffn = round(8 * width / 3)
    return Llama(dim=width, layers=_number(row, "layers"), heads=heads, kv_heads=heads, ffn_dim=ffn, vocab_size=50304)


def _attention(row: Row) -> str:
    """Torch's flash attention, its first choice in these programs; Megatron on H100 calls cuDNN."""
    return "auto" if "dgxc" in row["source"] else "flash"


def _schedule(row: Row) -> PipelineSchedule:
    name = row["schedule"]
    if name == "1F1B-I":
        return Interleaved1F1B(stages_per_rank=2)
    if name == "ZB-1p":
        return InterleavedZeroBubble(stages_per_rank=1)
    return ZBV() if name == "ZB-2p" else OneFOneB()


def _precision(row: Row) -> PrecisionConfig:
    name = row["precision"]
    if _is_kempner(row):
        # Float32 parameters and states of the first row would take 128 GB, and it had 81 GB.
        return Bf16Full(reduce="bf16")
    if name == "fp8":
        return Float8Tensorwise(all_gather=False)
    if "rowwise_with_gw_hp" in name:
        return Float8RowwiseWithGwHp()
    if "rowwise" in name:
        return Float8Rowwise()
    if "asyncTP" in row["source"] and "float8" in name:
        return GatheredFloat8()
    if "mxfp8" in name:
        return Mxfp8()
    if "float8" in name:
        return Float8Tensorwise()
    ibm = "fms-fsdp" in row["source"] or "pytorch.org blog" in row["source"]
    return Bf16(reduce="bf16" if ibm else "fp32")


def _checkpointing(row: Row) -> ACConfig:
    name = row["ac"]
    if "op" in name:
        return SelectiveOp()
    if name == "full":
        return FullCheckpointing()
    if "layer" in name:
        return SelectiveLayer(every=2)
    if not name.startswith("selective"):
        return NoCheckpointing()
    hardware = re.search(r"HFU (\d+)%", row["notes"])
    assert hardware is not None, row["id"]
    return _of_share(3 * (float(hardware[1]) / float(row["mfu_pct"]) - 1))


def _of_share(share: float) -> ACConfig:
    """The policy that recomputes a share of the blocks, the nearest of 1/n, 1 − 1/n and all."""
    choices: list[tuple[float, ACConfig]] = [(1.0, FullCheckpointing())]
    for every in range(2, 7):
        choices.append((1 / every, SelectiveLayer(every=every)))
        choices.append((1 - 1 / every, SelectiveLayer(every=every, keep=True)))
    return min(choices, key=lambda choice: abs(choice[0] - share))[1]


def _compile(row: Row) -> Compile:
    # Megatron-Core of 2025 has kernels that are fused by hand; Megatron of the other tables runs in eager mode.
    compiles = row["compile"] == "Y" or "dgxc" in row["source"]
    return Compile(blocks=compiles, loss=compiles and "202412" not in row["source"])


def _cluster(row: Row) -> Cluster:
    # torchao's table of devices (torchao/testing/training/roofline_utils.py) has 2.4 TB/s for its authors' H100.
    name = "H100 96GB" if "pytorch/ao" in row["source"] and row["hw"].startswith("H100") else row["hw"]
    known: Sequence[tuple[str, str, float, float]] = (
        ("H100 96GB", "NVIDIA H100", 96, 50),
        ("H100 80GB 800Gbps", "NVIDIA H100 80GB HBM3", 80, 12.5),
        ("A100 80GB 400Gbps", "NVIDIA A100-SXM4-80GB", 80, 6.25),
        ("A100", "NVIDIA A100-SXM4-80GB", 80, 25),
        ("H200", "NVIDIA H200", 141, 50),
        ("H100", "NVIDIA H100 80GB HBM3", 80, 50),
        ("B200", "NVIDIA B200", 180, 50),
        ("MI300X", "AMD Instinct MI300X", 192, 50),
    )
    _, device, memory, network = next(entry for entry in known if name.startswith(entry[0]))
    return Cluster(
        accelerator="cuda",
        device=device,
        per_node=4 if "4/node" in name else 8,
        memory_gb=memory,
        network_gb_per_second=network,
        link_gb_per_second=450 if device.startswith("AMD") else None,
    )
