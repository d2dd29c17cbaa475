"""Bad input: one line with key, value, rule and cure, exit code 2, nothing made and nothing started."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests import tiny
from titanlab.distributed import Host
from titanlab.techniques.model import llama_account

# Every case: what is typed after `titanlab train`, how the line begins, and what its cure has in it. A cure
# that says `try …` or `did you mean …?` is followed further down, and then the recipe is accepted.
# Words in <angle brackets> are files of the fixture `stuff`.
UNKNOWN = [
    ("foo=3", "foo=3: is no key of this recipe", "--cfg job"),
    ("training.stepz=100 optimizer.schedule.warmup_steps=0", "training.stepz=100", "did you mean training.steps?"),
    ("trainig.seq_len=64", "trainig.seq_len=64", "did you mean training.seq_len?"),
    ("optimizer.schedule.warmup=3", "optimizer.schedule.warmup=3", "did you mean optimizer.schedule.warmup_steps?"),
    ("lr=0.1", "lr=0.1", "did you mean optimizer.lr?"),
    ("training.colour=red", "training.colour=red", "keys of training: steps, seq_len,"),
    ("modell=debug", "modell=debug", "did you mean model?"),
    (
        "launch=slurm launch.extra.reservation=x",
        "launch.extra.reservation=x: is no key of this recipe",
        "with a plus: +launch.extra.reservation=…",
    ),
    ("tracker.tags=[a]", "tracker.tags=[a]", "it belongs to another tracker: try tracker=wandb"),
    ("+foo=3", "foo=3: is no key", "--cfg job"),
    ("++training.foo=3", "training.foo=3: is no key", "keys of training"),
    ("model=debgu", "model=debgu: is no option of this group", "try debug; known: debug, llama2_13b,"),
    ("+recipe=nope", "recipe=nope: is no option of this group", "known: llama2_13b_64gpus_32k, "),
    ("training.steps.x=300", "training.steps.x=300: is no key of this recipe", "did you mean training.steps?"),
    ("+sweeps=nope", "sweeps=nope: is no option of this group", "known: "),
    ("model/x=debug", "model/x=debug: is no key", "did you mean model?"),
    ("hydra/launcher=submitit_slurm", "hydra/launcher=submitit_slurm: would run the points by itself", "launch=slurm"),
    ("hydra/sweeper=optuna", "hydra/sweeper=optuna: would run the points by itself", "launch=slurm"),
    ("hydra/sweeper=spac", "hydra/sweeper=spac: is no option of this group", "try space"),
    ("hydra.launcher.timeout_min=9", "hydra.launcher.timeout_min=9: is no key here", "launch=slurm launch.minutes="),
    ("name=${hydra:job.override_dirname}", "name=${hydra:job.override_dirname}: refers to itself", "leave it out"),
    ("hydra.foo=1", "hydra.foo=1: is no key of Hydra's", "--cfg hydra"),
    ("model.kind=gpt", "model.kind=gpt: says which schema the group has", "choose with model="),
]
TYPES = [
    ("training.steps=abc", "training.steps=abc: must be a whole number", "try 1000"),
    ("training.steps=1.5", "training.steps=1.5: must be a whole number", "try 1000"),
    ("training.steps=null", "training.steps=null: must be a whole number", "try 1000"),
    ("training.steps=", "training.steps=: must be a whole number", "try 1000"),
    ("world=1.0", "world=1.0: must be a whole number or null", "try null"),
    ("optimizer.lr=fast", "optimizer.lr=fast: must be a number", "try 0.0003"),
    ("training.deterministic=maybe", "training.deterministic=maybe: must be true or false", "try false"),
    ("optimizer.betas=0.9", "optimizer.betas=0.9: must be a list of numbers", "try [0.9,0.95]"),
    ("optimizer.betas=[a,b]", "optimizer.betas=[a,b]: must be a list of numbers", "try [0.9,0.95]"),
    ("name=[a]", "name=[a]: must be text", "try run"),
    ("optimizer.schedule=linear", "optimizer.schedule=linear: has keys of its own", "optimizer.schedule.warmup_steps="),
    ("'training={seq_len:x}'", "training.seq_len=x: must be a whole number", "try 512"),
    ("training=3", "training=3: is no option of this group", "known: default"),
    ("model=null", "model=null: is no option of a group", "--help"),
    ("model.dim=???", "model.dim=???: has no value", "give model.dim="),
]
GRAMMAR = [
    ("training.steps", "arguments=training.steps: is no override", "write key=value"),
    ("'seed = 1'", "arguments=seed = 1: cannot be read as an override", "words with dots"),
    ("training.steps=[1", "training.steps=[1: cannot be read as an override", "quote it"),
    ("training.steps=100,200", "training.steps=100,200: is several values", "add -m"),
    ("seed=range(0,3)", "seed=range(0,3): is several values", "add -m"),
    ("~model", "model=???: has no value", "give model="),
    ("~training.steps", "training.steps=: cannot be taken out", "training.steps="),
    ("~nope", "~nope=: takes out what is not there", "--cfg job"),
    ("+training.steps=300", "+training.steps=300: is in the recipe already", "try training.steps=300"),
    ("+model=llama_5m", "+model=llama_5m: is in the recipe already", "try model=llama_5m"),
    ("=3", "arguments=3: is no option of a group", "--help"),
    ("'training.steps=${nope}'", "training.steps=${nope}: Interpolation key 'nope' not found", "${model.dim}"),
    ("'training.steps=${name}'", "training.steps=${name}:", "${model.dim}"),
    ("--nope", "arguments=--nope: is no flag of this verb", "titanlab train --help"),
    ("--cfg nope", "--cfg=nope: invalid choice", "titanlab train --help"),
    ("--cfg", "--cfg=: expected one argument", "titanlab train --help"),
    ("--resolve", "arguments=--resolve: goes with --cfg", "try --cfg job --resolve"),
    ("--cfg job --info", "arguments=data=synthetic --cfg job --info: --cfg and --info do not go together", "one of them"),
    ("--cfg job --package nope", "arguments=data=synthetic --cfg job --package nope: package 'nope' not found", "--help"),
    ("--experimental-rerun x.pickle", "--experimental-rerun=x.pickle: a run is not repeated from a pickle", "try titanlab resume RUN"),
    ("--config-name nope", "--config-name=nope: there is no such config", "--config-dir"),
    ("--config-dir <nope>", "--config-dir=<nope>: is no folder", "folder of groups"),
    ("--config-path <nope>", "--config-path=<nope>: is no folder", "--config-dir"),
    ("-m 'training.steps=interval(1,3)'", "training.steps=interval(1,3): has no end of values", "list some"),
    ("-m hydra.launcher._target_=os.system", "hydra.launcher._target_=os.system: would run the points by itself", "launch=local"),
    ("-m hydra.job.name=a,b", "hydra.job.name=a,b: is Hydra's own", "one value"),
]  # fmt: skip
RANGES = [
    ("name=a/b", "name=a/b: becomes a folder's name", "try a-b"),
    ("sweep=..", "sweep=..: becomes a folder's name", "try run"),
    (f"name={'x' * 101}", "name=" + "x" * 101, "try " + "x" * 100),
    ("seed=-1", "seed=-1: must lie in", "try 0"),
    (f"seed={2**63}", f"seed={2**63}: must lie in", "try 0"),
    ("repeat=-1", "repeat=-1: counts repetitions from 0", "try 0"),
    ("training.steps=0", "training.steps=0: must be at least 1", "try 1000"),
    ("training.global_batch=-8", "training.global_batch=-8: must be at least 1", "try 8"),
    ("training.validate_every=-1", "training.validate_every=-1: must not be negative", "try 0"),
    ("training.max_grad_norm=nan", "training.max_grad_norm=nan: must be positive", "try 1.0, or null"),
    ("optimizer.lr=inf", "optimizer.lr=inf: must be positive and finite", "try 3e-4"),
    ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be two numbers in [0, 1)", "try [0.9,0.95]"),
    ("optimizer.eps=nan", "optimizer.eps=nan: must be positive", "try 1e-8"),
    ("optimizer.weight_decay=-1", "optimizer.weight_decay=-1.0: must be finite and not negative", "try 0.1"),
    ("optimizer.schedule.decay=step", "optimizer.schedule.decay=step: is no decay", "try linear, cosine, sqrt"),
    ("optimizer.schedule.floor=2", "optimizer.schedule.floor=2.0: must lie between 0 and 1", "try 0.1"),
    ("checkpoint.every=-1", "checkpoint.every=-1: must not be negative", "try 0"),
    ("cluster.accelerator=tpu", "cluster.accelerator=tpu: is no accelerator", "try auto, cpu, cuda"),
    ("cluster.peak_tflops=nan", "cluster.peak_tflops=nan: must be a positive number", "try 989, or null"),
    ("launch.threads=0", "launch.threads=0: must be at least 1", "try 1, or null"),
    ("data.vocab_size=1", "data.vocab_size=1: must be between 2 and", "try 2048"),
    ("tracker=wandb tracker.mode=on", "tracker.mode=on: is no mode of wandb", "try auto, online, offline, off"),
    ("tracker=wandb tracker.project=a/b", "tracker.project=a/b: must be 1 to 128 characters", "try tracker.project=titanlab"),
    ("tracker=wandb tracker.finish_seconds=nan", "tracker.finish_seconds=nan: must not be negative", "try 10"),
    ("tracker=tensorboard tracker.flush_seconds=0", "tracker.flush_seconds=0: must be at least 1", "try 10"),
    ("parallelism.reshard_after_forward=maybe", "parallelism.reshard_after_forward=maybe: no such choice", "choose one of auto, always, never"),
    ("training.seq_len=99999999999999999999999", "training.seq_len=99999999999999999999999: must be at most 2,147,483,647", "try 512"),
    ("training.steps=99999999999999999999999999", "training.steps=99999999999999999999999999: must be at most 2,147,483,647", "try 1000"),
    ("model.layers=100000000", "model.layers=100000000: must be at most 10,000", "give a smaller number"),
    (f"model.heads=7 model.dim={2**62}", f"model.dim={2**62}: must be at most 2,147,483,647", "give a smaller number"),
    (f"optimizer.lr={'9' * 400}", "optimizer.lr=9999999", "compare with"),
    ("training.step_timeout_seconds=1e300", "training.step_timeout_seconds=1e+300: must be at most 1,000,000,000", "try null"),
    ("tracker=wandb tracker.finish_seconds=inf", "tracker.finish_seconds=inf: must be a finite number", "try 10.0"),
    ("model.norm_eps=0", "model.norm_eps=0.0: must lie between 0 and 1", "try 1e-5"),
    ("model.rope_theta=1", "model.rope_theta=1.0: must be above 1", "try 10000 (Llama 2)"),
    ("model.attention=fast", "model.attention=fast: no such attention kernel", "auto, flash, cudnn, efficient, math"),
]  # fmt: skip
RULES = [
    ("recipe=quickstart", "recipe=quickstart: is of a group that is not in every recipe", "try +recipe=quickstart"),
    ("model.heads=3", "model.heads=3: must divide dim=64 into heads of even width", "try 2 or 4"),
    ("model.kv_heads=3", "model.kv_heads=3: must divide 4 query heads", "try 2 or 4"),
    ("model.dim=65", "model.dim=65: must be even", "try 256"),
    ("model.attention=cudnn", "model.attention=cudnn: needs a GPU", "try auto, flash or math"),
    ("model.attention=flash_attn", "model.attention=flash_attn: needs a GPU", "try auto, flash or math"),
    ("compile.backend=tvn", "compile.backend=tvn: no such backend", "choose one of inductor"),
    ("compile=block compile.mode=max-autotune", "compile.mode=max-autotune: records CUDA graphs", "try max-autotune-no-cudagraphs"),
    ("compile.mode=max-autotune-no-cudagraphs", "compile.mode=max-autotune-no-cudagraphs: nothing is compiled", "try compile=block"),
    ("compile=block compile.mode=reduce-overhead compile.backend=eager", "compile.mode=reduce-overhead: is a mode of inductor", "try default"),
    ("cluster.accelerator=cuda", "cluster.accelerator=cuda: this host shows no GPU", "try cluster.accelerator=cpu"),
    ("training.microbatch=3", "training.microbatch=3: must divide the 8 sequences", "try 2 or 4"),
    ("training.microbatch=16", "training.microbatch=16: must divide the 8 sequences", "try 4 or 8"),
    ("model.dim=1000000000", "model.dim=1000000000: makes a model of 6.0e+18 parameters", "give a smaller number"),
    ("world=1000000000 parallelism=ddp training.global_batch=1000000000", "world=1000000000: a layout has at most 1,000,000 processes", "give fewer"),
    ("parallelism.pipeline=1000000", "parallelism.pipeline=1000000: 1f1b makes 1000000 stages of it, more than the 2 blocks", "try parallelism.pipeline=1 or 2"),
    ("parallelism.pipeline=2 training.global_batch=2000000000", "parallelism.pipeline=2: makes 2,000,000,000 microbatches of a step", "a larger training.microbatch"),
    ("training.steps=100 optimizer.schedule.warmup_steps=200", "optimizer.schedule.warmup_steps=200: is more than the 100 steps", "try 10"),
    ("data.vocab_size=5000", "model.vocab_size=2048: is smaller than the 5000 tokens", "try model.vocab_size=5000"),
    ("parallelism.cpu_offload=true", "parallelism.cpu_offload=true: moves sharded parameters", "try parallelism.shard=2"),
    ("parallelism=fsdp", "parallelism.shard=-1: says 'the rest' of a world whose size is not given", "try world=2, or"),
    ("parallelism=fsdp world=3", "training.global_batch=8: must be a multiple of the 3 data-parallel", "try 9"),
    ("parallelism=hsdp world=3", "world=3: the other degrees make 2, which does not divide it", "try world=2"),
    ("parallelism.shard=-1 parallelism.replicate=-1 world=4", "parallelism.replicate=-1: only one degree may be -1", "try parallelism.shard=1"),
    ("parallelism.shard=0", "parallelism.shard=0: a degree is at least 1, or -1", "try 1"),
    ("parallelism=fsdp world=0", "world=0: must be at least 1", "try 1, or null"),
    ("world=2", "world=2: the degrees make 1 (all are 1)", "try world=1, or a degree of -1"),
    ("parallelism.shard=2 world=3", "world=3: the degrees make 2 (shard 2)", "try world=2"),
    ("data=c4 data.streams=7 data.vocab_size=2048 parallelism=ddp world=2", "data.streams=7: must be a multiple of the 2", "try 6 or 8"),
    ("runs=", "runs=: names no folder", "try runs"),
    ("runs=<a-file>/runs", "runs=<a-file>/runs: cannot be written", "try runs=~/runs"),
    ("runs=<a-file>", "runs=<a-file>: cannot be written", "try runs=~/runs"),
]  # fmt: skip
FILES = [
    ("data=files", "data.files=: names no file", "data.files=corpus/*.jsonl"),
    ("data=files 'data.files=<nope>/*.txt'", "data.files=<nope>/*.txt: matches no file", "quote a pattern"),
    ("data=files data.files=<empty>", "data.files=<empty>: has no files", "check the path"),
    ("data=files data.files=<zero.txt> data.vocab_size=340", "data.files=<zero.txt>: is empty", "text in them"),
    ("data=files data.files=<torn.jsonl> data.vocab_size=340", "data.files=<torn.jsonl>:2: is not JSON", "JSON object a line"),
    ("data=files data.files=<other.jsonl> data.vocab_size=340", "data.text_field=text: is not in <other.jsonl>:1", "its keys are: body"),
    ("data=files data.files=<latin.txt> data.vocab_size=340", "data.files=<latin.txt>, byte", "iconv"),
    ("data=files data.files=<torn.txt.gz> data.vocab_size=340", "data.files=<torn.txt.gz>: is no whole .gz file", "fetch it again"),
    ("data=files data.files=<a.parquet> data.vocab_size=340", "data.files=<a.parquet>: is no readable parquet", "write it again"),
    ("data=files data.files=<text.txt> data.vocab_size=340 model.vocab_size=330", "model.vocab_size=330: is smaller than the 340 tokens", "try model.vocab_size=340"),
    ("data=files data.files=<text.txt> data.tokenizer=<foreign.model>", "data.tokenizer=<foreign.model>: is no SentencePiece model", "tokenizer.json"),
    ("data=files data.files=<text.txt> data.tokenizer=<foreign.json>", "data.tokenizer=<foreign.json>: is no tokenizer.json", ".model"),
    ("data=files data.files=<text.txt> data.tokenizer=<nope>", "data.tokenizer=<nope>: does not exist", ".model or tokenizer.json"),
    ("data=files data.files=<text.txt> data.tokenizer=<words.json> model.vocab_size=2", "model.vocab_size=2: is smaller than the 3 tokens", "try model.vocab_size=3"),
    ("data=files data.files=<text.txt> data.vocab_size=340 data.validation_fraction=0 training.validate_every=10", "data.validation_fraction=0.0: holds nothing out", "training.validate_every=0"),
    ("data=tokens", "data.folder=: names no folder", "titanlab tokenize"),
    ("data=tokens data.folder=<empty>", "data.folder=<empty>: has no index.json", "titanlab tokenize"),
    ("data=tokens data.folder=<torn-tokens>", "data.folder=<torn-tokens>/train-00000.bin: has 6 bytes, not 2000", "make the folder again"),
    ("data=hf data.path=json", "data.data_files=[]: path=json needs files", "try 'data.data_files=[corpus/*.jsonl]'"),
    ("--config-dir <conf> model=bare", "model=bare: is made without a schema", "begin its YAML with defaults: [llama_schema, _self_]"),
    ("--config-dir <conf> model=extra", "model.foo=: is no key of this recipe, and model/extra.yaml sets it", "keys of model: dim,"),
    ("--config-dir <conf> model=torn", "file=<conf>/model/torn.yaml:2: is no YAML", "mend that line"),
    ("--config-dir <conf> model=lost", "model=nope_schema: there is no such config, which model/lost names", "mend model/lost.yaml"),
    ("--config-dir <conf> --config-name other", "--config-name=other: composes no recipe", "recipe_schema"),
    ("checkpoint.load_from=<nope>", "checkpoint.load_from=<nope>: there is no such folder", "the folder of a run"),
    ("checkpoint.load_from=<empty>", "checkpoint.load_from=<empty>: holds no complete checkpoint", "that has saved one"),
    ("checkpoint.load_from=<saving>", "checkpoint.load_from=<saving>: holds no complete checkpoint", "that has saved one"),
    ("checkpoint.load_from=<torn>", "checkpoint.load_from=<torn>/checkpoints/step-00000300: cannot be read", "another checkpoint"),
    ("checkpoint.load_from=<saved> model.layers=3", "checkpoint.load_from=<saved>/checkpoints/step-00000300: is of another model: layers.2", "choose the model"),
    ("checkpoint.load_from=<saved> training.steps=300", "training.steps=300: the checkpoint", "try 600"),
]  # fmt: skip


@pytest.fixture(scope="module")
def stuff(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that are not what they should be, and a few that are."""
    folder = tmp_path_factory.mktemp("stuff")
    (folder / "empty").mkdir()
    (folder / "a-file").touch()
    (folder / "zero.txt").touch()
    text = "\n".join(f"{n} bottles of beer on the wall, take {n % 7} down and pass them around" for n in range(300))
    (folder / "text.txt").write_text(text)
    (folder / "latin.txt").write_bytes("à la carte".encode("latin-1"))
    (folder / "torn.txt.gz").write_bytes(gzip.compress(text.encode())[:-20])
    (folder / "torn.jsonl").write_text('{"text": "whole"}\n{"text": "to')
    (folder / "other.jsonl").write_text('{"body": "a text"}\n')
    (folder / "a.parquet").write_bytes(b"PAR1 and no more")
    (folder / "foreign.model").write_text("a tokenizer of another kind")
    (folder / "foreign.json").write_text('{"name": "something else"}')
    (folder / "words.json").write_text(json.dumps(words()))
    tokens = folder / "torn-tokens"
    tokens.mkdir()
    (tokens / "train-00000.bin").write_bytes(bytes(6))
    index = {"format": "titanlab-tokens", "version": 1, "dtype": "uint16", "vocab_size": 2048}
    (tokens / "index.json").write_text(json.dumps({**index, "train": [{"file": "train-00000.bin", "tokens": 1000}]}))
    for name, content in {
        "model/bare": "dim: 64",
        "model/extra": "defaults: [llama_schema, _self_]\nfoo: 3",
        "model/torn": "dim: 64\nlayers: [2: 3: 4",
        "model/lost": "defaults: [nope_schema, _self_]\ndim: 64",
        "other": "name: other",
    }.items():
        (folder / "conf" / "model").mkdir(parents=True, exist_ok=True)
        (folder / "conf" / f"{name}.yaml").write_text(content + "\n")
    shapes = {name: list(shape) for name, shape in llama_account.account(debug_model()).parameters.items()}
    for run, position in {
        "saved": json.dumps({"step": 300, "parameters": shapes}),
        "torn": '{"step": 300, "para',
        "saving": None,
    }.items():
        step = folder / run / "checkpoints" / ("step-00000300" if position else "step-00000300.part")
        tiny.write_checkpoint(step, position or "")
    return folder


