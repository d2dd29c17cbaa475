"""Weights: `titanlab import` and `titanlab export` convert them, `titanlab generate` writes text with them."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from titanlab.checkpoint.address_schema import Place
from titanlab.checkpoint.folders import METADATA, find, has_pickle, read_while_kept
from titanlab.cli.arguments import Arguments, bytes_of
from titanlab.cli.compose import compose
from titanlab.distributed.host import this_host
from titanlab.errors import ConfigError
from titanlab.recipe.compose import conf_folder
from titanlab.records.run_search import find_run
from titanlab.system.files import user_path
from titanlab.system.terminal import Console
from titanlab.system.text import harmless_lines
from titanlab.techniques.model.contract import ModelConfig
from titanlab.train.hub_folders import fetch_model
from titanlab.train.interchange import (
    WeightsOrigin,
    checkpoint_of,
    from_dcp,
    from_folder,
    from_run,
    is_weights,
    write_hf,
    write_ours,
)
from titanlab.train.weights_folder import DTYPES, check_apart, check_target, left_out, whole_folder

_KEY = "source"


def import_verb(arguments: Sequence[str]) -> int:
    """Convert the weights, and print how to train from them."""
    parser = Arguments("import", "Convert weights of Hugging Face or of torch.distributed.checkpoint, for init_from.")
    about = "a folder with config.json and safetensors, a model of the hub (owner/name), or a folder with .metadata"
    parser.add_argument("source", help=about)
    parser.add_argument(
        "overrides", nargs="*", metavar="model.KEY=VALUE", help="sizes of the model of a folder with .metadata"
    )
    parser.add_argument("--model", help="of a folder with .metadata, which has no config: the model's option")
    parser.add_argument("--into", type=user_path, help="the folder to make (default weights/NAME)")
    parser.add_argument("--name", help="of the model's option, model=NAME (default: from the source's name)")
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub")
    parser.add_argument(
        "--token", help="of the hub, for gated models (default: HF_TOKEN, or what `hf auth login` kept)"
    )
    parser.add_argument("--shard-size", default="5GB", help="most bytes of a file (default 5GB)")
    parser.add_argument("--force", action="store_true", help="replace weights that are there")
    args = parser.parse_args(arguments)
    shard_bytes = bytes_of(args.shard_size, "--shard-size")
    name = option_name(args.name, args.source)
    into = args.into or Path("weights", name)
    check_target(into, is_weights, force=args.force)
    with Console() as console:
        origin = _origin(args, into, console)
        line = write_ours(origin, into, name=name, dtype=None, shard_bytes=shard_bytes, report=console.note)
        console.note(line)
    return 0


def _origin(args: argparse.Namespace, into: Path, console: Console) -> WeightsOrigin:
    folder = _folder(args.source, args.revision, args.token, console)
    check_apart(folder, into)
    if has_pickle(folder):
        return from_dcp(folder, _model(args.model, args.overrides, folder), _KEY)
    for key, value in (("--model", args.model), ("model.KEY=VALUE", " ".join(args.overrides))):
        if value:
            raise ConfigError(key, value, f"is of a folder with {METADATA}; {folder} names its model", "leave it out")
    return from_folder(folder, _KEY)


def _model(option: str | None, overrides: Sequence[str], folder: Path) -> ModelConfig:
    """The model of a folder that names none."""
    if option is None:
        rule = f"is not given, and {folder} does not name its model"
        raise ConfigError("--model", None, rule, "give the model's option, say --model llama3_1_8b")
    for override in overrides:
        if not override.startswith("model."):
            raise ConfigError("model.KEY=VALUE", override, "is no size of the model", "try model.layers=4")
    (recipe,) = compose([f"model={option}", *overrides])
    return recipe.model


def _folder(source: str, revision: str | None, token: str | None, console: Console) -> Path:
    path = user_path(source)
    if path.exists():
        if revision is not None:
            raise ConfigError("--revision", revision, "is of a model of the hub, and this is a folder", "leave it out")
        return path
    owner, slash, name = source.partition("/")
    if not (owner and slash and name) or "/" in name or owner.startswith((".", "~")):
        cure = "give a folder of Hugging Face's, or a model of its hub as owner/name"
        raise ConfigError(_KEY, source, "there is no such folder", cure)
    return fetch_model(source, revision=revision, token=token, key=_KEY, report=console.note)


def option_name(name: str | None, source: str) -> str:
    """A name for the model's option that Hydra accepts and titanlab's own options, found first, do not have."""
    own = {path.stem for path in (conf_folder() / "model").glob("*.yaml")}
    if name is not None:
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise ConfigError("--name", name, "becomes model=NAME: letters, digits and _", "try my_model")
        if name.lower() == "null":
            raise ConfigError("--name", name, "as model=NAME is no model", f"try {name}_imported")
        if name in own:
            raise ConfigError("--name", name, "is an option of titanlab's own", f"try {name}_imported")
        return name
    derived = re.sub(r"[^a-z0-9]+", "_", user_path(source).absolute().name.lower()).strip("_") or "model"
    return f"{derived}_imported" if derived in {*own, "null"} else derived


_FORMATS = ("hf", "titanlab", "dcp")
_SHARD_SIZE = "5GB"
# Before the names of parameters.
_PREFIXES = {"titanlab": "model.", "torchtitan": ""}


def export_verb(arguments: Sequence[str]) -> int:
    """Write the weights, and print how to open them."""
    parser = Arguments("export", "Write a run's weights, or an imported folder's, for transformers or for init_from.")
    parser.add_argument("run", help="a run's folder, name or hash, one of its checkpoints, or an imported folder")
    parser.add_argument("--into", type=user_path, required=True, help="the folder to make")
    parser.add_argument("--format", default="hf", help="hf, titanlab or dcp (default hf)")
    parser.add_argument(
        "--names", default="titanlab", help="of parameters in dcp: titanlab or torchtitan (model. or none)"
    )
    parser.add_argument("--dtype", help=f"{', '.join(DTYPES.values())} (default: as saved)")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the latest)")
    parser.add_argument("--shard-size", help="most bytes of a file (default 5GB)")
    parser.add_argument("--name", help="of the model's option, for --format titanlab (default: from --into)")
    parser.add_argument("--force", action="store_true", help="replace weights that are there")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    for key, known in (("format", _FORMATS), ("dtype", DTYPES.values()), ("names", _PREFIXES)):
        value = getattr(args, key)
        if value is not None and value not in known:
            raise ConfigError(f"--{key}", value, "is none that can be written", f"choose one of {', '.join(known)}")
    _check_format(args)
    with Console() as console:
        return _export_dcp(args, console) if args.format == "dcp" else _export(args, console)


def _check_format(args: argparse.Namespace) -> None:
    """Refuse flags that the format does not know."""
    kinds = {
        "--names": (args.names if args.names != "titanlab" else None, ("dcp",)),
        "--shard-size": (args.shard_size, ("hf", "titanlab")),
        "--force": (args.force or None, ("hf", "titanlab")),
        "--name": (args.name, ("titanlab",)),
    }
    for key, (value, formats) in kinds.items():
        if value is not None and args.format not in formats:
            rule = f"is of --format {' or '.join(formats)}, and the format is {args.format}"
            raise ConfigError(key, value, rule, "leave it out")


def _export(args: argparse.Namespace, console: Console) -> int:
    """Write the model's weights."""
    shard_bytes = bytes_of(args.shard_size or _SHARD_SIZE, "--shard-size")
    name = option_name(args.name, str(args.into))
    check_target(args.into, is_weights, force=args.force)
    folder = user_path(args.run)
    if is_weights(folder):
        if args.step is not None:
            raise ConfigError("--step", args.step, "is of a run, and this is a folder of weights", "leave it out")
        check_apart(folder, args.into)
        _write(from_folder(folder, "run"), args, console, name=name, shard_bytes=shard_bytes)
        return 0

    def write(checkpoint: Place) -> None:
        origin = from_run(args.run, args.runs, step=args.step, checkpoint=checkpoint)
        _write(origin, args, console, name=name, shard_bytes=shard_bytes)

    read_while_kept(lambda: checkpoint_of(args.run, args.runs, step=args.step), write, console.warn)
    return 0


