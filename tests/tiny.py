"""A recipe that trains in a tenth of a second, and what it takes to run it as ranks of the pool."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from titanlab.checkpoint import POSITION, NoCheckpoints
from titanlab.checkpoint.index import index_bytes
from titanlab.checkpoint.schema import Async, Sync
from titanlab.checkpoint.storage import INDEX
from titanlab.data import Synthetic
from titanlab.distributed import ALONE, joined
from titanlab.launch.launchers_schema import Local
from titanlab.parallelism import Parallelism
from titanlab.prove import parity
from titanlab.recipe import Cluster, Recipe, Training, check, resolve, to_mapping
from titanlab.records import RunFolder, create_run, identify
from titanlab.techniques.ac.recomputation_schema import NoCheckpointing
from titanlab.techniques.compile.schema import Compile
from titanlab.techniques.model.llama_schema import Llama
from titanlab.techniques.optimizer.contract import Schedule
from titanlab.techniques.optimizer.optimizers_schema import AdamW
from titanlab.techniques.precision.cast_schema import Bf16, Fp32
from titanlab.techniques.profiler.profilers_schema import NoProfiling as NoProfiler
from titanlab.techniques.schedule.published_schema import OneFOneB
from titanlab.techniques.tracker.trackers_schema import Jsonl
from titanlab.train import train as story

VOCABULARY = 256

_SAVES = {"sync": Sync, "async": Async, "off": NoCheckpoints}


def recipe(runs, **given) -> Recipe:
    """Debug-sized and resolved: `recipe(tmp_path, shard=2, steps=3, data=…)`; keys of the groups need no group's name."""
    training = {"steps": 10, "seq_len": 32, "global_batch": 12, "log_every": 1, **_taken(given, Training)}
    model = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 192, "vocab_size": VOCABULARY}
    optimizer = {"lr": 1e-3, "schedule": Schedule(warmup_steps=2), **_taken(given, AdamW)}
    made = Recipe(
        runs=str(runs),
        training=Training(**training),
        parallelism=Parallelism(**_taken(given, Parallelism)),
        checkpoint=_SAVES[given.pop("saves", "sync")](**_taken(given, Sync)),
        model=given.pop("model", None) or Llama(**{**model, **_taken(given, Llama)}),
        optimizer=given.pop("optimizer", None) or AdamW(**optimizer),
        compile=Compile(**_taken(given, Compile)),
        precision=given.pop("precision", None) or (Bf16() if given.pop("bf16", False) else Fp32()),
        ac=given.pop("ac", None) or NoCheckpointing(),
        data=given.pop("data", None) or Synthetic(vocab_size=VOCABULARY),
        schedule=given.pop("pipeline_schedule", None) or OneFOneB(),
        # A peak that is given need not be measured.
        cluster=Cluster(accelerator="cpu", peak_tflops=1.0),
        tracker=Jsonl(),
        profiler=given.pop("profiler", None) or NoProfiler(),
        launch=Local(),
        **_taken(given, Recipe),
    )
    assert not given, f"no group has {given}"
    made = resolve(made, world=None, accelerator="cpu", device="cpu")
    check(made)
    return made


def _taken(given, schema):
    return {
        each.name: given.pop(each.name)
        for each in fields(schema)
        if each.name in given and each.name not in ("data", "kind")
    }


def corpus(folder: Path) -> Path:
    """The folder with 240 documents in it, in four JSONL files: 60 made-up words in a fixed order, from anywhere on."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnop"), size)) for size in rng.integers(2, 8, 60)] * 2
    for number in range(4):
        texts = [" ".join(words[start : start + 40]) for start in rng.integers(0, 60, 60)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def begin(made: Recipe, run: RunFolder | None = None) -> RunFolder:
    """The folder of a run with its next attempt begun, as `execute` leaves it to the ranks."""
    if run is None:
        identity = identify(made, data="tiny", hardware="cpu", repeat=made.repeat)
        run = create_run(made.runs, sweep=made.sweep, name=made.name, identity=identity, config=to_mapping(made))
    run.begin_attempt(to_mapping(made), {})
    return run


def as_rank(made: Recipe, run: RunFolder, observer: story.Observer | None = None):
    """Train as the rank that the pool has made this worker."""
    return story.train(made, run, joined(os.environ) or ALONE, observer=observer)


def traced(made: Recipe, run: RunFolder):
    """Train as the rank that the pool has made this worker; every rank returns the full trace."""
    return parity.trace(made, run, joined(os.environ) or ALONE)


def changed(made: Recipe, **given) -> Recipe:
    """The recipe with some keys of its training, layout or checkpoint changed, resolved again."""
    made = replace(
        made,
        world=None,
        training=replace(made.training, **_taken(given, Training)),
        parallelism=replace(made.parallelism, **_taken(given, Parallelism)),
        checkpoint=replace(made.checkpoint, **_taken(given, Sync)),
        **given,
    )
    return resolve(made, world=None, accelerator="cpu", device="cpu")


def write_checkpoint(folder, position):
    """A checkpoint without tensors: as much as is read before ranks start.

    Args:
        position: content of position.json, a mapping or text.
    """
    content = (position if isinstance(position, str) else json.dumps(position)).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / POSITION).write_bytes(content)
    (folder / INDEX).write_bytes(index_bytes(position=content, objects={}, tensors={}, files=[]))
