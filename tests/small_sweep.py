"""A real small sweep, trained once in a session: a toy on one process and on two, and a point that is dropped."""

import functools
import os
from pathlib import Path

from tests.installed_command import titanlab

_TOY = (
    *("model=debug", "model.vocab_size=256", "data=synthetic", "data.vocab_size=256", "training.seq_len=32"),
    *("training.global_batch=4", "training.steps=6", "training.log_every=1", "optimizer.schedule.warmup_steps=2"),
    "cluster.peak_tflops=1.0",
)


@functools.cache
def small_sweep(folder: Path) -> Path:
    """The sweep's folder, below the given one."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Four sequences are not to be shared among three.
    swept = ["parallelism.shard=1,2,3", "sweep=small"]
    titanlab("sweep", *swept, *_TOY, "--wait", folder=folder, environ=environ, seconds=900)
    return folder / "runs" / "small"
