"""Weights: `titanlab import` and `titanlab export` convert them, `titanlab generate` writes text with them."""

from __future__ import annotations

import itertools
import re
import sys
from argparse import Namespace
from pathlib import Path

from titanlab.checkpoint import METADATA, Place, find, has_pickle, read_while_kept
from titanlab.cli.arguments import bytes_of
from titanlab.cli.compose import compose
from titanlab.distributed import this_host
from titanlab.errors import ConfigError
from titanlab.recipe import conf_folder
from titanlab.records import find_run
from titanlab.system import Console, harmless_lines, user_path
from titanlab.train import (
    DTYPES,
    WeightsSource,
    check_apart,
    check_target,
    checkpoint_of,
    fetch_model,
    from_dcp,
    from_folder,
    from_run,
    is_weights,
    left_out,
    whole_folder,
    write_hf,
    write_ours,
)

_KEY = "source"


def import_verb(args: Namespace) -> int:
    shard_bytes = bytes_of(args.shard_size, "--shard-size")
    name = option_name(args.name, args.source)
    into = args.into or Path("weights", name)
    check_target(into, is_weights, force=args.force)
    with Console() as console:
        source = _source(args, into, console)
        line = write_ours(source, into, name=name, dtype=None, shard_bytes=shard_bytes, report=console.note)
        console.note(line)
    return 0


def _source(args: Namespace, into: Path, console: Console) -> WeightsSource:
    folder = user_path(args.source)
    if not folder.exists():
        owner, slash, name = args.source.partition("/")
        if not (owner and slash and name) or "/" in name or owner.startswith((".", "~")):
            cure = "give a folder of Hugging Face's, or a model of its hub as owner/name"
            raise ConfigError(_KEY, args.source, "there is no such folder", cure)
        folder = fetch_model(args.source, revision=args.revision, token=args.token, key=_KEY, report=console.note)
    elif args.revision is not None:
        raise ConfigError("--revision", args.revision, "applies to a model of the hub, not to a folder", "leave it out")
    check_apart(folder, into)
    if has_pickle(folder):
        if args.model is None:
            rule = f"is not given, and {folder} does not name its model"
            raise ConfigError("--model", None, rule, "give the model's option, say --model llama3_1_8b")
        for override in args.overrides:
            if not override.startswith("model."):
                raise ConfigError("model.KEY=VALUE", override, "is not a key of the model", "try model.layers=4")
        (recipe,) = compose([f"model={args.model}", *args.overrides])
        return from_dcp(folder, recipe.model, _KEY)
    for key, value in (("--model", args.model), ("model.KEY=VALUE", " ".join(args.overrides))):
        if value:
            rule = f"is for a folder with {METADATA} only; {folder} names its model itself"
            cure = "leave it out" if key == "--model" or "=" in value else f"for the new folder, try --into {value}"
            raise ConfigError(key, value, rule, cure)
    return from_folder(folder, _KEY)


def option_name(name: str | None, source: str) -> str:
    """A name for the model's option: Hydra accepts the name, and titanlab itself has no option of that name."""
    own = {path.stem for path in (conf_folder() / "model").glob("*.yaml")}
    if name is not None:
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise ConfigError("--name", name, "becomes model=NAME: letters, digits and _", "try my_model")
        if name.lower() == "null" or name in own:
            rule = "is an option of titanlab's own" if name in own else "cannot be chosen: model=null means no model"
            raise ConfigError("--name", name, rule, f"try {name}_imported")
        return name
    derived = re.sub(r"[^a-z0-9]+", "_", user_path(source).absolute().name.lower()).strip("_") or "model"
    return f"{derived}_imported" if derived in {*own, "null"} else derived


_FORMATS = ("hf", "titanlab", "dcp")
_SHARD_SIZE = "5GB"
# Flags that only some formats take → the flag's default, and these formats.
_OF_FORMATS = {
    "names": ("titanlab", ("dcp",)),
    "shard_size": (None, ("hf", "titanlab")),
    "force": (False, ("hf", "titanlab")),
    "name": (None, ("titanlab",)),
}
# Value of --names → the prefix of parameters' names.
_PREFIXES = {"titanlab": "model.", "torchtitan": ""}