def debug_model():
    return replace(tiny.recipe("runs").model, vocab_size=2048)


def words() -> dict[str, object]:
    """A tokenizer.json of three words."""
    model = {"type": "WordLevel", "vocab": {"def": 0, "return": 1, "?": 2}, "unk_token": "?"}
    return {"version": "1.0", "model": model, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}


def filled(text: str, stuff: Path) -> str:
    return re.sub(r"<([^>]+)>", lambda name: str(stuff / name[1]), text)


def synthetic(arguments: str) -> list[str]:
    """The words of a case, with the quickest data unless it names another."""
    words = shlex.split(arguments)
    has_data = any(word.startswith(("data=", "--config-name")) for word in words)
    return words if has_data else ["data=synthetic", *words]


FOLLOWED = re.compile(r"did you mean (?P<key>\S+?)\?|\btry (?P<override>\S+?)[,;]?(?: |$)")


def cured(arguments: str, begins: str, cure: str) -> list[str] | None:
    """The words with the cure's override in place of what it mends; None where the cure names none."""
    key, value = re.match(r"\+?([^=]+)=(.*?)(?:: |$)", begins).groups()
    found = FOLLOWED.search(cure)
    # A cure of a flag is a flag, and one wants files, another the hub.
    if found is None or key.startswith(("-", "arguments", "data.data_files", "data.streams")):
        return None
    override = found["override"] or f"{found['key']}={value}"
    override = override if re.match(r"\+?\w[\w.]*=", override) else f"{key}={override}"
    mended = {override.partition("=")[0].lstrip("+"), key if found["key"] else ""}
    # What is mended may be in a mapping: training={steps:x}.
    words = [word for word in synthetic(arguments) if not re.search(rf"={{{key.rpartition('.')[2]}:", word)]
    return [*(word for word in words if word.partition("=")[0].lstrip("+") not in mended), override]


