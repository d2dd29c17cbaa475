"""The sections of the oracle: each makes the lines of one golden file, in a folder of work that all of them share."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.oracle import doors
from tests.oracle.commands import ERRORS, LAYOUTS, PRINTED, VERBS
from titanlab.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
_SWEEP = """# @package _global_
defaults: [override /hydra/sweeper: space]
sweep: oracle
training: {{steps: 4, seq_len: 32, global_batch: 8, log_every: 1, validate_every: 2, validation_sequences: 8}}
model: {{vocab_size: 256}}
optimizer: {{schedule: {{warmup_steps: 2}}}}
cluster: {{peak_tflops: 1.0}}
launch: {{threads: 1}}
hydra:
  mode: MULTIRUN
  sweeper:
    space:
      list:
{points}"""
# Values of a run that depend on the machine and its speed.
_MEASURED = re.compile(r"^(time|ended)$|time_metrics|memory/|mfu|tflops|throughput|straggler|peak_source|warming_up")


def make_work(folder: Path) -> None:
    """Make the corpus and the sweep's file that the sections read."""
    made = random.Random(0)
    words = ["".join(made.choices("abcdefghijklmnop", k=made.randint(2, 7))) for _ in range(120)]
    (folder / "corpus").mkdir()
    for number in range(3):
        texts = [" ".join(made.choices(words, k=40)) for _ in range(80)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "corpus" / f"{number}.jsonl").write_text(lines)
    (folder / "conf" / "sweeps").mkdir(parents=True)
    points = "".join(f"        - {{{point}}}\n" for point in LAYOUTS)
    (folder / "conf" / "sweeps" / "oracle.yaml").write_text(_SWEEP.format(points=points))
    (folder / "empty").write_text("")
    (folder / "wrong.json").write_text("{")
    (folder / "folder").mkdir()


def identities(work: Path) -> Iterator[str]:
    """The identity of every recipe that titanlab ships."""
    for path in sorted((ROOT / "conf" / "recipe").glob("*.yaml")):
        yield f"{path.stem} {doors.identity([f'+recipe={path.stem}'])}"


def random_recipes(work: Path) -> Iterator[str]:
    """The identity of each recipe of a list drawn at random once, or the rule that the recipe breaks."""
    for line in (GOLDEN / "random_recipes.txt").read_text().splitlines():
        overrides = line.partition(" -> ")[0]
        try:
            answer = doors.identity(overrides.split())
        except ConfigError as error:
            answer = str(error)
        yield f"{overrides} -> {answer}"


def tokens(work: Path) -> Iterator[str]:
    """The first 1,000 tokens of each kind of data in worlds of 1, 2 and 4 ranks."""
    shape = ["training.seq_len=64", "training.global_batch=4"]
    corpus = f"'{work / 'corpus'}/*.jsonl'"
    titanlab("tokenize", f"{work / 'corpus'}/*.jsonl", str(work / "shards"), "--vocab-size", "400", work=work)
    kinds = {
        "synthetic": ["data=synthetic"],
        f"stdlib, Python {platform.python_version()}": ["data=stdlib", "model.vocab_size=8192"],
        "files": ["data=files", f"data.files={corpus}", "data.vocab_size=400"],
        "files, whole documents": [
            "data=files",
            f"data.files={corpus}",
            "data.vocab_size=400",
            "data.document_mask=true",
        ],
        "tokens": ["data=tokens", f"data.folder={work / 'shards'}"],
        "hf": ["data=hf", "data.path=json", f"data.data_files=[{corpus}]", "data.vocab_size=400"],
    }
    for kind, overrides in kinds.items():
        for ranks in (1, 2, 4):
            taken = doors.tokens([*overrides, *shape], ranks=ranks, count=1000)
            yield f"{kind}; {ranks} ranks: {_digest(json.dumps(taken).encode())} {taken[:12]}"


def initial_values(work: Path) -> Iterator[str]:
    """The initial values of a small model of each family."""
    for model in ("debug", "mixtral_debug", "qwen3_debug", "qwen3_moe_debug"):
        for name, value in sorted(doors.initial_values([f"model={model}", "data=synthetic", "seed=3"]).items()):
            first = [round(number, 6) for number in value.flatten()[:3].tolist()]
            yield f"{model} {name} {tuple(value.shape)} {first} {value.double().abs().sum().item():.6g}"


def runs(work: Path) -> Iterator[str]:
    """What 12 layouts leave on disk: losses and norms, rows of metrics, results, the columns of the table."""
    _train(work)
    folders = sorted((work / "runs" / "oracle").glob("*-????????"), key=lambda path: path.name)
    for folder in folders:
        result = json.loads((folder / "result.json").read_text())
        yield f"run {folder.name}"
        yield from (f"  result {key}: {_plain(key, value)}" for key, value in sorted(result.items()))
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for row in rows:
            told = {key: value for key, value in row.items() if not _MEASURED.search(key)}
            yield f"  metrics {json.dumps(told, sort_keys=True)} and {sorted(set(row) - set(told))}"
    titanlab("collect", "oracle", work=work)
    (table,) = (work / "runs" / "oracle").glob("*.csv")
    for column in next(csv.reader(io.StringIO(table.read_text()))):
        yield f"column {column}"


def helps(work: Path) -> Iterator[str]:
    """`--help` of each verb."""
    yield from _printed([(verb, "--help") for verb in VERBS] + [("--help",), ("train", "--hydra-help")], work)


def errors(work: Path) -> Iterator[str]:
    """The line and the exit code of each mistake."""
    _train(work)
    yield from _printed([tuple(shlex.split(command)) for command in ERRORS], work)


def printed(work: Path) -> Iterator[str]:
    """What `plan`, `schedule` and `sweep --dry-run` print."""
    _train(work)
    yield from _printed([tuple(shlex.split(command)) for command in PRINTED], work)


SECTIONS = [identities, random_recipes, tokens, initial_values, runs, helps, errors, printed]


def titanlab(*words: str, work: Path, seconds: int = 300) -> str:
    """Run a command in the folder of work; its exit code and all that it prints, without paths of this machine."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "WANDB_", "OMP_", "MKL_"))}
    environment = kept | {"PYTHONPATH": path, "COLUMNS": "120", "TITANLAB_CACHE": str(work / "cache"), "NO_COLOR": "1"}
    environment["WANDB_MODE"] = "disabled"
    done = subprocess.run(
        [sys.executable, "-m", "titanlab", *words],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    text = done.stdout + done.stderr
    for place, name in ((str(work), "<work>"), (str(ROOT), "<root>"), (sys.prefix, "<python>")):
        text = text.replace(place, name)
    return f"exit {done.returncode}\n{text}"


def _train(work: Path) -> None:
    """Train the sweep of layouts, once."""
    if not (work / "runs").exists():
        words = ("--config-dir", "conf", "+sweeps=oracle", "data=synthetic", "data.vocab_size=256", "--wait")
        (work / "sweep.txt").write_text(titanlab("sweep", *words, work=work, seconds=900))


def _printed(commands: Sequence[Sequence[str]], work: Path) -> Iterator[str]:
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda words: titanlab(*words, work=work), commands)
        for words, answer in zip(commands, answers, strict=True):
            yield f"$ titanlab {' '.join(words)}"
            yield from (line.rstrip() for line in answer.splitlines())
            yield ""


def _plain(key: str, value: object) -> str:
    if value is None or _MEASURED.search(key):
        return "null" if value is None else type(value).__name__
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_plain(name, inner)}" for name, inner in sorted(value.items())) + "}"
    return json.dumps(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
