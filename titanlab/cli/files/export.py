"""`titanlab export RUN_OR_FOLDER`: write weights for transformers, or a weights folder of titanlab."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from titanlab.checkpoint.remote.address_schema import Place
from titanlab.checkpoint.search import read_while_kept
from titanlab.cli.arguments import Arguments, bytes_of
from titanlab.cli.files.import_weights import option_name
from titanlab.errors import ConfigError
from titanlab.system.files import user_path
from titanlab.system.terminal import Console
from titanlab.train.interchange import Origin, checkpoint_of, from_folder, from_run, is_weights, write_hf, write_ours
from titanlab.train.weights_folder import check_apart, check_target, whole_folder
from titanlab.train.weights_source import DTYPES, left_out

_FORMATS = ("hf", "titanlab", "dcp")
_SHARD_SIZE = "5GB"
# Before the names of parameters.
_PREFIXES = {"titanlab": "model.", "torchtitan": ""}


def main(arguments: Sequence[str]) -> int:
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


def _write(origin: Origin, args: argparse.Namespace, console: Console, *, name: str, shard_bytes: int) -> None:
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
    from titanlab.checkpoint.dcp_export import write_dcp

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