def cured_together() -> list[list[str]]:
    """Mended command lines; those of single keys, none of which says anything of another, share one."""
    alone = [words for case in [*RULES, *FILES] if (words := cured(*case)) is not None]
    shared: list[dict[str, str]] = []
    for case in [*UNKNOWN, *TYPES, *GRAMMAR, *RANGES]:
        given = {word.partition("=")[0]: word for word in cured(*case) or ()}
        line = next((line for line in shared if given and line.items() | given.items() == (line | given).items()), None)
        shared += [] if line is not None or not given else [given]
        if line is not None:
            line.update(given)
    return [*alone, *(list(line.values()) for line in shared)]


@pytest.mark.parametrize(
    ("arguments", "begins", "cure"), [*UNKNOWN, *TYPES, *GRAMMAR, *RANGES, *RULES, *FILES], ids=lambda text: text[:60]
)
def test_it_is_refused(command, stuff, arguments, begins, cure):
    said = command(["train", *synthetic(filled(arguments, stuff))])
    refusal = said.refusal
    assert said.err.startswith(f"error: {filled(begins, stuff)[:100]}")
    assert cure in refusal["cure"]
    # Every cure that can be followed is followed below.
    assert bool(FOLLOWED.search(refusal["cure"])) == bool(FOLLOWED.search(cure)), refusal["cure"]


