"""`titanlab import PATH_OR_ID`: convert a model's weights, for `titanlab train init_from=…`.

They can be in the form of Hugging Face, or in a folder of torch.distributed.checkpoint, say one that torchtitan saved.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from titanlab.checkpoint.folders import has_pickle
from titanlab.checkpoint.older.metadata import METADATA
from titanlab.cli.arguments import Arguments, bytes_of
from titanlab.cli.compose import compose
from titanlab.errors import ConfigError
from titanlab.model.contract import ModelConfig
from titanlab.recipe.composition.recipes import conf_folder
from titanlab.system.files import user_path
from titanlab.system.terminal import Console
from titanlab.train.hub_folders import fetch_model
from titanlab.train.interchange import Origin, from_dcp, from_folder, is_weights, write_ours
from titanlab.train.weights_folder import check_apart, check_target

_KEY = "source"


def main(arguments: Sequence[str]) -> int:
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


def _origin(args: argparse.Namespace, into: Path, console: Console) -> Origin:
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
