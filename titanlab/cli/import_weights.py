"""`titanlab import PATH_OR_ID`: convert a Hugging Face model's weights, for `titanlab train init_from=…`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from titanlab.cli.arguments import Arguments, bytes_of
from titanlab.errors import ConfigError
from titanlab.recipe.composition.recipes import conf_folder
from titanlab.weights.folder_writer import check_apart, check_target
from titanlab.weights.huggingface.download import fetch_model
from titanlab.weights.interchange import is_weights, write_ours
from titanlab.weights.origin import from_folder

_KEY = "source"


def main(arguments: Sequence[str]) -> int:
    """Convert the weights, and print how to train from them."""
    parser = Arguments("import", "Take over the weights of a Hugging Face model, from a folder or from the hub.")
    parser.add_argument("source", help="a folder with config.json and safetensors, or a model of the hub: owner/name")
    parser.add_argument("--into", type=Path, help="the folder to make (default weights/NAME)")
    parser.add_argument("--name", help="of the model's option, model=NAME (default: from the source's name)")
    parser.add_argument("--revision", help="branch, tag or commit of a model of the hub")
    parser.add_argument(
        "--token", help="of the hub, for gated models (default: HF_TOKEN, or what `hf auth login` kept)"
    )
    parser.add_argument("--shard-size", default="5GB", help="most bytes of a file (default 5GB)")
    parser.add_argument("--force", action="store_true", help="replace weights that are there")
    given = parser.parse_args(arguments)
    shard_bytes = bytes_of(given.shard_size, "--shard-size")
    name = option_name(given.name, given.source)
    into = given.into or Path("weights", name)
    check_target(into, is_weights, force=given.force)
    folder = _folder(given.source, given.revision, given.token)
    check_apart(folder, into)
    origin = from_folder(folder, _KEY)
    print(write_ours(origin, into, name=name, dtype=None, shard_bytes=shard_bytes, report=print))
    return 0


def _folder(source: str, revision: str | None, token: str | None) -> Path:
    path = Path(source).expanduser()
    if path.exists():
        if revision is not None:
            raise ConfigError("--revision", revision, "is of a model of the hub, and this is a folder", "leave it out")
        return path
    owner, slash, name = source.partition("/")
    if not (owner and slash and name) or "/" in name or owner.startswith((".", "~")):
        cure = "give a folder of Hugging Face's, or a model of its hub as owner/name"
        raise ConfigError(_KEY, source, "there is no such folder", cure)
    return fetch_model(source, revision=revision, token=token, key=_KEY, report=print)


def option_name(given: str | None, source: str) -> str:
    """A name for the model's option that Hydra accepts and titanlab's own options, found first, do not have."""
    own = {path.stem for path in (conf_folder() / "model").glob("*.yaml")}
    if given is not None:
        if not re.fullmatch(r"[A-Za-z0-9_]+", given):
            raise ConfigError("--name", given, "becomes model=NAME: letters, digits and _", "try my_model")
        if given in own:
            raise ConfigError("--name", given, "is an option of titanlab's own", f"try {given}_imported")
        return given
    name = re.sub(r"[^a-z0-9]+", "_", Path(source).expanduser().absolute().name.lower()).strip("_") or "model"
    return f"{name}_imported" if name in own else name