@pytest.mark.full
@pytest.mark.parametrize("words", cured_together(), ids=lambda words: " ".join(words)[:60])
def test_its_cure_is_accepted(command, stuff, words):
    said = command(["train", *(filled(word, stuff) for word in words)])
    assert (said.code, said.err, len(said.started)) == (0, "", 1)


def test_a_corpus_that_is_too_small_says_how_far_it_goes(command, stuff):
    words = f"train data=files data.files={stuff / 'text.txt'}"
    refusal = command(f"{words} data.vocab_size=2048").refusal
    assert (refusal["key"], refusal["value"]) == ("data.vocab_size", "2048")
    words += " data.vocab_size=" + re.match(r"try (\d+), or give more text", refusal["cure"])[1]
    assert command(words).code == 0
    refusal = command(f"{words} training.seq_len=100000").refusal
    assert refusal["rule"].startswith("the corpus is shorter than one sequence")
    words += " training.seq_len=" + re.match(r"try (\d+) or less", refusal["cure"])[1]
    assert command(words).code == 0


def test_there_are_many():
    cases = [*UNKNOWN, *TYPES, *GRAMMAR, *RANGES, *RULES, *FILES]
    assert len({arguments for arguments, _, _ in cases}) == len(cases) > 100


@pytest.mark.parametrize(
    ("environ", "arguments", "begins", "cure"),
    [
        ({"RANK": "x", "WORLD_SIZE": "4"}, "", "RANK=x: must be a whole number", "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "", "MASTER_PORT=null: is not set", "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "99999"}, "", "MASTER_PORT=99999: is no port", "29500"),
        ({"RANK": "4", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "", "RANK=4: must lie in [0, 4)", "torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "world=2", "world=2: 4 processes were started", "try world=4, or null"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "1"}, "parallelism.shard=2", "WORLD_SIZE=4: the degrees", "let one degree be -1"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_PORT": "1"}, "parallelism=fsdp", "training.global_batch=8", "try 9"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "x"}, "", "SLURM_STEP_NUM_TASKS=x: must be a whole number", "srun"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "", "SLURM_PROCID=null: is not set", "srun"),
        ({"TITANLAB_CACHE": "<a-file>"}, "data=files data.files=<text.txt> data.vocab_size=340", "TITANLAB_CACHE=<a-file>: cannot be written", "export TITANLAB_CACHE="),
        ({"TITANLAB_CACHE": "<a-file>/x"}, "data=files data.files=<text.txt> data.vocab_size=340", "TITANLAB_CACHE=<a-file>/x: cannot be written", "export TITANLAB_CACHE="),
    ],
    ids=str,
)  # fmt: skip
def test_an_environment_that_cannot_be(command, stuff, environ, arguments, begins, cure):
    environ = {name: filled(value, stuff) for name, value in environ.items()}
    said = command(["train", *synthetic(filled(arguments, stuff))], **environ)
    assert said.err.startswith(f"error: {filled(begins, stuff)}")
    assert cure in said.refusal["cure"]