def _write(origin: WeightsOrigin, args: argparse.Namespace, console: Console, *, name: str, shard_bytes: int) -> None:
    if args.format == "titanlab":
        line = write_ours(origin, args.into, name=name, dtype=args.dtype, shard_bytes=shard_bytes, report=console.note)
        console.note(line)
    else:
        write_hf(origin, args.into, dtype=args.dtype, shard_bytes=shard_bytes, report=console.note)
        console.note(f"AutoModelForCausalLM.from_pretrained({str(args.into)!r})")


def _export_dcp(args: argparse.Namespace, console: Console) -> int:
    """Write a run's whole checkpoint, optimizer included, for tools that read torch.distributed.checkpoint."""
    if args.dtype is not None:
        raise ConfigError("--dtype", args.dtype, "a checkpoint keeps its dtypes with --format dcp", "leave it out")
    checkpoint_of(args.run, args.runs, step=args.step)
    if args.into.exists() and (not args.into.is_dir() or any(args.into.iterdir())):
        raise ConfigError("--into", args.into, "is not an empty folder", "give a new folder")
    # Imported here, so that a mistake in the arguments is reported without waiting for torch.
    from titanlab.train.dcp_tensors import write_dcp

    prefix = _PREFIXES[args.names]

    def write(checkpoint: Place) -> str:
        # With titanlab's names the folder has a position.json, which has the biases.
        origin = from_run(args.run, args.runs, step=None, checkpoint=checkpoint) if prefix == "" else None
        with whole_folder(args.into) as part:
            write_dcp(checkpoint, part, "run", prefix=prefix)
        return left_out(origin.source.biases) if origin else ""

    line = read_while_kept(lambda: checkpoint_of(args.run, args.runs, step=args.step), write, console.warn)
    if line:
        console.note(line)
    console.note(f"torch.distributed.checkpoint.load(state, checkpoint_id={str(args.into)!r})")
    return 0


def generate_verb(arguments: Sequence[str]) -> int:
    """Print the prompt, and then the generated text as it is sampled."""
    parser = Arguments("generate", "Write text with a run's latest checkpoint, or with weights of a folder.")
    parser.add_argument("run", help="the run's folder, name, or the first digits of its hash; or a folder of weights")
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument("--tokens", type=int, default=200, help="tokens at most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="among this many likeliest; 0: all (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    parser.add_argument("--runs", default="runs", help="the folder of runs (default runs)")
    args = parser.parse_args(arguments)
    for name, least in (("tokens", 1), ("temperature", 0), ("top_k", 0), ("seed", 0)):
        # `not … >=`, because `nan < least` is False.
        if not getattr(args, name) >= least:
            raise ConfigError(
                f"--{name.replace('_', '-')}", getattr(args, name), f"must be at least {least}", f"try {least}"
            )
    _check_device(args.device)
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


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError("--device", device, "is no device", "try cpu or cuda")
    if device == "cuda" and this_host().accelerator != "cuda":
        raise ConfigError("--device", device, "this host shows no GPU", "try cpu")
