"""A folder of what people have: files that are not what they should be, a few that are, runs, a sweep."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

from tests import tiny
from tests.sweep.made import Made, begin, end
from titanlab.recipe import to_mapping
from titanlab.records import Outcome, OutcomeKind, create_run, identify

TEXT = "\n".join(f"{n} bottles of beer on the wall, take {n % 7} down and pass them around" for n in range(300))
TOKENS = {"format": "titanlab-tokens", "version": 1, "dtype": "uint16", "vocab_size": 2048}
WORDS = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"def": 0, "return": 1, "?": 2}, "unk_token": "?"},
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
}
FILES: dict[str, str | bytes] = {
    "a-file": "",
    "zero.txt": "",
    "text.txt": TEXT,
    "latin.txt": "à la carte".encode("latin-1"),
    "torn.txt.gz": gzip.compress(TEXT.encode())[:-20],
    "torn.jsonl": '{"text": "whole"}\n{"text": "to',
    "other.jsonl": '{"body": "a text"}\n',
    "a.parquet": b"PAR1 and no more",
    "foreign.model": "a tokenizer of another kind",
    "foreign.json": '{"name": "something else"}',
    "words.json": json.dumps(WORDS),
    "torn-tokens/train-00000.bin": bytes(6),
    "torn-tokens/index.json": json.dumps({**TOKENS, "train": [{"file": "train-00000.bin", "tokens": 1000}]}),
    "theirs/config.json": "{}",
    # Orders of pipelines.
    "empty.csv": "\n",
    "malformed.csv": "0F0,0B0\n1F0,1X0\n",
    "incomplete.csv": "0F0,0B0\n1F0\n",
    "deadlock.csv": "0B0,0F0\n1F0,1B0\n",
    "torn.csv": "0F0,0B0\n1F0,1B0,0F1\n",
    "one-rank.csv": "0F0,0B0\n",
    "halves.csv": "0F0,0I0,0W0\n1F0,1I0,1W0\n",
    # A folder of configs with mistakes.
    "conf/model/bare.yaml": "dim: 64\n",
    "conf/model/extra.yaml": "defaults: [llama_schema, _self_]\nfoo: 3\n",
    "conf/model/early.yaml": "defaults:\n  - override /precision: bf16\n  - debug\n",
    "conf/model/lost.yaml": "defaults: [nope_schema, _self_]\ndim: 64\n",
    "conf/model/list.yaml": "- a\n- b\n",
    "conf/model/torn.yaml": "dim: 64\nlayers: [2: 3: 4\n",
    "conf/cluster/own.yaml": "defaults: [schema]\n",
    "conf/other.yaml": "name: other\n",
    "conf/recipe/again.yaml": "# @package _global_\ndefaults: [/model: llama_2m]\n",
    "conf/recipe/keys.yaml": "training: {steps: 5}\n",
    "conf/recipe/chosen.yaml": "defaults: [override /model: llama_5m]\n",
    "conf/recipe/added.yaml": "defaults: [/model: llama_5m]\n",
    "conf/recipe/early.yaml": "# @package _global_\ndefaults:\n  - override /precision: bf16\n  - /model: debug\n",
    "conf/recipe/empty.yaml": "# @package _global_\ndefaults: [{'': x}]\n",
    "conf/recipe/nobody.yaml": "# @package _global_\ndefaults: [{null: x}]\n",
    "conf/recipe/slash.yaml": "# @package _global_\ndefaults: [{'/': x}]\n",
    "conf/recipe/word.yaml": "# @package _global_\ndefaults: [{'override ': x}]\n",
    "conf/recipe/moved.yaml": "# @package _global_\nhydra: {run: {dir: elsewhere}}\n",
    "conf/recipe/called.yaml": "# @package _global_\nhydra: {job: {env_set: {A: b}}}\n",
    "conf/recipe/minutes.yaml": "# @package _global_\ntraining: {steps: 1:30}\n",
    "conf/experiment/mine.yaml": "training: {steps: 5}\n",
    # Options that others of their name hide.
    "hidden/model/debug.yaml": "defaults: [llama_schema, _self_]\ndim: 32\nlayers: 3\nheads: 4\nkv_heads: 1\n",
}


def make(place: Path) -> None:
    """Fill the folder; `place` is the current folder, or becomes it."""
    for name, content in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (place / "empty").mkdir()
    debug = replace(tiny.recipe("runs").model, vocab_size=2048)
    shapes = {name: list(shape) for name, shape in debug.account().parameters.items()}
    saved = json.dumps({"step": 300, "parameters": shapes})
    for run, position in {"saved": saved, "torn": '{"step": 300, "para', "saving": None}.items():
        step = "step-00000300" if position else "step-00000300.part"
        tiny.write_checkpoint(place / run / "checkpoints" / step, position or "")
    # The sweep `layouts`: one run is done, two have failed, one waits, and a point was dropped.
    made = Made(place / "runs")
    for name, kind in {"good": "done", "bad": "crash", "big": "oom", "new": None}.items():
        run = made.run(name)
        if kind is not None:
            begin(run)
            (run.logs / "rank-0.log").write_text("text\n")
            end(run, kind)
    made.drop("rule", "must divide 4 heads", parallelism="tp3")
    # Runs of their own: stopped after a checkpoint, before one, and done.
    for name in ("toy", "unsaved", "over"):
        recipe = replace(tiny.recipe(place / "runs", shard=2, seed=len(name)), name=name)
        identity = identify(recipe, data="tiny", hardware="cpu")
        run = create_run(recipe.runs, name=name, identity=identity, config=to_mapping(recipe))
        shapes = {name: list(shape) for name, shape in recipe.model.account().parameters.items()}
        if name != "unsaved":
            tiny.write_checkpoint(run.checkpoints / "step-00000003", {"step": 3, "parameters": shapes})
        if name == "over":
            run.begin_attempt(run.config(), {})
            run.write_result(Outcome(kind=OutcomeKind.DONE, attempt=1, step=10, steps=10))