def test_a_host_with_fewer_gpus_than_the_recipe_wants(command, monkeypatch):
    monkeypatch.setattr(
        "titanlab.launch.execute.this_host", lambda: Host(accelerator="cuda", device="NVIDIA H200", count=2)
    )
    said = command("train data=synthetic parallelism=fsdp world=4")
    assert said.err == "error: world=4: this host has 2 GPUs; try world=2\n"
    assert command("train data=synthetic parallelism=fsdp world=2").started[0].cluster.device == "NVIDIA H200"
    said = command("train data=synthetic model.attention=flash")
    assert said.err.startswith("error: model.attention=flash: computes in 16 bits only on a GPU")
    assert command("train data=synthetic model.attention=flash precision=bf16").code == 0


def test_a_host_with_too_little_memory(command, monkeypatch):
    small = Host(accelerator="cpu", device="cpu", count=2, memory_bytes=2**30)
    for module in ("titanlab.launch.execute", "titanlab.sweep.plan"):
        monkeypatch.setattr(f"{module}.this_host", lambda: small)
    for line in ("train model=llama3_8b", "train -m model=llama3_8b seed=0,1"):
        said = command(f"{line} data=synthetic data.vocab_size=2048")
        assert said.refusal["key"] == "model"
        assert "8,030,261,248 parameters and their gradients take at least 59.8 GiB here" in said.err
    # What is composed for another machine is composed here.
    assert command("train model=llama3_1_405b --cfg job").code == 0


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_whose_package_is_not_installed(command, monkeypatch, tracker):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = command(f"train data=synthetic tracker={tracker}")
    assert (
        said.err
        == f"error: tracker={tracker}: the package is not installed; pip install {tracker}, or try tracker=jsonl\n"
    )
    assert said.refusal


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        ("-m training.steps=300,0,200", "training.steps=0: must be at least 1"),
        ("-m training.steps=300,x", "training.steps=x: must be a whole number"),
        ("-m model=debug,nope", "model=nope: is no option of this group"),
        ("-m training.stepz=1,2", "training.stepz=1,2: is no key of this recipe"),
        ("-m training.global_batch=8,6 parallelism=fsdp world=4", "training.global_batch=6: must be a multiple"),
        ("-m checkpoint.load_from=null,<nope>", "checkpoint.load_from=<nope>: there is no such folder"),
        ("-m runs=<a-file> seed=0,1", "runs=<a-file>: cannot be written"),
        ("-m runs=runs,runs2", "runs=runs,runs2: is one for the whole sweep"),
    ],
)
def test_one_bad_point_among_good_ones_starts_none(command, stuff, arguments, begins):
    said = command(["train", *synthetic(filled(arguments, stuff))])
    assert said.refusal
    assert said.err.startswith(f"error: {filled(begins, stuff)}")


