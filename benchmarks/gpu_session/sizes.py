"""What the rows of a session run on: blocks of Llama 3 8B on a GPU, or tiny ones that rehearse the session on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_session.prediction import Facts, composed, predicted

# With more blocks a step takes longer and says no more.
MOST_LAYERS = 8
# Where not even these fit, or the planner knows nothing of the device: rows then say so.
LEAST_LAYERS = 2
# Of the device's memory, for the row that needs most by the planner's estimate. Its allocator may reserve more.
USABLE = 0.9
# The model whose blocks these are has so many.
WHOLE_LAYERS = 32


@dataclass(frozen=True)
class Sizes:
    """Sizes of every row.

    Attributes:
        device: `cuda` or `cpu`.
        model: the key that names the model, whose layers and vocabulary are replaced.
        layers: blocks of the model.
        seq: tokens of a sequence.
        chunk: value of `training.loss_chunk` where the loss is computed in chunks.
        compiled: keys of compiled blocks on this device.
        budgeted: the same, with a budget of memory.
        vocabulary: of model and data.
        steps: measured steps.
        saved: layers and vocabulary of the model whose checkpoints are saved.
        interval: steps between two saves.
        seconds: how long a product is measured at least.
        sustained: how long the products are repeated that show what the clock does under load.
        copied: bytes of the copy that measures memory.
        tests: the file of tests that the session runs.
        patience: rows may take so many times their limit; others may be busy on a CPU.
    """

    device: str
    model: str
    layers: int
    seq: int
    chunk: int
    compiled: tuple[str, ...]
    budgeted: tuple[str, ...]
    vocabulary: int
    steps: int
    saved: tuple[int, int]
    interval: int
    seconds: float
    sustained: float
    copied: int
    tests: str
    patience: int = 1

    def common(self, *, layers: int | None = None, vocabulary: int | None = None) -> list[str]:
        """The arguments of `titanlab train` that all rows have."""
        return [
            self.model,
            f"model.layers={layers or self.layers}",
            f"model.vocab_size={vocabulary or self.vocabulary}",
            f"data.vocab_size={vocabulary or self.vocabulary}",
            f"training.seq_len={self.seq}",
            "training.microbatch=1",
            "training.log_every=1",
            "training.compare_ranks_every=0",
            # Alone, FSDP2 has nobody to gather from: parameters stay as they were cast.
            "parallelism.reshard_after_forward=never",
            "data=synthetic",
            "tracker=jsonl",
            f"cluster.accelerator={self.device}",
        ]

    def fitted(self, facts: Facts) -> Sizes:
        """As many layers as the memory holds, by the planner; a CPU's are tiny and stay."""
        if self.device == "cpu":
            return self
        # The row that needs most memory: nothing is compiled, and the logits exist whole.
        largest = [
            "precision=bf16",
            "compile=off",
            "training.loss_chunk=0",
            "training.global_batch=4",
            "checkpoint=off",
        ]
        for layers in range(MOST_LAYERS, LEAST_LAYERS, -1):
            account = predicted(composed([*self.common(layers=layers), *largest], facts))
            if "reserved_bytes" in account and account["reserved_bytes"] <= USABLE * facts.memory_bytes:
                return replace(self, layers=layers)
        return replace(self, layers=LEAST_LAYERS)


GPU = Sizes(
    device="cuda",
    model="model=llama3_8b",
    layers=MOST_LAYERS,
    seq=8192,
    chunk=-1,
    compiled=("compile=block",),
    budgeted=("compile=block",),
    vocabulary=128256,
    steps=8,
    # One block and small tables: 3 GB of parameters and optimizer states, which a disk takes in a few seconds of steps.
    saved=(1, 4096),
    interval=40,
    seconds=0.4,
    sustained=3.0,
    copied=2**30,
    tests="tests/test_gpu.py",
)
REHEARSAL = Sizes(
    device="cpu",
    model="model=debug",
    layers=2,
    seq=64,
    chunk=32,
    # Inductor would take half a minute for each row. Only the compilers of torch's partitioner know a budget of memory.
    compiled=("compile=block", "compile.backend=eager"),
    budgeted=("compile=block", "compile.backend=aot_eager"),
    vocabulary=2048,
    steps=3,
    saved=(2, 1024),
    interval=4,
    seconds=0.002,
    sustained=0.01,
    copied=2**20,
    # Those of test_gpu.py are not selected where there is no GPU.
    tests="tests/costs/test_layout.py",
    patience=3,
)
