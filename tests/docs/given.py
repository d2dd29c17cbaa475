"""What readers of the pages have already: runs, a sweep, a corpus, weights, files of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import tokenizers
from tokenizers.models import WordLevel

from tests.docs.pages import ROOT, blocks
from tests.sweep.made import Made, begin, end, train
from tests.weights.huggingface import made as hf
from titanlab.launch.launchers_schema import Slurm
from titanlab.ranges import plain
from titanlab.records import OutcomeKind, RunFolder, config_text

WORDS = "the def return self class import value tokens of a stream and its order in every rank".split()
# The model that is trained where a command names none (conf/model/debug.yaml), as Hugging Face writes it.
DEBUG = {**hf.SMALL, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 2048, "rope_theta": 10000.0}


def write_all(folder: Path) -> None:
    """Fill the reader's folder: what `make quickstart` leaves, a sweep of Slurm jobs, a corpus, weights.

    The sweep `layouts` has a run for each kind of end. Of the quickstart's run the folder is not here: the command that
    makes it is typed.
    """
    quickstart = Made(folder / "runs", "quickstart_layouts")
    layouts = Made(folder / "runs", "layouts")
    for name, keys in {"single": {}, "fsdp-world2": {"shard": 2}}.items():
        _end(quickstart.run(name, **keys), "done")
    quickstart.folder.write_manifest(
        {"name": "quickstart_layouts", "origin": "sweeps/quickstart_layouts"}, quickstart.points
    )
    for number, kind in enumerate(OutcomeKind):
        run = layouts.run("fsdp-bf16" if kind is OutcomeKind.OOM else kind.value, seed=number)
        cluster = {**run.config()["cluster"], "per_node": 8}
        config = {**run.config(), "launch": plain(Slurm()), "cluster": cluster}
        (run.path / "config.yaml").write_text(config_text(config))
        _end(run, kind.value)
    # A folder of groups of the reader's own, with a recipe that begins as one of titanlab's.
    (folder / "groups" / "recipe").mkdir(parents=True)
    shutil.copy(ROOT / "conf" / "recipe" / "quickstart.yaml", folder / "groups" / "recipe")
    write_corpus(folder / "corpus")
    write_shards(folder / "my" / "tokens")
    hf.folder(folder / "given" / "small-hf", DEBUG)
    write_tokenizer(folder / "given" / "small-hf", 2048)
    # Where pages show that a model of the hub lies, or weights that were imported under other names.
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "Llama-3.2-1B").symlink_to("../../given/small-hf")
    hf.folder(folder / "given" / "llama-2", hf.LLAMA_2)


def write_corpus(folder: Path) -> None:
    """JSONL files in a folder, and a parquet file below it."""
    rng = np.random.default_rng(0)
    # Different enough for a tokenizer of 8,192 pieces, the default of data=files.
    words = ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), size)) for size in rng.integers(4, 9, 4000)]
    texts = [" ".join(rng.choice(words, 60)) for _ in range(600)]
    (folder / "news").mkdir(parents=True)
    for number in range(2):
        lines = (json.dumps({"text": text}) + "\n" for text in texts[number::2])
        (folder / f"{number}.jsonl").write_text("".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "news" / "0.parquet")


def write_shards(folder: Path) -> None:
    """Tokens of another tool, with the index.json that docs/data.md shows."""
    (index,) = [block.text for block in blocks("docs/data.md") if '"titanlab-tokens"' in block.text]
    folder.mkdir(parents=True)
    (folder / "index.json").write_text(index)
    shown = json.loads(index)
    for shard in (*shown["train"], *shown["validation"]):
        np.zeros(shard["tokens"], dtype=shown["dtype"]).tofile(folder / shard["file"])


def write_tokenizer(folder: Path, size: int) -> Path:
    """A tokenizer.json of so many tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {
        word: number for number, word in enumerate([*WORDS, *(f"<{number}>" for number in range(size - len(WORDS)))])
    }
    made = tokenizers.Tokenizer(WordLevel(words, unk_token="the"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _end(run: RunFolder, kind: str) -> None:
    begin(run)
    train(run)
    end(run, kind)