def test_a_bad_point_is_told_before_the_data_of_a_good_one_is_prepared(command, stuff):
    said = command(f"train -m data=files data.files={stuff / 'text.txt'} data.vocab_size=341 seed=0,-1")
    assert said.refusal["key"] == "seed"
    assert said.out == ""


@pytest.mark.parametrize(
    ("line", "begins", "cure"),
    [
        ("trian", "verb=trian: there is no such verb", "try train; known: train, sweep,"),
        ("--verbose", "verb=--verbose: there is no such verb", "known: train, sweep,"),
        ("completion fish", "completion=fish: is no shell", "try bash"),
        ("completion bash now", "completion=bash now: is no shell", "try bash"),
        ("tokenize", "arguments=: the following arguments are required: files, folder", "titanlab tokenize --help"),
        ("tokenize '<nope>/*.txt' out", "files=<nope>/*.txt: matches no file", "quote a pattern"),
        ("tokenize <text.txt> <a-file>", "folder=<a-file>: is there already", "name another"),
        ("tokenize <text.txt> out --vocab-size few", "--vocab-size=few: must be a whole number", "titanlab tokenize --help"),
        ("tokenize <text.txt> out --tokenizer <foreign.model>", "--tokenizer=<foreign.model>: is no SentencePiece model", ".model"),
        ("schedule 1f1b --forward 1e-9", "--forward=1e-09: makes the longest duration more than 1,000 times the shortest", "try 1"),
        ("schedule 1f1b --transfer 1e308", "--transfer=1e+308: makes the longest duration", "try 1"),
        ("schedule 1f1b --ranks 99999999999999999999", "--ranks=99999999999999999999: must be at most 9,223,372,036,854,775,807", "schedule --help"),
        ("export run --into out --shard-size 1e400GB", "--shard-size=1e400GB: is no size of a file", "try 5GB"),
        ("download-tokenizer", "arguments=: the following arguments are required: repo", "--help"),
        ("download-tokenizer a/b/c", "repo=a/b/c: is no model of the hub", "<owner>/<model>"),
    ],
    ids=str,
)  # fmt: skip
def test_other_verbs(command, stuff, line, begins, cure):
    line, begins = (re.sub(r"<(?!owner|model>)", "<", text) for text in (line, begins))
    said = command(filled(line, stuff))
    assert said.err.startswith(f"error: {filled(begins, stuff)}")
    assert cure in said.refusal["cure"]


@pytest.mark.parametrize(
    ("arguments", "environ", "begins"),
    [
        ("train data=synthetic training.stepz=3", {}, "training.stepz=3: is no key"),
        ("train --nope", {}, "arguments=--nope: is no flag"),
        ("generate nope", {"HYDRA_FULL_ERROR": "1"}, "run=nope: fits no run"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                ("train data=synthetic parallelism=fsdp world=3", {}, "training.global_batch=8: must be a multiple"),
                ("train data=synthetic runs=/dev/null/runs", {}, "runs=/dev/null/runs: cannot be written"),
                ("train -m data=synthetic training.steps=200,0", {}, "training.steps=0: must be at least 1"),
                ("train data=synthetic", {"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a whole number"),
            ]
        ),
    ],
    ids=str,
)
def test_as_processes(refused_as_process, here, arguments, environ, begins):
    refused_as_process(*shlex.split(arguments), begins=begins, environ=environ)
    assert list(here.iterdir()) == []