def export_verb(args: Namespace) -> int:
    for key, known in (("format", _FORMATS), ("dtype", DTYPES.values()), ("names", _PREFIXES)):
        value = getattr(args, key)
        if value is not None and value not in known:
            raise ConfigError(f"--{key}", value, "cannot be written", f"choose one of {', '.join(known)}")
    for name, (default, formats) in _OF_FORMATS.items():
        if (value := getattr(args, name)) != default and args.format not in formats:
            rule = f"applies to --format {' or '.join(formats)}, and the format is {args.format}"
            raise ConfigError(f"--{name.replace('_', '-')}", value, rule, "leave it out")
    with Console() as console:
        return _export_dcp(args, console) if args.format == "dcp" else _export(args, console)


def _export(args: Namespace, console: Console) -> int:
    shard_bytes = bytes_of(args.shard_size or _SHARD_SIZE, "--shard-size")
    name = option_name(args.name, str(args.into))
    check_target(args.into, is_weights, force=args.force)
    folder = user_path(args.run)
    common = {"dtype": args.dtype, "shard_bytes": shard_bytes, "report": console.note}

    def write(source: WeightsSource) -> None:
        if args.format == "titanlab":
            console.note(write_ours(source, args.into, name=name, **common))
        else:
            write_hf(source, args.into, **common)
            console.note(f"AutoModelForCausalLM.from_pretrained({str(args.into)!r})")

    if is_weights(folder):
        if args.step is not None:
            raise ConfigError("--step", args.step, "applies to a run, not to a folder of weights", "leave it out")
        check_apart(folder, args.into)
        write(from_folder(folder, "run"))
        return 0
    read_while_kept(
        lambda: checkpoint_of(args.run, args.runs, step=args.step),
        lambda checkpoint: write(from_run(args.run, args.runs, checkpoint)),
        console.warn,
    )
    return 0


def _export_dcp(args: Namespace, console: Console) -> int:
    """Write a run's whole checkpoint, optimizer included, for tools that read torch.distributed.checkpoint."""
    if args.dtype is not None:
        raise ConfigError("--dtype", args.dtype, "a checkpoint keeps its dtypes with --format dcp", "leave it out")
    checkpoint_of(args.run, args.runs, step=args.step)
    if args.into.exists() and (not args.into.is_dir() or any(args.into.iterdir())):
        raise ConfigError("--into", args.into, "is not an empty folder", "give a new folder")
    # Imported here, so that a mistake in the arguments is reported without waiting for torch.
    from titanlab.train import write_dcp

    prefix = _PREFIXES[args.names]

    def write(checkpoint: Place) -> str:
        # Report left-out biases only for torchtitan's names: with titanlab's names, position.json contains them.
        source = from_run(args.run, args.runs, checkpoint) if prefix == "" else None
        with whole_folder(args.into) as part:
            write_dcp(checkpoint, part, prefix=prefix)
        return left_out(source.biases) if source else ""

    if line := read_while_kept(lambda: checkpoint_of(args.run, args.runs, step=args.step), write, console.warn):
        console.note(line)
    console.note(f"torch.distributed.checkpoint.load(state, checkpoint_id={str(args.into)!r})")
    return 0


def generate_verb(args: Namespace) -> int:
    for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        # `not … >=`, because `nan < least` is False.
        if not getattr(args, name) >= least:
            rule = f"must be at least {least}"
            raise ConfigError(f"--{name.replace('_', '-')}", getattr(args, name), rule, f"try {least}")
    if args.device not in ("cpu", "cuda"):
        raise ConfigError("--device", args.device, "is not a device", "try cpu or cuda")
    if args.device == "cuda" and this_host().accelerator != "cuda":
        raise ConfigError("--device", args.device, "this host shows no GPU", "try cpu")
    folder = user_path(args.run)
    if not is_weights(folder):
        folder = find_run(args.run, args.runs).path
        find(str(folder), "run")
    # Imported here, so that a mistake in the arguments is reported without waiting for torch.
    from titanlab.train.generate import generate

    pieces = generate(
        folder,
        args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        device=args.device,
        warn=Console().warn,
    )
    pieces = itertools.chain([args.prompt + next(pieces, "")], pieces, ["\n"])
    for piece in pieces:
        print(harmless_lines(piece) if sys.stdout.isatty() else piece, end="", flush=True)
    return 0
